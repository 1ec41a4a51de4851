# SPDX-License-Identifier: Apache-2.0
"""How long a step would take with other settings of the loader.

As in csrc/graph/price.h, a loader and its program are stages that work at the same time, and a step
takes as long as the slowest: the program, the workers, the link, the CPUs that all share. Batches
differ, so the seconds that were seen are played again, batch by batch, with the new number of
workers and of batches that are asked for ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.tuning.loader_settings import LoaderSettings
from penstock.tuning.observation import MadeBatch, Observation

_REPLAYED_MIN = 256  # batches; those that were seen are repeated
_REPLAYED_MAX = 2048
# The part of a dataset's seconds that is taken for waiting where nobody knows the CPU's.
_UNKNOWN_CPU_SHARE = 1.0


def replayed_step_s(
    batches: Sequence[MadeBatch], settings: LoaderSettings, loader_s: float
) -> float:
    """The mean step where these batches come again and again, with CPUs for everybody."""
    if not batches:
        return 0.0
    if settings.num_workers == 0:
        return loader_s + _mean([one.making_s + one.compute_s for one in batches])
    workers, ahead = settings.num_workers, max(1, settings.ahead)
    count = min(_REPLAYED_MAX, max(_REPLAYED_MIN, 4 * ahead, 2 * len(batches)))
    first = count // 4
    free_at, given_at = [0.0] * workers, [0.0] * count
    asks_at = 0.0  # when the program asks for its next batch
    any_worker = not settings.in_order or settings.seeding in ("batch", "sample")
    for number, batch in zip(range(count), itertools.cycle(batches), strict=False):
        worker = number % workers
        if any_worker:
            worker = min(range(workers), key=free_at.__getitem__)
        asked_at = given_at[number - ahead] if number >= ahead else 0.0
        free_at[worker] = max(free_at[worker], asked_at) + batch.making_s
        given_at[number] = max(asks_at, free_at[worker])
        asks_at = given_at[number] + batch.compute_s + loader_s
    return (given_at[-1] - given_at[first]) / (count - 1 - first)


def predicted_step_s(seen: Observation, settings: LoaderSettings) -> float:
    """Seconds of a whole step with ``settings``, by what was seen with others."""
    now, then = modelled_step_s(seen, seen.settings), modelled_step_s(seen, settings)
    within = seen.step_s * then / now if now > 0 else seen.step_s
    return within + _start_share_s(seen, settings)


def modelled_step_s(seen: Observation, settings: LoaderSettings) -> float:
    """The slowest stage, an epoch's start apart."""
    moved_s = _moved_s(seen, settings)
    scale = _making_scale(seen, settings)
    computing = 1 - _compute_delay_s(seen) / seen.compute_s if seen.compute_s > 0 else 1.0
    batches = [
        MadeBatch(scale * one.making_s + moved_s, max(0.0, computing * one.compute_s - moved_s))
        for one in batches_of(seen)
    ]
    link_s = seen.wire_s / max(1, seen.pool_workers) if seen.has_pool else 0.0
    return max(replayed_step_s(batches, settings, seen.loader_s), link_s, cpus_step_s(seen))


def own_step_s(seen: Observation) -> float:
    """The step of a program that never waits, neither for a batch nor for a CPU."""
    return seen.compute_s - _compute_delay_s(seen) + seen.loader_s


def cpus_step_s(seen: Observation) -> float:
    """What everybody computes for a step, over the CPUs that they share. 0 where that is unknown,
    or the workers are elsewhere."""
    if seen.worker_cpu_s is None or seen.has_pool:
        return 0.0
    trainer_s = seen.trainer_cpu_s if seen.trainer_cpu_s is not None else seen.compute_s
    return (seen.worker_cpu_s + trainer_s) / max(1, seen.cpus)


def batches_of(seen: Observation) -> Sequence[MadeBatch]:
    """Those that were seen; where only means are known, one that is like the mean."""
    return seen.batches or (MadeBatch(seen.making_s, seen.compute_s),)


def waiting_in_dataset_s(seen: Observation) -> float:
    """Of a worker's seconds for a batch, those in which it neither was on a CPU nor waited for
    one: for storage, a network or a lock."""
    share = seen.cpu_share
    return seen.making_s * (1 - (_UNKNOWN_CPU_SHARE if share is None else share))


def _making_scale(seen: Observation, settings: LoaderSettings) -> float:
    """How much longer than now a worker takes for a batch. Threads share its waiting."""
    if seen.making_s <= 0:
        return 1.0
    waits_s = waiting_in_dataset_s(seen)
    most = max(1, seen.batch_samples)
    threads_now = min(seen.settings.fetch_threads, most)
    threads_then = min(settings.fetch_threads, most)
    computes_s = max(0.0, undelayed_making_s(seen) - waits_s)
    return (computes_s + waits_s * threads_now / threads_then) / seen.making_s


def undelayed_making_s(seen: Observation) -> float:
    """A worker's seconds for a batch but for those in which it waited for a CPU: the CPUs are a
    stage of their own."""
    return seen.making_s - _delay_s(seen)


def _delay_s(seen: Observation) -> float:
    """Of a worker's seconds for a batch. What was counted is of all its threads."""
    if seen.worker_cpu_s is None:
        return 0.0
    return min(seen.worker_delay_s, max(0.0, seen.making_s - seen.worker_cpu_s))


def _compute_delay_s(seen: Observation) -> float:
    return min(seen.trainer_delay_s, 0.95 * seen.compute_s)


def _moved_s(seen: Observation, settings: LoaderSettings) -> float:
    if seen.movable_s is None or settings.offload == seen.settings.offload:
        return 0.0
    return seen.movable_s if settings.offload else -seen.movable_s


def _start_share_s(seen: Observation, settings: LoaderSettings) -> float:
    """Workers that stay begin an epoch with the batches that they made while the last one ended."""
    if settings.num_workers == 0:
        return 0.0
    if settings.persistent_workers and not seen.settings.persistent_workers:
        return 0.0
    return seen.start_share_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
