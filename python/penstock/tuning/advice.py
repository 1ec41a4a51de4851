# SPDX-License-Identifier: Apache-2.0
"""Changes that would make a program faster, the best first, each with its predicted step time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from penstock import _C
from penstock.tuning.limiting import (
    Diagnosis,
    Limit,
    diagnose,
    predicted_step_s,
    undelayed_making_s,
    waiting_in_dataset_s,
)
from penstock.tuning.observation import LoaderSettings, Observation, format_bytes

# If several settings promise the same within this share, the smallest are taken.
SAME_SHARE = 0.03
_WAITING_SHARE_MIN = 0.2  # of a worker's time, from which threads are worthwhile
_PREFETCH_FACTORS = (1, 2, 4, 8, 16)
_THREADS = (1, 4, 16, 64)
_MEMORY_SHARE = 0.25  # of free memory, for batches requested ahead
_POOL_WORKERS_MAX = 64
_ORDER_SHARE_MIN = 0.1  # of a step, from which in_order=False would end a wait
_POOL_GAIN_MIN = 0.2


@dataclass(frozen=True, slots=True)
class Change:
    """One change to make. ``settings`` are the loader's settings after it; None if the loader alone
    cannot make it: then ``text`` describes the action."""

    text: str
    predicted_step_s: float | None
    settings: LoaderSettings | None = None
    note: str = ""  # its other effects


@dataclass(frozen=True, slots=True)
class Advice:
    diagnosis: Diagnosis
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        if not self.changes:
            return str(self.diagnosis)
        first = self.changes[0]
        note = f" {first.note}" if first.note else ""
        return f"{self.diagnosis} Try first: {first.text}.{note}"


def advise(seen: Observation, allow_reordering: bool = False) -> Advice:
    """Return what limits the program, and the changes to make, the most promising first."""
    diagnosis = diagnose(seen)
    changes = [*_settings_changes(seen, allow_reordering), *_untried_changes(seen, diagnosis)]
    promised = [one.predicted_step_s for one in changes if one.predicted_step_s is not None]
    changes += _environment_changes(seen, diagnosis, min(promised, default=seen.whole_step_s))
    return Advice(diagnosis, tuple(changes))


def possible_settings(
    seen: Observation, allow_reordering: bool = False
) -> Iterator[LoaderSettings]:
    """Return all settings that could be tried: none of them changes the batches of the loader,
    unless that is allowed."""
    now = seen.settings
    persistent = sorted({now.persistent_workers, True})
    waits_for_turn = seen.waiting.get("order_s", 0.0) > _ORDER_SHARE_MIN * seen.step_s
    is_free = allow_reordering and now.in_order and waits_for_turn
    for workers in _worker_counts(seen, allow_reordering):
        for threads in _thread_counts(seen):
            for factor in _prefetch_factors(seen, workers):
                for is_persistent in persistent if workers > 0 else [False]:
                    for offload in _offloads(seen, workers):
                        made = replace(
                            now,
                            num_workers=workers,
                            fetch_threads=threads,
                            prefetch_factor=factor,
                            persistent_workers=is_persistent,
                            offload=offload,
                        )
                        yield made
                        if is_free and workers > 1:
                            yield replace(made, in_order=False)


def best_first(
    seen: Observation, candidates: Iterable[LoaderSettings]
) -> list[tuple[float, LoaderSettings]]:
    """Return the settings with the step time that each promises. Settings that promise the same are
    in the order of their costs: workers, threads, memory, and then of their side effects."""
    known: dict[tuple[object, ...], float] = {}

    def promise(settings: LoaderSettings) -> float:
        key = (*_parts(settings), settings.persistent_workers)
        if key not in known:
            known[key] = predicted_step_s(seen, settings)
        return known[key]

    rated = [(promise(settings), settings) for settings in candidates]
    left = sorted(rated, key=lambda one: one[0])
    ordered: list[tuple[float, LoaderSettings]] = []
    while left:
        bound = left[0][0] * (1 + SAME_SHARE)
        alike = [one for one in left if one[0] <= bound]
        left = left[len(alike) :]
        ordered += sorted(alike, key=lambda one: _cost(seen, one[1]))
    return ordered


def _parts(settings: LoaderSettings) -> tuple[object, ...]:
    return (
        settings.num_workers,
        settings.fetch_threads,
        settings.prefetch_factor,
        settings.in_order,
        settings.seeding,
        settings.offload,
    )


def _cost(seen: Observation, settings: LoaderSettings) -> tuple[float, ...]:
    now = seen.settings
    return (
        settings.offload != now.offload,
        settings.in_order != now.in_order,
        settings.num_workers != now.num_workers,
        settings.num_workers,
        settings.fetch_threads != now.fetch_threads,
        settings.fetch_threads,
        settings.persistent_workers != now.persistent_workers,
        abs(settings.prefetch_factor - max(2, now.prefetch_factor)),
    )


def _worker_counts(seen: Observation, allow_reordering: bool) -> list[int]:
    now = seen.settings.num_workers
    if (seen.order_of_workers and not allow_reordering) or seen.has_pool:
        return [now]
    waits = waiting_in_dataset_s(seen) > _WAITING_SHARE_MIN * undelayed_making_s(seen)
    most = _C.WorkerLimits(seen.cpus).waiting_workers if waits else seen.cpus + 1
    counts, step = {now, now + 1, max(1, now - 1), seen.cpus, most}, 1
    while step <= most:
        counts |= {step, step + step // 2}  # 1, 2, 3, 4, 6, 8, 12 ...
        step *= 2
    return sorted(count for count in counts if count <= max(most, now) and (count > 0 or now == 0))


def _thread_counts(seen: Observation) -> list[int]:
    now = seen.settings.fetch_threads
    if not seen.takes_threads:
        return [now]
    waits = waiting_in_dataset_s(seen) > _WAITING_SHARE_MIN * undelayed_making_s(seen)
    most = seen.batch_samples if waits else 1
    return sorted({now, *(count for count in _THREADS if count <= most)})


def _prefetch_factors(seen: Observation, workers: int) -> list[int]:
    now = seen.settings.prefetch_factor
    room = seen.memory_free_bytes
    if workers == 0 or seen.batch_bytes <= 0 or room is None:
        return [now] if workers == 0 else sorted({now, *_PREFETCH_FACTORS})
    fits = [
        factor
        for factor in _PREFETCH_FACTORS
        if factor * workers * seen.batch_bytes <= _MEMORY_SHARE * room
    ]
    return sorted({now, *fits})


def _offloads(seen: Observation, workers: int) -> list[bool]:
    now = seen.settings.offload
    can_move = seen.movable_s is not None and seen.movable_s > 0 and not seen.is_offloaded
    return [now, True] if can_move and workers > 0 and not now else [now]


def _settings_changes(seen: Observation, allow_reordering: bool) -> Iterator[Change]:
    """Yield the best settings of the loader, if they promise an improvement."""
    rated = best_first(seen, possible_settings(seen, allow_reordering))
    promised_s, settings = rated[0]
    if promised_s >= seen.whole_step_s * (1 - SAME_SHARE) or settings == seen.settings:
        return
    yield Change(
        settings.format_changes_from(seen.settings),
        promised_s,
        settings,
        side_effects_of(seen, settings),
    )


def side_effects_of(seen: Observation, settings: LoaderSettings) -> str:
    """Return the effects of a change of settings other than the speed."""
    now, notes = seen.settings, []
    if settings.fetch_threads > 1 and now.fetch_threads == 1:
        notes.append(
            "The dataset must be thread-safe, and random numbers that its samples draw from the "
            "global generators are then not reproducible."
        )
    if settings.num_workers != now.num_workers and seen.order_of_workers:
        notes.append(
            "The batch order of an iterable dataset depends on num_workers, and the dataset must "
            "divide its samples among the workers by get_worker_info()."
        )
    if settings.persistent_workers and not now.persistent_workers:
        notes.append("Persistent workers do not see changes that the program makes to the dataset.")
    if settings.in_order != now.in_order:
        notes.append("The batch order then differs from run to run.")
    return " ".join(notes)


def _untried_changes(seen: Observation, diagnosis: Diagnosis) -> Iterator[Change]:
    """Yield options that change the stream: they are named, and not tried."""
    settings = seen.settings
    if seen.order_of_workers and not seen.has_pool and diagnosis.limit in _MAKING:
        yield Change(
            "num_workers=N with a dataset that divides its samples among the workers, or "
            "seeding='batch' with shards=N, after which the number of workers does not affect the "
            "batches",
            None,
            note="Either changes the batch order once.",
        )
    if settings.num_workers > 1 and settings.in_order and diagnosis.limit in _UNEVEN:
        free = replace(settings, in_order=False)
        yield Change(
            "in_order=False",
            predicted_step_s(seen, free),
            note="The batch order then differs from run to run.",
        )
        if settings.seeding is None and not seen.order_of_workers:
            any_worker = replace(settings, seeding="batch")
            yield Change(
                "seeding='batch'",
                predicted_step_s(seen, any_worker),
                note="Any worker can then make any batch. Random numbers of samples change once, "
                "and are then the same for any number of workers.",
            )


_UNEVEN = (Limit.SLOW_SAMPLES, Limit.PREFETCH)
_MAKING = (
    Limit.DATASET,
    Limit.STORAGE,
    Limit.TRANSFORM,
    Limit.COLLATE,
    Limit.PREFIX,
    Limit.WORKERS,
    Limit.SLOW_SAMPLES,
)


def _environment_changes(
    seen: Observation, diagnosis: Diagnosis, promised_step_s: float
) -> Iterator[Change]:
    """Yield changes beyond the loader's options, which promise ``promised_step_s`` per step."""
    limit = diagnosis.limit
    if (
        limit in (Limit.DATASET, Limit.TRANSFORM, Limit.COLLATE, Limit.WORKERS)
        and not seen.has_pool
    ):
        yield from _pool(seen, promised_step_s)
    if limit is Limit.STORAGE:
        yield Change(
            "where files are not cached: a copy on a local disk, fewer and larger files, or a "
            "cache for the object store",
            None,
        )
    if limit is Limit.SLOW_SAMPLES:
        names = ", ".join(name for _, name in seen.slow_samples[:3])
        yield Change(f"examine the slowest samples: {names}", None)
    if limit is Limit.COLLATE:
        yield Change(
            "a collate_fn that stacks tensors once (torch's default_collate runs natively here), "
            "or samples that are tensors instead of Python objects",
            None,
        )
    if limit is Limit.TRANSFORM:
        yield Change(
            "the part of the transform that is the same for all samples, moved into the model: "
            "penstock.offload() runs it in the workers, on whole batches",
            None,
        )
    if limit is Limit.LINK:
        yield Change(
            "fewer bytes: uint8 instead of float32 for images, converted in the model, with "
            "penstock.offload(), which also omits tensors that the model does not read",
            None,
        )
        yield Change("local workers in addition to the pool (num_workers), or a faster link", None)
    if limit is Limit.MEMORY:
        yield from _memory(seen)
    if limit is Limit.LOADER:
        yield Change("a larger batch_size", None, note="This changes the training.")
    if limit is Limit.DEVICE or (seen.is_on_gpu and not seen.settings.pin_memory):
        yield Change("device='cuda', which copies batches ahead of use", None)
    if limit is Limit.TRAINER and seen.movable_s is None and not seen.is_offloaded:
        yield Change(
            "`penstock explain` shows whether part of the model could run in the workers", None
        )


def _pool(seen: Observation, promised_step_s: float) -> Iterator[Change]:
    """Yield as many remote workers as keep the program busy, if this machine cannot."""
    own_s = max(seen.compute_s + seen.loader_s, (seen.trainer_cpu_s or 0.0) / max(1, seen.cpus))
    step_s = max(own_s, seen.making_s / _POOL_WORKERS_MAX)
    if step_s <= 0 or step_s > promised_step_s * (1 - _POOL_GAIN_MIN):
        return
    count = max(1, math.ceil(seen.making_s / step_s))
    yield Change(
        f"a pool of {count} worker{'s' if count > 1 else ''} on other machines (penstock worker; "
        f"PENSTOCK_POOL=tcp://HOST:PORT), with {count} CPUs for them",
        max(own_s, seen.making_s / count),
        note="Random numbers of samples then follow seeding='batch'.",
    )


def _memory(seen: Observation) -> Iterator[Change]:
    ahead = max(1, seen.settings.ahead)
    room = int(1.2 * seen.batch_bytes * (seen.settings.prefetch_factor + 1)) + 1
    if seen.inline_batches or seen.copied_batches:
        yield Change(
            f"PENSTOCK_ARENA_BYTES={room}, the shared memory of one worker, which holds "
            f"{seen.settings.prefetch_factor} prefetched batches of "
            f"{format_bytes(seen.batch_bytes)} and one more",
            None,
        )
    if seen.copied_batches:
        yield Change("release batches after use: each batch that is kept is copied", None)
    if seen.memory_reads_per_s > 0 or not (seen.inline_batches or seen.copied_batches):
        yield Change(
            f"less memory: fewer than {ahead} batches ahead (prefetch_factor, prefetch_bytes), "
            "fewer workers, a dataset in penstock.SharedList",
            None,
        )
