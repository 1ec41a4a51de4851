# SPDX-License-Identifier: Apache-2.0
"""The program for torchft in examples/ranks, with torchft's own lighthouse: replicas join and
die, and every sample is trained on once, in one order.

The oracle is the order that one rank reads without an interruption.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import DataLoader, Ranks

pytest.importorskip("torchft", reason="torchft is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "ranks" / "torchft_replicas.py"
SECONDS_MAX, STEPS, STEP_SIZE = 100, 300, 12


class Replica:
    def __init__(self, number: int, lighthouse: str, folder: Path, workers: int) -> None:
        self.out = folder / f"replica-{number}"
        options = ["--lighthouse", lighthouse, "--steps", str(STEPS), "--workers", str(workers)]
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, *options, "--pause", str(folder / "pause")],
            stdout=self.out.open("w"),
            stderr=(folder / f"errors-{number}").open("w"),
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )

    def lines(self) -> list[dict[str, Any]]:
        text = self.out.read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def step(self) -> int:
        """Return the number of the last step that was begun, from 1."""
        return max((line["step"] + 1 for line in self.lines() if "x" in line), default=0)

    def size(self) -> int:
        return next((line["size"] for line in reversed(self.lines()) if "x" in line), 0)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000
    )
    yield server.address()
    server.shutdown()


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_replicas_that_join_and_die_train_on_each_sample_once(
    workers: int, lighthouse: str, tmp_path: Path
) -> None:
    (tmp_path / "pause").touch()  # a step takes a while, until this file is gone
    replicas = [Replica(number, lighthouse, tmp_path, workers) for number in range(3)]
    others = [replicas[0], replicas[2]]
    try:
        # The one that starts first trains alone, and the others join it.
        wait_for(lambda: all(one.size() == 3 for one in replicas), "three replicas train")
        replicas[1].process.kill()
        replicas[1].process.wait()
        wait_for(lambda: all(one.size() == 2 for one in others), "two replicas train")
        (tmp_path / "pause").unlink()
        codes = [one.process.wait(SECONDS_MAX) for one in others]
        errors = [(tmp_path / f"errors-{number}").read_text() for number in range(3)]
        assert codes == [0, 0], errors
    finally:
        for one in replicas:
            one.process.kill()
            one.process.wait()
    check(replicas)


def check(replicas: list[Replica]) -> None:
    committed: dict[int, int] = {}  # the number of replicas of each step
    given: dict[tuple[int, int, int], list[Any]] = {}
    for line in [line for one in replicas for line in one.lines()]:
        if "committed" in line:
            assert committed.setdefault(line["step"], line["size"]) == line["size"]
        elif "x" in line:
            place = (line["step"], line["size"], line["rank"])
            assert given.setdefault(place, line["x"]) == line["x"], "a repeated step is the same"
    assert sorted(committed) == [*range(STEPS)]
    assert {2, 3} <= {*committed.values()}
    spec = importlib.util.spec_from_file_location("task", PROGRAM.with_name("task.py"))
    assert spec is not None and spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    alone = DataLoader(
        task.NoisyPoints(), shuffle=True, ranks=Ranks(0, 1, global_batch_size=STEP_SIZE)
    )
    expected = [batch["x"].tolist() for _ in range(1 + STEPS // len(alone)) for batch in alone]
    for step, size in committed.items():
        rows = [row for rank in range(size) for row in given[step, size, rank]]
        assert rows == expected[step], f"step {step} of {size} replicas"
