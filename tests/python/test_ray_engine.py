# SPDX-License-Identifier: Apache-2.0
"""Workers as actors of a real Ray cluster: the stream stays exact whatever becomes of them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_pools import Elastic, expected
from pool_processes import SECONDS_MAX

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]


class RayPool(Elastic):
    """Two nodes of two workers each, and a head of none."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        super().__init__(folder, monkeypatch, "--resource", "dataworker=1", title="ray")
        self._cluster = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._cluster.stdout is not None
        lines = iter(self._cluster.stdout.readline, "")
        address = next(line for line in lines if line.startswith("address ")).split()[1]
        self._engine += ["--address", address]

    def kill_node(self) -> None:
        assert self._cluster.stdin is not None
        print("kill", file=self._cluster.stdin, flush=True)

    def has_workers(self, count: int) -> dict[str, Any]:
        return self.status_when(
            lambda status: (
                len(status["workers"]) == count and (status["engine"] or {}).get("running") == count
            )
        )

    def end(self) -> None:
        down = self.down()
        assert down.wait() == 0, down.output

    def close(self) -> None:
        self.pool.close()
        self._cluster.communicate("", timeout=SECONDS_MAX)


@pytest.fixture
def on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayPool]:
    one = RayPool(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


def test_actors_come_with_a_training_and_go_with_it(on_ray: RayPool) -> None:
    up = on_ray.up("--max", "3", "--idle", "1")
    batches = [batch.tolist() for batch in on_ray.loader(200)]
    assert batches == expected(200)
    on_ray.has_workers(0)
    on_ray.end()
    assert up.wait() == 0, up.output


def test_a_node_that_dies_is_done_without(on_ray: RayPool) -> None:
    on_ray.up("--min", "2", "--max", "2")
    before = {one["id"] for one in on_ray.has_workers(2)["workers"]}
    batches = iter(on_ray.loader(800))
    given = [next(batches).tolist() for _ in range(5)]
    on_ray.kill_node()
    given += [batch.tolist() for batch in batches]
    assert given == expected(800)
    after = {one["id"] for one in on_ray.has_workers(2)["workers"]}
    assert len(after & before) == 1  # actors are spread over the nodes
    on_ray.end()


def test_workers_outlive_the_adapter_and_are_found_again(on_ray: RayPool) -> None:
    up = on_ray.up("--min", "2", "--max", "2")
    before = {one["id"] for one in on_ray.has_workers(2)["workers"]}
    up.process.kill()
    up.wait()
    on_ray.up("--min", "2", "--max", "2")
    assert {one["id"] for one in on_ray.has_workers(2)["workers"]} == before
    on_ray.end()


def test_what_the_cluster_has_no_room_for_waits(on_ray: RayPool) -> None:
    on_ray.up("--min", "6", "--max", "6")
    status = on_ray.status_when(
        lambda status: len(status["workers"]) == 4 and (status["engine"] or {}).get("running") == 4
    )
    assert status["engine"]["starting"] == 2
    on_ray.end()
