# SPDX-License-Identifier: Apache-2.0
"""Plans that are priced again while their loader runs: which one, when, and the same training."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from offload_training import bits, fresh
from torch import nn

from penstock import _C, DataLoader, offload
from penstock.tuning.trainer_clock import TrainerClock

ROWS = 60_000  # of a batch: what moves takes some milliseconds
# Plans follow what is measured, and a machine that does much else is measured to be another one.
MEASURED = pytest.mark.flaky(reruns=3)


@pytest.fixture(autouse=True)
def _one_thread_and_fresh_dynamo() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


class Features(nn.Module):
    """Much that depends on the batch alone, and a little that is trained."""

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


class Timed(torch.utils.data.Dataset[torch.Tensor]):
    """Ready batches by number, which take as long as they are told to."""

    def __init__(self, batch: torch.Tensor, seconds: list[float]) -> None:
        self._batch, self._seconds = batch, seconds

    def __len__(self) -> int:
        return len(self._seconds)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds[index])
        return self._batch + index if self._batch.is_floating_point() else self._batch


class Run:
    """Trains on batches that take given seconds of a worker and of the trainer, and keeps what the
    plan was at each step."""

    def __init__(self, model: nn.Module, loader: Any, trainer_s: list[float]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.trace: list[bytes] = []
        self.moved: list[int] = []
        self.plan: Any = None
        for seconds, batch in zip(trainer_s, loader, strict=True):
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            optimizer.step()
            time.sleep(seconds)
            self.trace += [bits(loss), *(bits(p) for p in model.parameters())]
            self.plan = getattr(loader, "plan", None)
            self.moved.append(len(self.plan.moved) if self.plan is not None else 0)


def run(
    make_model: Any, batch: torch.Tensor, phases: list[tuple[int, float, float]], **options: Any
) -> Run:
    """Phases are so many steps of so many seconds of a worker and of the trainer. What is left
    behind is compared to a run without `offload`, which waits for nothing."""
    worker_s = [worker for steps, worker, _ in phases for _ in range(steps)]
    trainer_s = [trainer for steps, _, trainer in phases for _ in range(steps)]
    still = [0.0] * len(worker_s)
    expected = Run(
        fresh(make_model),
        torch.utils.data.DataLoader(Timed(batch, still), batch_size=None),
        still,
    )
    loader: Any = DataLoader(Timed(batch, worker_s), batch_size=None, num_workers=1)
    done = Run(offload(fresh(make_model), loader, **options), loader, trainer_s)
    assert done.trace == expected.trace
    return done


def values(rows: int = ROWS) -> torch.Tensor:
    return torch.rand(rows, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.long
@MEASURED
@pytest.mark.slow
def test_what_moved_comes_back_when_the_workers_become_the_slower_side(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="penstock"):
        done = run(Features, values(), [(90, 0.0, 0.04), (150, 0.06, 0.0)])
    assert done.moved[85] > 0
    assert done.moved[-1] == 0
    assert done.plan.priced.changes >= 1
    assert not done.plan.priced.is_held
    assert "Priced" in str(done.plan)
    said = [record for record in caplog.records if "the plan changed at" in record.message]
    assert len(said) == done.plan.priced.changes
    assert all(record.levelno == logging.INFO for record in said)


@pytest.mark.long
@MEASURED
@pytest.mark.slow
def test_what_stayed_moves_when_the_trainer_becomes_the_slower_side() -> None:
    done = run(Features, values(), [(110, 0.06, 0.0), (150, 0.0, 0.06)])
    assert done.moved[105] == 0
    assert done.moved[-1] > 0
    # At first by calibration alone, which knows nothing of the dataset: then back, and again there.
    assert done.plan.priced.changes >= 2


@pytest.mark.long
@MEASURED
@pytest.mark.slow
def test_one_hot_comes_back_from_busy_workers_and_stays(monkeypatch: Any) -> None:
    steady = functools.partial(_C.Repricer, shift=100.0, trial_windows=1)
    monkeypatch.setattr(_C, "Repricer", steady)  # whatever else this machine does
    ids = torch.randint(500, (10_000,), generator=torch.Generator().manual_seed(0))
    done = run(OneHot, ids, [(100, 0.1, 0.0)])  # longer than the trainer takes on a busy machine
    assert done.moved[-1] == 0
    assert done.plan.priced.changes <= 1
    first = next(i for i, moved in enumerate(done.moved) if moved == 0)
    assert not any(done.moved[first:])


@pytest.mark.parametrize("options", [{"cut": "maximal"}, {"allow_random": True}])
def test_plan_that_was_asked_for_is_not_priced_again(options: Any) -> None:
    loader: Any = DataLoader(Timed(values(), [0.0] * 4), batch_size=None, num_workers=1)
    model = offload(fresh(Features), loader, **options)
    done = Run(model, loader, [0.0] * 4)
    assert loader._load_meter is None
    assert done.plan.priced is None


class FakeEvent:
    """An event of a device whose work ends when it is told to."""

    now_ms = 0.0
    done_ms = 0.0

    def record(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.done_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_device_clock_takes_what_the_device_has_come_to_and_waits_for_nothing() -> None:
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
    assert seconds > 1e-4


def test_host_clock_measures_at_once() -> None:
    clock = TrainerClock(torch.device("cpu"))
    clock.begin("a")
    clock.end()
    [(label, seconds)] = clock.take()
    assert label == "a"
    assert seconds >= 0
