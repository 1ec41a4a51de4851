# SPDX-License-Identifier: Apache-2.0
"""The contract of every engine: regardless of its workers' fate, training gets torch's batches, and
the pool returns to its intended number of workers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from elastic_pools import expected
from engine_pools import POOLS, EnginePool, needs_ray, needs_slurm
from namespaces import NotHere, network
from pool_processes import Process

pytestmark = pytest.mark.slow

# `make test` runs none of Ray's cases, and of Slurm's only the cases that no other engine covers.
LOCAL = pytest.param("local", id="local")
LONG_LOCAL = pytest.param("local", id="local", marks=pytest.mark.long)
SLURM = pytest.param("slurm", id="slurm", marks=needs_slurm)
LONG_SLURM = pytest.param("slurm", id="slurm", marks=[needs_slurm, pytest.mark.long])
RAY = pytest.param("ray", id="ray", marks=[needs_ray, pytest.mark.long])

MakePool = Callable[..., EnginePool]


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePool]:
    with ExitStack() as stack:

        def make(title: str, **options: Any) -> EnginePool:
            pool: EnginePool = POOLS[title](tmp_path, monkeypatch, **options)
            stack.callback(pool.close)
            return pool

        yield make


def disturbed(pool: EnginePool, disturb: Callable[[str], None], count: int = 400) -> set[str]:
    """A training with two workers, one of which is disturbed early on. Its batches are torch's, and
    in the end there are two workers. Returns the names of the workers before."""
    pool.up("--min", "2", "--max", "2")
    pool.has_workers(2)
    before = {*pool.processes()}
    batches = iter(pool.loader(count))
    given = [next(batches).tolist() for _ in range(5)]
    disturb(min(before))
    given += [batch.tolist() for batch in batches]
    assert given == expected(count)
    return before


def vanished_count(status: dict[str, Any]) -> int:
    """Workers that the controller no longer heard from, and that had not said goodbye."""
    count: int = status["controller"]["fenced_incarnations"]
    return count


@pytest.mark.long
@pytest.mark.parametrize("engine", [LONG_LOCAL, SLURM, RAY])
def test_workers_start_and_stop_with_jobs(make_pool: MakePool, engine: str) -> None:
    pool = make_pool(engine)
    up = pool.up("--min", "0", "--max", "3", "--idle", "1")
    assert pool.processes() == {}
    for _ in range(2):  # from zero, and from zero again
        names: set[str] = set()
        batches = []
        for batch in pool.loader(200):
            batches.append(batch.tolist())
            names |= pool.processes().keys()
        assert batches == expected(200)
        assert len(names) >= 2
        pool.has_workers(0)
    down = pool.down()
    assert down.wait() == 0, down.output
    assert up.wait() == 0, up.output
    assert pool.processes() == {}


@pytest.mark.parametrize("engine", [LOCAL, LONG_SLURM, RAY])
def test_killed_worker_is_replaced(make_pool: MakePool, engine: str) -> None:
    pool = make_pool(engine)
    before = disturbed(pool, pool.kill_worker)
    pool.runs_processes(lambda names: len(names) == 2 and len(names & before) == 1)
    # The controller may count the killed worker until its lease ends, in place of the new one.
    pool.status_when(lambda status: vanished_count(status) == 1)
    pool.has_workers(2)


@pytest.mark.parametrize("engine", [LONG_SLURM, RAY])
def test_workers_of_a_dead_node_are_replaced(make_pool: MakePool, engine: str) -> None:
    pool = make_pool(engine)
    before = disturbed(pool, pool.kill_node, 800)
    pool.runs_processes(lambda names: len(names) == 2 and len(names & before) <= 1)
    pool.has_workers(2)


@pytest.mark.parametrize("engine", [LONG_LOCAL, LONG_SLURM, RAY])
def test_worker_preempted_without_notice_is_replaced(make_pool: MakePool, engine: str) -> None:
    pool = make_pool(engine)
    before = disturbed(pool, lambda name: pool.preempt(name, with_notice=False))
    pool.runs_processes(lambda names: len(names) == 2 and min(before) not in names)
    pool.has_workers(2)


@pytest.mark.long("local")
@pytest.mark.parametrize("engine", [LOCAL, LONG_SLURM, RAY])
def test_worker_preempted_with_notice_finishes_its_batches(
    make_pool: MakePool, engine: str
) -> None:
    pool = make_pool(engine, has_notice=True)
    before = disturbed(pool, lambda name: pool.preempt(name, with_notice=True))
    pool.runs_processes(lambda names: len(names) == 2 and min(before) not in names)
    pool.has_workers(2)
    assert vanished_count(pool.pool.status()) == 0


@pytest.mark.long("local")
@pytest.mark.parametrize("engine", [LOCAL, LONG_SLURM, RAY])
def test_engine_that_starts_no_workers_is_reported(make_pool: MakePool, engine: str) -> None:
    pool = make_pool(engine)

    def refuse(name: str) -> None:
        pool.refuse()
        pool.kill_worker(name)

    disturbed(pool, refuse)

    def is_reported(status: dict[str, Any]) -> bool:
        engine = status["engine"]
        is_said = engine["refusal"] is not None if pool.can_refuse else engine["starting"] == 1
        return len(status["workers"]) == 1 and is_said

    pool.status_when(is_reported)


@pytest.mark.parametrize("engine", [LONG_LOCAL, LONG_SLURM, RAY])
def test_temporarily_cut_link_loses_no_batches(make_pool: MakePool, engine: str) -> None:
    count = 400
    with ExitStack() as stack:
        try:
            net = stack.enter_context(network())
        except NotHere as reason:
            pytest.skip(str(reason))
        pool = make_pool(engine, within=net.far)
        stack.callback(pool.close)
        keys = pool.state.parent / "keys"
        assert Process(["keys", str(keys)], pool.pool.environment).wait() == 0
        pool.up(
            "--min", "2", "--max", "2", "--keys", str(keys), "--bind", f"tcp://{net.far_address}:0"
        )
        trainer = Process(
            [pool.pool.endpoint, str(count)],
            {**pool.pool.environment, "PENSTOCK_KEYS": str(keys)},
            net.near,
            program=(sys.executable, str(Path(__file__).with_name("elastic_training.py"))),
        )
        stack.callback(trainer.process.kill)
        trainer.wait_for_lines(lambda line: line.startswith("["), 5)
        net.cut("black hole")
        time.sleep(4)  # beyond the lease of both sides
        net.heal("black hole")
        trainer.wait_for_lines(lambda line: line == "done")
        assert trainer.wait() == 0
        given = [json.loads(line) for line in trainer.lines if line.startswith("[")]
        assert given == expected(count)
        pool.runs_processes(lambda names: len(names) == 2)
        down = pool.down("--keys", str(keys))
        assert down.wait() == 0, down.output
