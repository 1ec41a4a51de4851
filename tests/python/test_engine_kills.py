# SPDX-License-Identifier: Apache-2.0
"""kill -9 of an engine's adapter before and after each step of each action: after a restart no
worker is forgotten, and none is there twice."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_pools import Elastic
from pool_processes import SECONDS_MAX, Process

pytestmark = pytest.mark.slow

# Before and after each of: names are reserved, a worker is started; the order to stop is recorded,
# the worker is stopped, its end is recorded.
STARTING, ENDING = range(1, 5), range(5, 11)
_PROGRAM = (sys.executable, str(Path(__file__).with_name("engine_steps.py")))


@pytest.fixture
def elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elastic]:
    one = Elastic(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


def adapter(elastic: Elastic, worker_count: int, deadly_step: int = 0) -> Process:
    arguments = [elastic.pool.endpoint, str(elastic.state), str(worker_count), str(deadly_step)]
    process = Process(arguments, elastic.pool.environment, program=_PROGRAM)
    elastic.pool.processes.append(process)
    process.wait_for_lines(lambda line: line == "begins")  # SIGTERM is handled from now on
    return process


def wait_for_ends(elastic: Elastic, processes: dict[str, int]) -> None:
    """Of these. Others may start meanwhile."""
    deadline = time.monotonic() + SECONDS_MAX
    while left := processes.items() & elastic.processes().items():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.long("2")
@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=[] if step == 2 else pytest.mark.long) for step in STARTING],
)
def test_adapter_killed_while_starting_workers_recovers(elastic: Elastic, step: int) -> None:
    elastic.pool.start_controller()
    assert adapter(elastic, 2, step).wait() == -signal.SIGKILL
    left = elastic.processes()
    assert len(left) == (2 if step == 4 else 0)
    second = adapter(elastic, 2)
    elastic.has_workers(2)
    assert left.items() <= elastic.processes().items()
    assert second.end() == 0, second.output
    assert elastic.processes() == {}


@pytest.mark.long("9")
@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=[] if step == 9 else pytest.mark.long) for step in ENDING],
)
def test_adapter_killed_while_stopping_workers_recovers(elastic: Elastic, step: int) -> None:
    elastic.pool.start_controller()
    first = adapter(elastic, 1, step)
    elastic.has_workers(1)
    begun = elastic.processes()
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == -signal.SIGKILL, first.output
    second = adapter(elastic, 1)  # which was not asked to end
    if step >= 8:  # the worker was asked to end
        wait_for_ends(elastic, begun)
    elastic.has_workers(1)
    assert second.end() == 0, second.output
    assert elastic.processes() == {}


def test_kill_points_cover_all_steps_of_an_adapter(elastic: Elastic) -> None:
    """So the tests above cover all of them."""
    elastic.pool.start_controller()
    process = adapter(elastic, 1)
    elastic.has_workers(1)
    assert process.end() == 0
    assert process.lines[-1] == f"steps {ENDING[-1]}"
