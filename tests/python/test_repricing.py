# SPDX-License-Identifier: Apache-2.0
"""Plans that are repriced while their loader runs: which one, when, and the same training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_training import bits, fresh
from torch import nn

from penstock import DataLoader, offload
from penstock.cut import offloading
from penstock.tuning.load_meter import Counters, LoadMeter, TrainerClock

ROWS = 60_000  # of a batch: the calls that move take some milliseconds
Loads = tuple[float, float]  # of the trainer and of a worker


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Features(nn.Module):
    """Many operations that depend on the batch alone, and a few trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x) + torch.cos(x)
        x = torch.log1p(x.abs()) * torch.sin(x * 2.0)
        x = torch.exp(-x) + torch.tanh(x)
        return self.net(x.mean(dim=0, keepdim=True))


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(500, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(F.one_hot(ids, 500).float().mean(dim=0, keepdim=True))


class Same(torch.utils.data.Dataset[torch.Tensor]):
    """Ready batches by number."""

    def __init__(self, batch: torch.Tensor, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch + index if self._batch.is_floating_point() else self._batch


class Pipeline:
    """The simulated seconds of a training: a trainer and one worker work in parallel, each for a
    number of loads on every batch. One load is the calibrated time of the calls that can move; they
    are in the trainer, or in the worker that sent their results."""

    def __init__(self) -> None:
        self.load_s = 1.0  # until there is a plan
        self.trainer_loads = self.worker_loads = 0.0

    def take(self, plan: Any) -> None:
        [maximal] = [totals for totals in plan.totals if totals.cut == "maximal"]
        self.load_s = maximal.worker_s


class SimulatedMeter(LoadMeter):
    """Records the steps of a pipeline in place of steps measured with a clock."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._now_s = self._fetch_s = self._prefix_s = 0.0
        self._with_boundary = 0

    def note(self, called_at: float, returned_at: float, counters: Counters) -> None:
        batches, with_boundary, _, _, batch_bytes, workers, link_rate = counters
        is_moved = with_boundary > self._with_boundary
        self._with_boundary = with_boundary
        load_s = self._pipeline.load_s
        trainer_s = load_s * (self._pipeline.trainer_loads + (not is_moved))
        worker_s = load_s * (self._pipeline.worker_loads + is_moved)
        self._fetch_s += worker_s
        self._prefix_s += load_s * is_moved
        waited_s = max(0.0, worker_s - trainer_s)
        told = (batches, with_boundary, self._fetch_s, self._prefix_s)
        self.native.note(
            self._now_s - waited_s,
            self._now_s,
            (*told, batch_bytes, workers, link_rate),
            self.sends_whole,
        )
        self._now_s += max(trainer_s, worker_s)

    def shared_cpus(self) -> int:
        return 4


class SimulatedClock(TrainerClock):
    """Times calls of a graph, which as a whole take one load longer than without the calls that
    move."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(None)
        self._pipeline = pipeline
        self._calls: list[Any] = []

    def begin(self, label: Any) -> None:
        self._calls.append(label)

    def end(self) -> None:
        pass

    def take(self) -> list[tuple[Any, float]]:
        calls, self._calls = self._calls, []
        load_s = self._pipeline.load_s
        return [(label, load_s * (2 if label[1] == "whole" else 1)) for label in calls]


class Run:
    """Trains, and keeps the plan at each step. Each step's loads are passed to a pipeline."""

    def __init__(
        self, model: nn.Module, loader: Any, loads: list[Loads], pipeline: Pipeline | None = None
    ) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.trace: list[bytes] = []
        self.moved: list[int] = []
        self.plan: Any = None
        batches = iter(loader)
        for trainer_loads, worker_loads in loads:
            if pipeline is not None:
                pipeline.trainer_loads, pipeline.worker_loads = trainer_loads, worker_loads
                if self.plan is not None:
                    pipeline.take(self.plan)
            batch = next(batches)
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            optimizer.step()
            self.trace += [bits(loss), *(bits(p) for p in model.parameters())]
            self.plan = getattr(loader, "plan", None)
            self.moved.append(len(self.plan.moved) if self.plan is not None else 0)


def run(
    monkeypatch: pytest.MonkeyPatch,
    make_model: Any,
    batch: torch.Tensor,
    *phases: tuple[int, Loads],
) -> Run:
    """Phases consist of a number of steps with given loads of the trainer and of a worker. The
    parameters and losses of every step are compared to the ones of a run without `offload`."""
    loads = [each for steps, each in phases for _ in range(steps)]
    dataset = Same(batch, len(loads))
    expected = Run(fresh(make_model), torch.utils.data.DataLoader(dataset, batch_size=None), loads)
    pipeline = Pipeline()
    monkeypatch.setattr(offloading, "TrainerClock", lambda device: SimulatedClock(pipeline))
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=1)
    loader._run.load_meter = SimulatedMeter(pipeline)
    done = Run(offload(fresh(make_model), loader), loader, loads, pipeline)
    assert done.trace == expected.trace
    return done


def values(rows: int = ROWS) -> torch.Tensor:
    return torch.rand(rows, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.long
@pytest.mark.slow
def test_operators_return_when_workers_become_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="penstock"):
        done = run(monkeypatch, Features, values(), (120, (4, 0)), (200, (0, 6)))
    assert done.moved[119] > 0
    assert done.moved[-1] == 0
    assert done.plan.priced.changes >= 1
    assert not done.plan.priced.is_held
    assert "Priced" in done.plan.table()
    said = [record for record in caplog.records if "the plan changed at" in record.message]
    assert len(said) == done.plan.priced.changes
    assert all(record.levelno == logging.INFO for record in said)


@pytest.mark.long
@pytest.mark.slow
def test_operators_move_when_trainer_becomes_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = run(monkeypatch, Features, values(), (120, (0, 6)), (200, (6, 0)))
    assert done.moved[119] == 0
    assert done.moved[-1] > 0
    # At first by calibration alone, which does not know the dataset: then back, and again there.
    assert done.plan.priced.changes >= 2


@pytest.mark.long
@pytest.mark.slow
def test_one_hot_returns_from_busy_workers_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(500, (10_000,), generator=torch.Generator().manual_seed(0))
    done = run(monkeypatch, OneHot, ids, (160, (0, 6)))
    assert done.moved[-1] == 0
    assert done.plan.priced.changes == 1
    came_back = next(i for i in range(1, 160) if done.moved[i] == 0 < done.moved[i - 1])
    assert not any(done.moved[came_back:])


@pytest.mark.parametrize("options", [{"cut": "maximal"}, {"allow_random": True}])
def test_explicitly_requested_cut_is_not_repriced(options: Any) -> None:
    loader: Any = DataLoader(Same(values(), 4), batch_size=None, num_workers=1)
    model = offload(fresh(Features), loader, **options)
    done = Run(model, loader, [(0, 0)] * 4)
    assert loader._run.load_meter is None
    assert done.plan.priced is None


class FakeEvent:
    """An event of a device whose work ends on command."""

    now_ms = 0.0
    done_ms = 0.0

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.done_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_device_clock_reads_completed_events_without_waiting() -> None:
    clock = TrainerClock(None, make_event=FakeEvent)
    FakeEvent.now_ms, FakeEvent.done_ms = 10.0, 0.0
    clock.begin("a")
    FakeEvent.now_ms = 30.0
    clock.end()
    assert clock.take() == []
    clock.begin("b")
    FakeEvent.now_ms = 35.0
    clock.end()
    FakeEvent.done_ms = 30.0
    assert clock.take() == [("a", 0.02)]
    FakeEvent.done_ms = 40.0
    assert clock.take() == [("b", 0.005)]


@pytest.mark.cuda
def test_device_clock_measures_kernels() -> None:
    device = torch.device("cuda")
    x = torch.rand(4096, 4096, device=device)
    clock = TrainerClock(device)
    clock.begin("mm")
    for _ in range(20):
        x = x @ x
    clock.end()
    torch.cuda.synchronize()
    [(label, seconds)] = clock.take()
    assert label == "mm"
    assert seconds > 0


def test_host_clock_measures_immediately() -> None:
    clock = TrainerClock(torch.device("cpu"))
    clock.begin("a")
    clock.end()
    [(label, seconds)] = clock.take()
    assert label == "a"
    assert seconds >= 0
