# SPDX-License-Identifier: Apache-2.0
"""The limiting factor of a program: one name, and the reason in a sentence, from observations
alone. Also, the predicted time of a step with other settings of the loader.

As in csrc/graph/price.h, a loader and its program are stages that work at the same time, and a step
takes as long as the slowest: the program, the workers, the link, the CPUs that all share.
Batches differ, so the observed seconds are replayed, batch by batch, with the new number of workers
and of batches requested ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from penstock.tuning.observation import (
    MAKING_PARTS,
    LoaderSettings,
    MadeBatch,
    Observation,
    format_bytes,
    format_share,
    format_time,
)

# Below these shares of a step, a gain would not be noticeable.
WAITING_SHARE_MIN = 0.08
_START_SHARE_MIN = 0.12
_LOADER_SHARE_MIN = 0.5
_MOVABLE_SHARE_MIN = 0.1
# A change that removes this share of the waiting shows the cause of the waiting.
_REMEDY_SHARE = 0.6
_WORKERS_REMEDY_SHARE = 0.35
_DEEP_PREFETCH = 16  # batches for each worker
# A sample is slow if it takes this many times as long as its batch's samples do.
SLOW_SAMPLE_RATIO = 5.0
_SURELY_SLOW_S = 0.2  # longer than a thread usually waits for a CPU
_WAITING_DATASET_SHARE = 0.5
_NO_MEMORY_SHARE = 0.25  # of the batches
_PAGES_READ_PER_S = 50.0  # from a disk, by processes that were running before
_MEMORY_FREE_MIN = 256 << 20
_REPLAYED_MIN = 256  # batches; the observed ones are repeated
_REPLAYED_MAX = 2048
# The share of a dataset's seconds that counts as waiting if the CPU time is unknown.
_UNKNOWN_CPU_SHARE = 1.0


class Limit(Enum):
    """Names of a program's limiting factors."""

    TRAINER = "trainer"
    OFFLOAD = "offload"
    DATASET = "dataset"
    STORAGE = "storage"
    TRANSFORM = "transform"
    COLLATE = "collate"
    PREFIX = "prefix"
    WORKERS = "workers"
    PREFETCH = "prefetch"
    WORKER_START = "worker start"
    SLOW_SAMPLES = "slow samples"
    LINK = "link"
    MEMORY = "memory"
    DEVICE = "device"
    RANKS = "ranks"
    LOADER = "loader"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    limit: Limit
    reason: str  # one sentence or two, for people

    def __str__(self) -> str:
        return self.reason


def diagnose(seen: Observation) -> Diagnosis:
    """Return the diagnosis of an observation. The same observation always gives the same one."""
    for look in (_memory, _worker_start, _trainer, _elsewhere, _making):
        found = look(seen)
        if found is not None:
            return found
    raise AssertionError("_making() always finds a diagnosis")


def _memory(seen: Observation) -> Diagnosis | None:
    lost_s = seen.waiting_s + seen.loader_s
    if lost_s < WAITING_SHARE_MIN * seen.step_s or seen.delivered == 0:
        return None
    if seen.inline_batches >= _NO_MEMORY_SHARE * seen.delivered:
        return Diagnosis(
            Limit.MEMORY,
            f"Memory limits the program: {seen.inline_batches} of {seen.delivered} batches of "
            f"{format_bytes(seen.batch_bytes)} found no shared memory and were copied through a "
            "socket.",
        )
    if seen.copied_batches >= _NO_MEMORY_SHARE * seen.delivered:
        return Diagnosis(
            Limit.MEMORY,
            f"Memory limits the program: {seen.copied_batches} of {seen.delivered} batches of "
            f"{format_bytes(seen.batch_bytes)} were copied, because the program holds more of "
            "them than fit into the workers' shared memory.",
        )
    free = seen.memory_free_bytes
    is_short = free is not None and free < max(_MEMORY_FREE_MIN, 2 * seen.batch_bytes)
    if seen.memory_reads_per_s > _PAGES_READ_PER_S and is_short:
        return Diagnosis(
            Limit.MEMORY,
            f"Memory limits the program: {format_bytes(free or 0)} are free, and the system read "
            f"{seen.memory_reads_per_s:.0f} pages per second back from disk.",
        )
    return None


def _worker_start(seen: Observation) -> Diagnosis | None:
    share_s, whole_s = seen.start_share_s, seen.whole_step_s
    if whole_s <= 0 or share_s < _START_SHARE_MIN * whole_s or share_s < seen.waiting_s:
        return None
    if seen.settings.persistent_workers or seen.settings.num_workers == 0:
        return None
    return Diagnosis(
        Limit.WORKER_START,
        "Worker startup limits the program: workers are restarted for each epoch of "
        f"{seen.epoch_steps:.0f} steps, and the first batch of an epoch arrived after "
        f"{format_time(seen.start_s)}: {format_share(share_s / whole_s)} of the time.",
    )


def _trainer(seen: Observation) -> Diagnosis | None:
    if seen.step_s > 0 and seen.waiting_s >= WAITING_SHARE_MIN * seen.step_s:
        return None
    if seen.loader_s > _LOADER_SHARE_MIN * seen.step_s:
        return Diagnosis(
            Limit.LOADER,
            "Delivering batches limits the program: the loader takes "
            f"{format_time(seen.loader_s)} of a step of {format_time(seen.step_s)} for it. Larger "
            "batches would reduce this share.",
        )
    waits = f"it waits for batches for {_waiting(seen)}"
    movable_s = seen.movable_s or 0.0
    if movable_s > _MOVABLE_SHARE_MIN * seen.step_s and not seen.is_offloaded:
        return Diagnosis(
            Limit.OFFLOAD,
            f"The program's computation limits it: a step takes {format_time(seen.step_s)}, and "
            f"{waits}. Of the computation, {format_time(movable_s)} is preprocessing that the "
            "workers could do.",
        )
    return Diagnosis(
        Limit.TRAINER,
        f"The program's computation limits it: a step takes {format_time(seen.step_s)}, and "
        f"{waits}. The loader is fast enough.",
    )


def _elsewhere(seen: Observation) -> Diagnosis | None:
    """Diagnose waiting that is not for making batches."""
    waiting = {name: seconds for name, seconds in seen.waiting.items() if seconds > 0}
    making_s = sum(waiting.get(name, 0.0) for name in MAKING_PARTS)
    wire_s = waiting.get("wire_s", 0.0)
    diagnoses: dict[str, Callable[[float], Diagnosis]] = {
        "wire_s": lambda share: Diagnosis(
            Limit.LINK,
            f"The link to the workers limits the program: for {format_share(share)} of a step it "
            f"waits for the transfer of a batch. A batch is "
            f"{format_bytes(seen.batch_bytes)}"
            + (
                f", {format_bytes(seen.batch_bytes / seen.step_s)} per second."
                if seen.step_s
                else "."
            ),
        ),
        "device_s": lambda share: Diagnosis(
            Limit.DEVICE,
            "Copying to the device limits the program: it waits for the copy for "
            f"{format_share(share)} of a step.",
        ),
        "ranks_s": lambda share: Diagnosis(
            Limit.RANKS,
            f"Other ranks limit the program: it waits for their batches for "
            f"{format_share(share)} of a step.",
        ),
    }
    largest = max(diagnoses, key=lambda name: waiting.get(name, 0.0))
    if waiting.get(largest, 0.0) <= making_s or (largest == "wire_s" and wire_s <= 0):
        return None
    return diagnoses[largest](waiting[largest] / seen.step_s)


def _making(seen: Observation) -> Diagnosis:
    looks = (_single_samples, _prefetch, _no_workers, _storage, _few_workers)
    return next((found for look in looks if (found := look(seen)) is not None), _stage(seen))


def _single_samples(seen: Observation) -> Diagnosis | None:
    slow = _slow_samples(seen)
    if seen.settings.num_workers == 0 or slow is None:
        return None
    if not _removes_waiting(modelled_step_s(_even(seen), seen.settings), _REMEDY_SHARE, seen):
        return None
    return Diagnosis(
        Limit.SLOW_SAMPLES,
        f"Single slow samples limit the program: {slow}, while a sample takes "
        f"{format_time(seen.dataset_s / max(1, seen.batch_samples))} on average, and "
        f"{_waits(seen)}.",
    )


def _prefetch(seen: Observation) -> Diagnosis | None:
    settings = seen.settings
    if settings.num_workers == 0 or settings.prefetch_factor >= _DEEP_PREFETCH:
        return None
    if seen.batches:
        deep = replace(settings, prefetch_factor=_DEEP_PREFETCH)
        is_cured = _removes_waiting(modelled_step_s(seen, deep), _REMEDY_SHARE, seen)
    else:
        is_cured = seen.waiting_s - _even_waiting_s(seen) >= _REMEDY_SHARE * seen.waiting_s
    if not is_cured:
        return None
    return Diagnosis(
        Limit.PREFETCH,
        "Too few prefetched batches limit the program: batch times vary, the workers would keep "
        f"up on average ({format_time(seen.making_s)} per batch, {settings.num_workers} in "
        f"parallel, while a step computes for {format_time(seen.compute_s)}), and still "
        f"{_waits(seen)}.",
    )


def _no_workers(seen: Observation) -> Diagnosis | None:
    if seen.settings.num_workers > 0 or seen.has_pool:
        return None
    return Diagnosis(
        Limit.WORKERS,
        "No worker makes batches while the program computes (num_workers=0): "
        f"{_shares_of_making(seen)}, and {_waits(seen)}.",
    )


def _storage(seen: Observation) -> Diagnosis | None:
    stage, _ = _main_stage(seen)
    waits_s = waiting_in_dataset_s(seen)
    is_of_dataset = stage in (Limit.DATASET, Limit.TRANSFORM)
    # Waiting for a CPU is no work, and may be caused by other programs.
    if not is_of_dataset or waits_s <= _WAITING_DATASET_SHARE * undelayed_making_s(seen):
        return None
    return Diagnosis(
        Limit.STORAGE,
        "The dataset waits for storage, a network or a lock: a worker takes "
        f"{format_time(seen.making_s)} per batch, of which it computes for "
        f"{format_time(seen.worker_cpu_s or 0.0)}, waits for a CPU for "
        f"{format_time(seen.worker_delay_s)} and for other resources for {format_time(waits_s)}, "
        f"and {_waits(seen)}.",
    )


def _few_workers(seen: Observation) -> Diagnosis | None:
    settings = seen.settings
    if settings.num_workers >= seen.cpus or seen.has_pool:
        return None
    more = replace(settings, num_workers=seen.cpus)
    if not _removes_waiting(modelled_step_s(seen, more), _WORKERS_REMEDY_SHARE, seen):
        return None
    count = settings.num_workers
    who = "1 worker shares" if count == 1 else f"{count} workers share"
    return Diagnosis(
        Limit.WORKERS,
        f"Too few workers limit the program: a worker takes {format_time(seen.making_s)} per "
        f"batch ({_shares_of_making(seen)}), {who} {seen.cpus} CPUs with the program, and "
        f"{_waits(seen)}.",
    )


def _stage(seen: Observation) -> Diagnosis:
    stage, seconds = _main_stage(seen)
    who = {
        Limit.TRANSFORM: "The dataset's transform",
        Limit.COLLATE: "Collating",
        Limit.PREFIX: "The part of the model that runs in the workers",
        Limit.DATASET: "The dataset's code",
    }[stage]
    room = "the pool's workers are busy" if seen.has_pool else f"{seen.cpus} CPUs are busy with it"
    return Diagnosis(
        stage,
        f"{who} limits the program: it takes {format_time(seconds)} of the "
        f"{format_time(seen.making_s)} that a worker takes per batch, {room}, and {_waits(seen)}.",
    )


def _waits(seen: Observation) -> str:
    return f"the program waits for batches for {_waiting(seen)}"


def _waiting(seen: Observation) -> str:
    """Return the share of the waiting: the one that the report itself shows, or a step's."""
    if seen.waiting_share is not None:
        return f"{format_share(seen.waiting_share)} of the time"
    return f"{format_share(seen.waiting_s / max(seen.step_s, 1e-12))} of a step"


def _removes_waiting(step_s: float, share: float, seen: Observation) -> bool:
    """Return whether a modelled step of ``step_s`` removes this share of the model's waiting. A
    part of the observed waiting may be caused by other programs on these CPUs."""
    now_s = modelled_step_s(seen, seen.settings)
    waiting_s = now_s - own_step_s(seen)
    return waiting_s > 0 and now_s - step_s >= share * waiting_s


def _even(seen: Observation) -> Observation:
    """Return the observation as if no sample were slow."""
    batches = tuple(
        MadeBatch(max(0.0, one.making_s - one.slow_sample_s), one.compute_s) for one in seen.batches
    )
    before_s = sum(one.making_s for one in seen.batches)
    left = sum(one.making_s for one in batches) / before_s if before_s > 0 else 1.0
    cpu_s = None if seen.worker_cpu_s is None else left * seen.worker_cpu_s
    return replace(seen, batches=batches, worker_cpu_s=cpu_s)


def _slow_samples(seen: Observation) -> str | None:
    """Describe the slowest samples, if they are far slower than others."""
    if not seen.slow_samples or not any(one.slow_sample_s > 0 for one in seen.batches):
        return None
    usual_s = seen.dataset_s / max(1, seen.batch_samples)
    seconds, name = seen.slow_samples[0]
    if seconds < SLOW_SAMPLE_RATIO * usual_s:
        return None
    slow_s = sum(one.slow_sample_s for one in seen.batches) / len(seen.batches)
    if slow_s <= seen.worker_delay_s and seconds < _SURELY_SLOW_S:
        return None  # a sample in which its worker waited for a CPU looks slow
    return f"{name} took {format_time(seconds)}"


def _even_waiting_s(seen: Observation) -> float:
    """Return the waiting that would be left if all batches were like the mean."""
    own_s = seen.compute_s + seen.loader_s
    return max(0.0, seen.making_s / max(1, seen.settings.num_workers) - own_s)


def _main_stage(seen: Observation) -> tuple[Limit, float]:
    transform_s = seen.transform_s or 0.0
    stages = {
        Limit.TRANSFORM: transform_s,
        Limit.DATASET: max(0.0, seen.dataset_s - transform_s),
        Limit.COLLATE: seen.collate_s,
        Limit.PREFIX: seen.prefix_s,
    }
    stage = max(stages, key=stages.__getitem__)
    return stage, stages[stage]


def _shares_of_making(seen: Observation) -> str:
    transform_s = seen.transform_s or 0.0
    parts = {
        "the dataset": max(0.0, seen.dataset_s - transform_s),
        "its transform": transform_s,
        "collating": seen.collate_s,
        "moved calls": seen.prefix_s,
    }
    shown = [f"{name} {format_time(seconds)}" for name, seconds in parts.items() if seconds > 0]
    return ", ".join(shown) or "no stage was timed"


def replayed_step_s(
    batches: Sequence[MadeBatch], settings: LoaderSettings, loader_s: float
) -> float:
    """Return the mean step time if these batches are repeated, with CPUs for all processes."""
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
    """Return the seconds of a whole step with ``settings``, from observations with others."""
    now, then = modelled_step_s(seen, seen.settings), modelled_step_s(seen, settings)
    within = seen.step_s * then / now if now > 0 else seen.step_s
    return within + _start_share_s(seen, settings)


def modelled_step_s(seen: Observation, settings: LoaderSettings) -> float:
    """Return the time of the slowest stage, without an epoch's start."""
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
    """Return the step time of a program that never waits, neither for a batch nor for a CPU."""
    return seen.compute_s - _compute_delay_s(seen) + seen.loader_s


def cpus_step_s(seen: Observation) -> float:
    """Return the CPU time of all processes for a step, divided by the CPUs that they share. 0 if it
    is unknown, or if the workers are elsewhere."""
    if seen.worker_cpu_s is None or seen.has_pool:
        return 0.0
    trainer_s = seen.trainer_cpu_s if seen.trainer_cpu_s is not None else seen.compute_s
    return (seen.worker_cpu_s + trainer_s) / max(1, seen.cpus)


def batches_of(seen: Observation) -> Sequence[MadeBatch]:
    """Return the observed batches; if only means are known, one that is like the mean."""
    return seen.batches or (MadeBatch(seen.making_s, seen.compute_s),)


def waiting_in_dataset_s(seen: Observation) -> float:
    """Return a worker's seconds for a batch in which it neither was on a CPU nor waited for one:
    for storage, a network or a lock."""
    share = seen.cpu_share
    return seen.making_s * (1 - (_UNKNOWN_CPU_SHARE if share is None else share))


def _making_scale(seen: Observation, settings: LoaderSettings) -> float:
    """Return the factor by which a worker takes longer for a batch. Threads share its waiting."""
    if seen.making_s <= 0:
        return 1.0
    waits_s = waiting_in_dataset_s(seen)
    most = max(1, seen.batch_samples)
    threads_now = min(seen.settings.fetch_threads, most)
    threads_then = min(settings.fetch_threads, most)
    computes_s = max(0.0, undelayed_making_s(seen) - waits_s)
    return (computes_s + waits_s * threads_now / threads_then) / seen.making_s


def undelayed_making_s(seen: Observation) -> float:
    """Return a worker's seconds for a batch without the wait for a CPU: the CPUs are a separate
    stage.
    """
    return seen.making_s - _delay_s(seen)


def _delay_s(seen: Observation) -> float:
    """Return the CPU wait in a worker's seconds for a batch. The count covers all its threads."""
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
    """Return a step's share of the start: persistent workers start an epoch with the batches that
    they made while the last one ended."""
    if settings.num_workers == 0:
        return 0.0
    if settings.persistent_workers and not seen.settings.persistent_workers:
        return 0.0
    return seen.start_share_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
