# SPDX-License-Identifier: Apache-2.0
"""The choice of a number of workers, from numbers alone."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock import _C

LIMITS = _C.WorkerLimits(8)


def seen(
    workers: int,
    worker_s: float,
    trainer_s: float,
    *,
    wait_s: float | None = None,
    cpu_share: float | None = 1.0,
    trainer_cpus: float = 1.0,
) -> _C.MeasuredWork:
    """The measurements without any variation, unless the waiting is given."""
    if wait_s is None:
        wait_s = max(0.0, worker_s / workers - trainer_s)
    return _C.MeasuredWork(workers, wait_s, trainer_s, worker_s, cpu_share, trainer_cpus)


def choose(
    measured: _C.MeasuredWork,
    limits: _C.WorkerLimits = LIMITS,
    lessons: _C.WorkerLessons | None = None,
) -> _C.WorkerChoice:
    return _C.choose_workers(measured, limits, lessons or _C.WorkerLessons())[0]


@pytest.mark.parametrize(
    ("measured", "workers", "reason"),
    [
        (seen(2, 0.060, 0.020), 4, "stalled"),  # 3 would be just enough
        (seen(1, 0.060, 0.020), 2, "stalled"),  # twofold at most
        (seen(4, 0.060, 0.020), 4, "settled"),
        (seen(4, 0.060, 0.020, wait_s=0.005), 5, "stalled"),  # means suffice, the waiting does not
        (seen(4, 0.060, 0.020, wait_s=0.001), 4, "settled"),  # 5% is not worth a worker
        (seen(4, 1.0, 0.0), 7, "stalled"),  # a CPU is the trainer's
        (seen(4, 1.0, 0.0, trainer_cpus=0.1), 8, "stalled"),  # which does not use it
        (seen(7, 1.0, 0.0), 7, "limit"),
        (seen(8, 1.0, 0.0), 8, "limit"),
        (seen(4, 1.0, 0.0, cpu_share=None), 7, "stalled"),  # unknown counts as computing
        (seen(8, 1.0, 0.0, cpu_share=0.02), 16, "stalled"),
        (seen(16, 1.0, 0.0, cpu_share=0.02), 32, "stalled"),
        (seen(32, 1.0, 0.0, cpu_share=0.02), 32, "limit"),
        (seen(8, 1.0, 0.0, cpu_share=0.5), 14, "stalled"),  # which fill 7 CPUs
        (seen(2, 1.0, 0.0, cpu_share=3.5), 2, "limit"),  # with threads
        (seen(8, 0.010, 0.020), 1, "idle"),
        (seen(8, 0.060, 0.020), 4, "idle"),
        (seen(8, 0.100, 0.020), 8, "settled"),  # idle, but less than half
        (seen(2, 0.018, 0.020), 2, "settled"),
        (seen(2, 0.010, 0.020), 1, "idle"),
        (seen(1, 0.001, 0.020), 1, "settled"),
        (seen(1, 0.0, 0.0), 1, "settled"),
    ],
)
def test_first_choice_of_worker_count(measured: _C.MeasuredWork, workers: int, reason: str) -> None:
    choice = choose(measured)
    assert (choice.workers, choice.reason) == (workers, reason)


@pytest.mark.parametrize(
    ("cpus", "shards", "first", "waiting"),
    [
        (1, None, 1, 4),
        (2, None, 1, 8),
        (3, None, 2, 12),
        (8, None, 2, 32),
        (64, None, 2, 64),
        (8, 1, 1, 32),
    ],
)
def test_limits_are_derived_from_cpus(
    cpus: int, shards: int | None, first: int, waiting: int
) -> None:
    limits = _C.WorkerLimits(cpus, shards)
    assert (limits.first_workers, limits.waiting_workers) == (first, waiting)


def test_shards_bound_the_workers() -> None:
    choice = choose(seen(2, 1.0, 0.0), _C.WorkerLimits(8, shards=3))
    assert (choice.workers, choice.reason) == (3, "stalled")
    choice = choose(seen(3, 1.0, 0.0), _C.WorkerLimits(8, shards=3))
    assert (choice.workers, choice.reason, choice.limited_by) == (3, "limit", "shards")


class Machine:
    """Workers that share a resource: beyond ``useful`` they only slow each other down."""

    def __init__(
        self, worker_s: float, trainer_s: float, useful: int = 1000, noise: float = 0.0
    ) -> None:
        self.worker_s, self.trainer_s, self.useful, self.noise = worker_s, trainer_s, useful, noise

    def run(self, workers: int) -> _C.MeasuredWork:
        slowdown = max(1.0, workers / self.useful) * self.noisy()
        return seen(workers, self.worker_s * slowdown, self.trainer_s * self.noisy(), cpu_share=0.1)

    def noisy(self) -> float:
        return 1 + random.uniform(-self.noise, self.noise)


def settle(
    machine: Machine, workers: int, lessons: _C.WorkerLessons
) -> tuple[list[int], _C.WorkerLessons]:
    """The numbers chosen, one after the other, and the measurements learnt."""
    counts = [workers]
    for _ in range(60):
        choice, lessons = _C.choose_workers(machine.run(counts[-1]), LIMITS, lessons)
        counts.append(choice.workers)
    return counts, lessons


@pytest.mark.sampled(40)
@pytest.mark.parametrize("worker_s", [0.001, 0.019, 0.021, 0.05, 0.11, 0.3, 0.64, 5.0])
@pytest.mark.parametrize("useful", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize("first", [1, 2, 7, 32])
def test_worker_count_settles_on_any_machine(worker_s: float, useful: int, first: int) -> None:
    machine = Machine(worker_s, 0.02, useful)
    counts, _ = settle(machine, first, _C.WorkerLessons())
    assert len(set(counts[-20:])) == 1, counts
    final = machine.run(counts[-1])
    best = min(machine.run(count).wait_s for count in range(1, 33))
    if first <= useful:
        assert final.wait_s <= 2 * best + 0.06 * final.trainer_s
    if best == 0.0 and first == 1:
        assert counts[-1] <= 2 + 2.5 * worker_s / 0.02


@pytest.mark.parametrize("worker_s", [0.015, 0.02, 0.03, 0.079, 0.5])
@pytest.mark.parametrize("useful", [2, 1000])
def test_noisy_measurements_cause_few_changes(worker_s: float, useful: int) -> None:
    machine = Machine(worker_s, 0.02, useful, noise=0.2)
    counts, lessons = [1], _C.WorkerLessons()
    for _ in range(4):
        more, lessons = settle(machine, counts[-1], lessons)
        counts += more[1:]
    changes = [(one, next_one) for one, next_one in itertools.pairwise(counts) if one != next_one]
    assert len(changes) <= 16, changes


def test_increase_without_gain_is_reverted_and_rarely_retried() -> None:
    counts, lessons = settle(Machine(0.2, 0.02, useful=4), 4, _C.WorkerLessons())
    steps = [place for place, count in enumerate(counts) if count == 8]
    assert steps == [1, 11, 29]
    assert set(counts) == {4, 8}
    choice, _ = _C.choose_workers(Machine(0.2, 0.02, useful=4).run(4), LIMITS, lessons)
    assert choice.reason == "no gain"


def test_increase_is_retried_after_machine_was_busy() -> None:
    counts, lessons = settle(Machine(0.2, 0.02, useful=1), 1, _C.WorkerLessons())
    assert counts[-1] == 1
    counts, _ = settle(Machine(0.2, 0.02), counts[-1], lessons)
    assert counts[-1] == 13


def test_stalled_worker_count_is_not_chosen_again() -> None:
    lessons = _C.WorkerLessons()
    idle = seen(4, 0.030, 0.020)  # 2 are enough by the means
    choice, lessons = _C.choose_workers(idle, LIMITS, lessons)
    assert choice.workers == 2
    choice, lessons = _C.choose_workers(seen(2, 0.030, 0.020, wait_s=0.010), LIMITS, lessons)
    assert choice.workers == 3
    for _ in range(5):
        choice, lessons = _C.choose_workers(seen(3, 0.025, 0.020), LIMITS, lessons)
        assert choice.workers == 3


def test_stalled_count_is_retried_if_workers_are_mostly_idle() -> None:
    """Two workers seemed too few with 51 ms of a worker and 200 ms of the trainer, and three were
    kept for the whole job.
    """
    choice, lessons = _C.choose_workers(seen(2, 0.051, 0.2, wait_s=0.2), LIMITS, _C.WorkerLessons())
    counts = [choice.workers]
    for _ in range(10):
        choice, lessons = _C.choose_workers(seen(counts[-1], 0.051, 0.2), LIMITS, lessons)
        counts.append(choice.workers)
    assert counts == [3] * 8 + [1] * 3


def test_large_change_of_batch_times_resets_the_choice() -> None:
    counts, lessons = settle(Machine(0.2, 0.02, useful=4), 4, _C.WorkerLessons())
    counts, lessons = settle(Machine(0.2, 0.005), counts[-1], lessons)
    assert counts[-1] == 32


@pytest.mark.parametrize(
    ("measured", "limits", "sentence"),
    [
        (
            seen(2, 0.061, 0.016, wait_s=0.0098, cpu_share=0.97),
            LIMITS,
            "4 workers: the trainer waited 38% of the time for 2; a batch takes 61 ms of a worker, "
            "97% of it on a CPU, and 16 ms of the trainer, and the process may use 8 CPUs",
        ),
        (
            seen(1, 0.0021, 0.0016, wait_s=0.0008, cpu_share=None),
            _C.WorkerLimits(1),
            "1 worker: the trainer waited 33% of the time, but no more than 1 would have CPUs to "
            "run on; a batch takes 2.1 ms of a worker and 1.6 ms of the trainer, and the process "
            "may use 1 CPU",
        ),
        (
            seen(3, 12.0, 1.5, wait_s=2.0),
            _C.WorkerLimits(8, shards=3),
            "3 workers: the trainer waited 57% of the time, but the dataset has no more than 3 "
            "shards; a batch takes 12 s of a worker, 100% of it on a CPU, and 1.5 s of the "
            "trainer, and the process may use 8 CPUs",
        ),
        (
            seen(1, 0.4, 0.1),
            _C.WorkerLimits(2),
            "1 worker: the trainer waited 75% of the time, but one of the 2 CPUs is reserved for "
            "it, which leaves room for 1; a batch takes 400 ms of a worker, 100% of it on a CPU, "
            "and 100 ms of the trainer, and the process may use 2 CPUs",
        ),
        (
            seen(4, 0.005, 0.1),
            LIMITS,
            "1 worker: the trainer waited 0% of the time and 4 were idle 99% of it; a batch takes "
            "5 ms of a worker, 100% of it on a CPU, and 100 ms of the trainer, and the process may "
            "use 8 CPUs",
        ),
    ],
)
def test_choice_explains_its_reason(
    measured: _C.MeasuredWork, limits: _C.WorkerLimits, sentence: str
) -> None:
    assert str(choose(measured, limits)) == sentence


def test_choice_mentions_previous_and_reverted_counts() -> None:
    choice, lessons = _C.choose_workers(seen(2, 0.08, 0.02), LIMITS, _C.WorkerLessons())
    assert choice.workers == 4
    settled, _ = _C.choose_workers(seen(4, 0.08, 0.02), LIMITS, lessons)
    assert str(settled).startswith("4 workers: the trainer waited 0% of the time, and 50% for 2;")
    taken_back, _ = _C.choose_workers(seen(4, 0.16, 0.02), LIMITS, lessons)
    assert str(taken_back).startswith(
        "2 workers: 4 were tried and did not make batches faster, the trainer waited 50% of the "
        "time;"
    )
