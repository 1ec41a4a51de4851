# SPDX-License-Identifier: Apache-2.0
"""What limits a program: one name, the reason in a sentence, from what was seen alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from penstock.tuning.observation import MAKING_PARTS, MadeBatch, Observation
from penstock.tuning.spoken_numbers import spoken_bytes, spoken_share, spoken_time
from penstock.tuning.step_model import (
    modelled_step_s,
    own_step_s,
    undelayed_making_s,
    waiting_in_dataset_s,
)

# Below these shares of a step nothing is gained that anybody would see.
WAITING_SHARE_MIN = 0.08
_START_SHARE_MIN = 0.12
_LOADER_SHARE_MIN = 0.5
_MOVABLE_SHARE_MIN = 0.1
# A change that takes this part of the waiting away shows what the waiting was for.
_CURE_SHARE = 0.6
_WORKERS_CURE_SHARE = 0.35
_ENOUGH_AHEAD = 16  # batches for each worker
# A sample is slow that takes this many times as long as its batch's samples do.
SLOW_SAMPLE_RATIO = 5.0
_SURELY_SLOW_S = 0.2  # longer than a thread waits for a CPU, as a rule
_WAITING_DATASET_SHARE = 0.5
_NO_MEMORY_SHARE = 0.25  # of the batches
_PAGES_READ_PER_S = 50.0  # from a disk, by processes that were at work before
_MEMORY_FREE_MIN = 256 << 20


class Limit(Enum):
    """The names of what limits a program."""

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
    """The same observation always gives the same diagnosis."""
    for look in (_memory, _worker_start, _trainer, _elsewhere, _making):
        found = look(seen)
        if found is not None:
            return found
    raise AssertionError("making a batch is what remains")


def _memory(seen: Observation) -> Diagnosis | None:
    lost_s = seen.waiting_s + seen.loader_s
    if lost_s < WAITING_SHARE_MIN * seen.step_s or seen.delivered == 0:
        return None
    if seen.inline_batches >= _NO_MEMORY_SHARE * seen.delivered:
        return Diagnosis(
            Limit.MEMORY,
            f"Memory limits the program: {seen.inline_batches} of {seen.delivered} batches of "
            f"{spoken_bytes(seen.batch_bytes)} found no shared memory, and were copied through a "
            f"socket.",
        )
    if seen.copied_batches >= _NO_MEMORY_SHARE * seen.delivered:
        return Diagnosis(
            Limit.MEMORY,
            f"Memory limits the program: {seen.copied_batches} of {seen.delivered} batches of "
            f"{spoken_bytes(seen.batch_bytes)} were copied, since the program holds more of them "
            f"than the workers' shared memory has room for.",
        )
    free = seen.memory_free_bytes
    is_short = free is not None and free < max(_MEMORY_FREE_MIN, 2 * seen.batch_bytes)
    if seen.memory_reads_per_s > _PAGES_READ_PER_S and is_short:
        return Diagnosis(
            Limit.MEMORY,
            f"Memory limits the program: {spoken_bytes(free or 0)} are free, and the system read "
            f"{seen.memory_reads_per_s:.0f} pages a second back from disk.",
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
        f"The beginnings of epochs limit the program: workers are started anew for each epoch of "
        f"{seen.epoch_steps:.0f} steps, and its first batch came after "
        f"{spoken_time(seen.start_s)}: {spoken_share(share_s / whole_s)} of the time.",
    )


def _trainer(seen: Observation) -> Diagnosis | None:
    if seen.step_s > 0 and seen.waiting_s >= WAITING_SHARE_MIN * seen.step_s:
        return None
    if seen.loader_s > _LOADER_SHARE_MIN * seen.step_s:
        return Diagnosis(
            Limit.LOADER,
            f"Handing over batches limits the program: the loader takes "
            f"{spoken_time(seen.loader_s)} of a step of {spoken_time(seen.step_s)} for it. Batches "
            f"of more samples would share that.",
        )
    waits = f"it waits for batches {_waiting(seen)}"
    movable_s = seen.movable_s or 0.0
    if movable_s > _MOVABLE_SHARE_MIN * seen.step_s and not seen.is_offloaded:
        return Diagnosis(
            Limit.OFFLOAD,
            f"The program's own work limits it: a step takes {spoken_time(seen.step_s)}, and "
            f"{waits}. Of its work, {spoken_time(movable_s)} is preprocessing that the workers "
            f"could do.",
        )
    return Diagnosis(
        Limit.TRAINER,
        f"The program's own work limits it: a step takes {spoken_time(seen.step_s)}, and {waits}. "
        f"The loader keeps up.",
    )


def _elsewhere(seen: Observation) -> Diagnosis | None:
    """Waiting that is not for batches to be made."""
    waiting = {name: seconds for name, seconds in seen.waiting.items() if seconds > 0}
    making_s = sum(waiting.get(name, 0.0) for name in MAKING_PARTS)
    wire_s = waiting.get("wire_s", 0.0)
    told: dict[str, Callable[[float], Diagnosis]] = {
        "wire_s": lambda share: Diagnosis(
            Limit.LINK,
            f"The link to the workers limits the program: for {spoken_share(share)} of a step it "
            f"waits while bytes of a batch are on their way. A batch is "
            f"{spoken_bytes(seen.batch_bytes)}"
            + (
                f", {spoken_bytes(seen.batch_bytes / seen.step_s)} a second."
                if seen.step_s
                else "."
            ),
        ),
        "device_s": lambda share: Diagnosis(
            Limit.DEVICE,
            f"Copying to the device limits the program: it waits for that for "
            f"{spoken_share(share)} of a step.",
        ),
        "ranks_s": lambda share: Diagnosis(
            Limit.RANKS,
            f"Other ranks limit the program: it waits for their batches for "
            f"{spoken_share(share)} of a step.",
        ),
    }
    largest = max(told, key=lambda name: waiting.get(name, 0.0))
    if waiting.get(largest, 0.0) <= making_s or (largest == "wire_s" and wire_s <= 0):
        return None
    return told[largest](waiting[largest] / seen.step_s)


def _making(seen: Observation) -> Diagnosis:
    looks = (_single_samples, _prefetch, _no_workers, _storage, _few_workers)
    return next((found for look in looks if (found := look(seen)) is not None), _stage(seen))


def _single_samples(seen: Observation) -> Diagnosis | None:
    slow = _slow_samples(seen)
    if seen.settings.num_workers == 0 or slow is None:
        return None
    if not _cures(modelled_step_s(_even(seen), seen.settings), _CURE_SHARE, seen):
        return None
    return Diagnosis(
        Limit.SLOW_SAMPLES,
        f"Single slow samples limit the program: {slow}, where a sample takes "
        f"{spoken_time(seen.dataset_s / max(1, seen.batch_samples))} on average, and "
        f"{_waits(seen)}.",
    )


def _prefetch(seen: Observation) -> Diagnosis | None:
    settings = seen.settings
    if settings.num_workers == 0 or settings.prefetch_factor >= _ENOUGH_AHEAD:
        return None
    if seen.batches:
        deep = replace(settings, prefetch_factor=_ENOUGH_AHEAD)
        is_cured = _cures(modelled_step_s(seen, deep), _CURE_SHARE, seen)
    else:
        is_cured = seen.waiting_s - _even_waiting_s(seen) >= _CURE_SHARE * seen.waiting_s
    if not is_cured:
        return None
    return Diagnosis(
        Limit.PREFETCH,
        f"Looking ahead too little limits the program: batches take different times, the workers "
        f"would keep up on average ({spoken_time(seen.making_s)} for a batch, "
        f"{settings.num_workers} at once, while a step computes {spoken_time(seen.compute_s)}), "
        f"and still {_waits(seen)}.",
    )


def _no_workers(seen: Observation) -> Diagnosis | None:
    if seen.settings.num_workers > 0 or seen.has_pool:
        return None
    return Diagnosis(
        Limit.WORKERS,
        f"Nobody makes batches while the program computes (num_workers=0): "
        f"{_shares_of_making(seen)}, and {_waits(seen)}.",
    )


def _storage(seen: Observation) -> Diagnosis | None:
    stage, _ = _main_stage(seen)
    waits_s = waiting_in_dataset_s(seen)
    is_of_dataset = stage in (Limit.DATASET, Limit.TRANSFORM)
    # Waiting for a CPU is no work, and may be for other programs.
    if not is_of_dataset or waits_s <= _WAITING_DATASET_SHARE * undelayed_making_s(seen):
        return None
    return Diagnosis(
        Limit.STORAGE,
        f"The dataset waits for storage, a network or a lock: a worker takes "
        f"{spoken_time(seen.making_s)} for a batch, of which it computes "
        f"{spoken_time(seen.worker_cpu_s or 0.0)}, waits for a CPU "
        f"{spoken_time(seen.worker_delay_s)} and for something else {spoken_time(waits_s)}, and "
        f"{_waits(seen)}.",
    )


def _few_workers(seen: Observation) -> Diagnosis | None:
    settings = seen.settings
    if settings.num_workers >= seen.cpus or seen.has_pool:
        return None
    more = replace(settings, num_workers=seen.cpus)
    if not _cures(modelled_step_s(seen, more), _WORKERS_CURE_SHARE, seen):
        return None
    who = "1 of them shares" if settings.num_workers == 1 else f"{settings.num_workers} share"
    return Diagnosis(
        Limit.WORKERS,
        f"Too few workers limit the program: a worker takes {spoken_time(seen.making_s)} for a "
        f"batch ({_shares_of_making(seen)}), {who} {seen.cpus} CPUs with the program, and "
        f"{_waits(seen)}.",
    )


def _stage(seen: Observation) -> Diagnosis:
    stage, seconds = _main_stage(seen)
    who = {
        Limit.TRANSFORM: "The dataset's transform",
        Limit.COLLATE: "Collating",
        Limit.PREFIX: "The part of the model that runs in the workers",
        Limit.DATASET: "The dataset's own code",
    }[stage]
    room = "the pool's workers are busy" if seen.has_pool else f"{seen.cpus} CPUs are busy with it"
    return Diagnosis(
        stage,
        f"{who} limits the program: it takes {spoken_time(seconds)} of the "
        f"{spoken_time(seen.making_s)} of a worker for a batch, {room}, and {_waits(seen)}.",
    )


def _waits(seen: Observation) -> str:
    return f"the program waits for batches for {_waiting(seen)}"


def _waiting(seen: Observation) -> str:
    """The share of the waiting: the one that the report itself tells, or that of a step."""
    if seen.waiting_share is not None:
        return f"{spoken_share(seen.waiting_share)} of the time"
    return f"{spoken_share(seen.waiting_s / max(seen.step_s, 1e-12))} of a step"


def _cures(step_s: float, share: float, seen: Observation) -> bool:
    """Whether a step of ``step_s``, as the model has it, takes this share of the model's waiting
    away. A part of the waiting that was seen may be for other programs on these CPUs."""
    now_s = modelled_step_s(seen, seen.settings)
    waiting_s = now_s - own_step_s(seen)
    return waiting_s > 0 and now_s - step_s >= share * waiting_s


def _even(seen: Observation) -> Observation:
    """As if no sample were slow."""
    batches = tuple(
        MadeBatch(max(0.0, one.making_s - one.slow_sample_s), one.compute_s) for one in seen.batches
    )
    before_s = sum(one.making_s for one in seen.batches)
    left = sum(one.making_s for one in batches) / before_s if before_s > 0 else 1.0
    cpu_s = None if seen.worker_cpu_s is None else left * seen.worker_cpu_s
    return replace(seen, batches=batches, worker_cpu_s=cpu_s)


def _slow_samples(seen: Observation) -> str | None:
    """The slowest samples in words, if they are far slower than others."""
    if not seen.slow_samples or not any(one.slow_sample_s > 0 for one in seen.batches):
        return None
    usual_s = seen.dataset_s / max(1, seen.batch_samples)
    seconds, name = seen.slow_samples[0]
    if seconds < SLOW_SAMPLE_RATIO * usual_s:
        return None
    slow_s = sum(one.slow_sample_s for one in seen.batches) / len(seen.batches)
    if slow_s <= seen.worker_delay_s and seconds < _SURELY_SLOW_S:
        return None  # a sample in which its worker waited for a CPU looks slow
    return f"{name} took {spoken_time(seconds)}"


def _even_waiting_s(seen: Observation) -> float:
    """The waiting that would be left if all batches were like the mean."""
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
    shown = [f"{name} {spoken_time(seconds)}" for name, seconds in parts.items() if seconds > 0]
    return ", ".join(shown) or "nothing was timed"
