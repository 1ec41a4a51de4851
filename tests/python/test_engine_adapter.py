# SPDX-License-Identifier: Apache-2.0
"""An adapter keeps working with an engine that refuses, fails, hangs or lies, and the pool
serves."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pool_processes import PoolProcesses, pool_of

from penstock import _pool
from penstock.engines import adapter as adapter_module
from penstock.engines.adapter import Adapter, AdapterLimits, BoundedCalls
from penstock.engines.engine import EngineError, EngineRefusal, WorkerCommand, WorkerState
from penstock.engines.journal import Journal
from penstock.engines.worker_keys import WorkerKeys
from penstock.errors import PenstockError


class Scripted:
    """An engine whose workers are mere names."""

    title = "scripted"

    def __init__(self) -> None:
        self.names: dict[str, WorkerState] = {}
        self.granted_max = 100
        self.error: Exception | None = None
        self.spawned: list[str] = []

    def spawn(self, names: Sequence[str]) -> None:
        granted = names[: max(0, self.granted_max - len(self.names))]
        self.spawned += granted
        self.names.update(dict.fromkeys(granted, WorkerState.STARTING))
        if len(granted) < len(names):
            raise EngineRefusal("no room is left", len(granted))

    def stop(self, name: str, *, at_once: bool) -> None:
        self.names.pop(name, None)

    def last_log_line(self, name: str) -> str:
        return f"{name} dies"

    def workers(self) -> dict[str, WorkerState]:
        if self.error is not None:
            raise self.error
        return dict(self.names)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def adapter_of(pool: PoolProcesses, engine: Any, said: list[str], count: int = 4) -> Adapter:
    limits = AdapterLimits(worker_count_min=count, worker_count_max=count)
    journal = Journal(pool.folder / "state" / "journal")
    return Adapter(engine, journal, limits, pool.endpoint, None, said.append)


def test_refused_workers_are_reported_and_requested_later(pool: PoolProcesses) -> None:
    engine, said = Scripted(), []
    engine.granted_max = 2
    adapter = adapter_of(pool, engine, said)
    for _ in range(3):
        assert adapter.run_once()
    assert len(engine.names) == 2
    assert said == ["the engine scripted started 2 of 4 workers: no room is left"]
    status = pool.status()["engine"]
    assert (status["refusals"], status["refusal"]) == (1, "no room is left")
    assert status["starting"] == 2
    engine.granted_max = 100
    for _ in range(60):
        adapter.run_once()
        if len(engine.names) == 4:
            break
        threading.Event().wait(0.1)
    assert len(engine.spawned) == 4, "none was started twice"


@pytest.mark.parametrize(("grace_s", "told"), [(120.0, "120"), (0.0, "1")])
def test_workers_get_the_grace_period_of_the_pool(grace_s: float, told: str) -> None:
    """With any grace of the pool, they ended themselves after 30 s."""
    arguments = WorkerCommand("tcp://127.0.0.1:9", None, 60.0, grace_s).arguments()
    assert arguments[arguments.index("--grace") + 1] == told


class ShortLived(Scripted):
    """An engine whose workers each end as soon as they were listed once."""

    def __init__(self) -> None:
        super().__init__()
        self.spawned_at: list[float] = []

    def spawn(self, names: Sequence[str]) -> None:
        super().spawn(names)
        self.spawned_at.append(time.monotonic())

    def workers(self) -> dict[str, WorkerState]:
        listed = super().workers()
        self.names.clear()
        return listed


@pytest.mark.long
def test_worker_that_exits_immediately_is_restarted_with_backoff(pool: PoolProcesses) -> None:
    engine, said = ShortLived(), []
    adapter = adapter_of(pool, engine, said, count=1)
    give_up_at = time.monotonic() + 60
    reasons, refusals = set(), set()
    while len(engine.spawned) < 3:
        assert time.monotonic() < give_up_at, f"{len(engine.spawned)} workers were started"
        adapter.run_once()
        status = pool.status()["engine"]
        reasons.add(status["reason"])
        refusals.add(status["refusal"])
        threading.Event().wait(0.05)
    first, second, third = engine.spawned_at
    assert second - first >= 1
    assert third - second >= 2
    assert any("retrying in" in reason for reason in reasons)
    ended = r"worker pk-\S+ ended \d s after its start; its last output: pk-\S+"
    assert any(re.fullmatch(f"{ended} dies", refusal) for refusal in refusals)


def test_engine_failure_on_start_is_reported(pool: PoolProcesses) -> None:
    engine, said = Scripted(), []
    engine.spawn = lambda names: 1 / 0  # type: ignore[method-assign]
    adapter = adapter_of(pool, engine, said)
    for _ in range(3):
        assert adapter.run_once()
    status = pool.status()["engine"]
    assert status["refusal"].endswith(
        "failed to start 4 workers: ZeroDivisionError: division by zero"
    )
    assert status["refusals"] >= 1


def test_engine_failure_is_reported_and_no_worker_is_started(pool: PoolProcesses) -> None:
    engine, said = Scripted(), []
    engine.error = KeyError("surprise")
    adapter = adapter_of(pool, engine, said)
    for _ in range(3):
        assert adapter.run_once()
    assert said == ["the engine scripted failed to list its workers: KeyError: 'surprise'"]
    assert engine.spawned == []
    assert "surprise" in pool.status()["engine"]["trouble"]
    engine.error = None
    adapter.run_once()
    assert len(engine.names) == 4
    adapter.run_once()
    assert pool.status()["engine"]["trouble"] is None


@pytest.mark.long
def test_adapter_without_its_controller_changes_nothing(pool: PoolProcesses) -> None:
    engine, said = Scripted(), []
    adapter = adapter_of(pool, engine, said)
    adapter.run_once()
    before = dict(engine.names)
    pool.processes[0].process.kill()
    pool.processes[0].process.wait()
    assert adapter.run_once()
    assert engine.names == before
    assert "no orders from the controller" in said[-1]


def test_worker_whose_keys_cannot_be_copied_is_not_started(pool: PoolProcesses) -> None:
    keys = pool.folder / "keys"
    _pool.make_key_folder(str(keys))
    worker_keys = WorkerKeys(keys, pool.folder / "worker-keys")
    engine, said = Scripted(), []
    limits = AdapterLimits(worker_count_min=1, worker_count_max=1)
    journal = Journal(pool.folder / "journal")
    adapter = Adapter(engine, journal, limits, pool.endpoint, None, said.append, worker_keys)
    secret = keys / "worker.secret"
    secret.rename(keys / "elsewhere")
    for _ in range(3):
        assert adapter.run_once()
    assert engine.spawned == []
    why = f"the workers' keys cannot be copied (No such file or directory): {secret}"
    assert said == [f"no workers are started, and running workers continue, because {why}"]
    assert pool.status()["engine"]["refusal"].startswith("the workers' keys cannot be copied")
    (keys / "elsewhere").rename(secret)
    adapter.run_once()
    assert said[1:] == ["writing works again; workers are started as needed"]
    for _ in range(60):
        adapter.run_once()
        if engine.spawned:
            break
        threading.Event().wait(0.1)
    assert len(engine.spawned) == 1


def test_pool_shutdown_stops_all_workers(pool: PoolProcesses) -> None:
    engine, said = Scripted(), []
    adapter = adapter_of(pool, engine, said)
    adapter.run_once()
    assert len(engine.names) == 4
    while adapter.run_once(is_to_end=True):
        pass
    assert engine.names == {}


def test_pool_shutdown_gives_up_on_an_unresponsive_engine(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, said = Scripted(), []
    adapter = adapter_of(pool, engine, said)
    engine.error = EngineError("the cluster is gone")
    assert adapter.run_once(is_to_end=True)
    monkeypatch.setattr(adapter_module, "_END_TIMEOUT_S", 0.0)
    assert adapter.run_once(), "it is not to end"
    with pytest.raises(PenstockError, match="workers may be left: the cluster is gone; once"):
        adapter.run_once(is_to_end=True)
    engine.error = None
    assert not adapter.run_once(is_to_end=True)


class Lingering(Scripted):
    """Its workers do not end."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[tuple[str, bool]] = []

    def stop(self, name: str, *, at_once: bool) -> None:
        self.stops.append((name, at_once))


@pytest.mark.parametrize("jump_s", [365 * 86_400, -365 * 86_400])
def test_clock_jump_does_not_shorten_the_grace_period(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    engine, said = Lingering(), []
    adapter = adapter_of(pool, engine, said)
    adapter.run_once()
    adapter.run_once(is_to_end=True)
    asked = [(name, False) for name in sorted(engine.names)]
    assert engine.stops == asked
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump_s)
    adapter.run_once(is_to_end=True)
    assert engine.stops == asked


def test_stopped_worker_keeps_its_grace_after_a_clock_setback(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, said = Lingering(), []
    adapter = adapter_of(pool, engine, said)
    adapter.run_once()
    adapter.run_once(is_to_end=True)
    before = list(engine.stops)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 365 * 86_400)
    another = adapter_of(pool, engine, said)  # of another process, which has the journal alone
    another.run_once(is_to_end=True)
    assert engine.stops == before


def test_hanging_engine_call_is_abandoned() -> None:
    calls = BoundedCalls("stuck", 0.2)
    end = threading.Event()
    for _ in range(2):
        with pytest.raises(EngineError, match="stuck has not answered a call to wait within 0.2"):
            calls("wait", end.wait)
    end.set()
    threading.Event().wait(0.3)
    assert calls("add", lambda: 1 + 1) == 2
