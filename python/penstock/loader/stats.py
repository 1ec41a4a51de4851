# SPDX-License-Identifier: Apache-2.0
"""A loader's statistics, and its report on the time spent in each part.

``loader.stats()`` returns counts. ``loader.report()`` also recommends changes: the advice
(:mod:`penstock.tuning.advice`) sees a loader as :func:`facts_of` describes it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from penstock import _C
from penstock.loader.cache_stats import CacheStats
from penstock.loader.loader_run import LoaderRun
from penstock.loader.options import LoaderOptions
from penstock.loader.step_times import PARTS, WAITING_PARTS, SlowSample, StepTimes, WorkerTimes
from penstock.ranks.steps import EpochEnd
from penstock.tuning.advice import advise
from penstock.tuning.observation import LoaderSettings, Observation, format_share, format_time
from penstock.tuning.process_resources import memory_left_bytes, process_times, usable_cpus
from penstock.worker.threaded_fetch import fetches_whole_batches

SCHEMA = "penstock.report/1"
_STEPS_MIN = 4  # steps needed before advice is given
_BUSY_SHARE = 0.7  # of the workers' time; below it a wait for a free one is a wait for its start
_SHOWN_WORKERS = 8
_SETTINGS = (
    "fetch_threads",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "in_order",
    "seeding",
)


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts over all iterators of a loader, including live ones; returned by ``loader.stats()``.

    ``print(loader.stats())`` shows them as text. With ``num_workers=0`` and no pool, only
    ``iterator``, ``fallback_reason``, ``ledger``, ``slow_samples``, ``skipped_samples`` and
    ``cache`` are counted. Fields that end in ``_s`` are wall-clock seconds, ``_bytes`` bytes, and
    ``_j`` joules.

    Attributes:
        iterator (str | None): ``"penstock"``; ``"pool"``; ``"torch"``, torch's in-process iterator
            with ``num_workers=0``; or ``"fallback"``, torch's iterator because of
            ``fallback_reason``. None before the first ``iter()``.
        name (str | None): Name of the loader, from its argument ``name``.
        fallback_reason (str | None): Reason why torch's iterator was used; None if it was not.
        batches (int): Batches delivered.
        batch_bytes (int): Bytes of the tensors in the delivered batches.
        copied_batches (int): Delivered batches that were copied out of shared memory because the
            program keeps many others.
        inline_batches (int): Delivered batches that came through a socket because no shared memory
            was available.
        stale_batches (int): Batches that arrived after the program left their epoch, and were
            dropped.
        early_batches (int): Delivered batches that were requested before their epoch started.
        boundary_batches (int): Delivered batches with results of calls moved by
            :func:`penstock.offload`.
        compiled_batches (int): Number of these whose results were computed by compiled code.
        unrepeatable_batches (int): Delivered batches whose random numbers ``fetch_threads`` drew in
            no fixed order.
        withheld_bytes (int): Bytes of tensors that stayed with a pool's workers because the program
            did not read them, or that ``leaves`` gives to other ranks.
        recalled_batches (int): Batches sent once more because the program read such a tensor after
            all.
        device_widened_batches (int): Batches with tensors that a pool sent compressed and that were
            decompressed on the device. Without ``device=``, or if penstock was built without nvcc,
            the CPU decompresses them.
        arenas (int): Shared-memory arenas mapped.
        waits (int): Number of times the trainer waited for a batch.
        epochs_s (float): Time from the start of each epoch to its last batch, summed over epochs.
        wait_s (float): Part of ``epochs_s`` in which the trainer waited for batches.
        fetch_s (float): Time that workers took to make the delivered batches.
        prefix_s (float): Part of ``fetch_s`` for calls moved by :func:`penstock.offload`.
        outstanding (int): Batches requested that have not arrived.
        ready (int): Batches that have arrived and have not been delivered.
        pool_tenancies (int): Periods in which a worker of a pool served this loader. All ``pool_``
            fields exclude this trainer's processes.
        pool_metered_tenancies (int): Number of these with known energy use.
        pool_samples (int): Samples made by the pool's workers.
        pool_bytes (int): Bytes of the batches made by the pool's workers.
        pool_worker_s (float): Time that the pool's workers served, added up. ``penstock costs``
            also counts the pauses between two iterators for which workers are kept.
        pool_cpu_s (float): CPU time of the pool's workers in that time.
        pool_metered_energy_j (float): Energy used in ``pool_metered_tenancies``.
        worker_choice (WorkerChoice | None): Latest choice of ``num_workers="auto"``; None before.
        epoch_end (EpochEnd | None): End of the last epoch that all ranks ended together, with
            ``ranks`` and an iterable dataset: the number of steps, the rank that had no
            further batch, and the batches dropped on this rank.
        dataset_s (float): Part of ``fetch_s`` for samples.
        collate_s (float): Part of ``fetch_s`` for collating the samples and writing batches to
            shared memory.
        wire_s (float): Time that batches spent on the wire, added up.
        ledger (StepTimes): Time breakdown of the steps; also with ``num_workers=0``.
        workers (Mapping[int, WorkerTimes]): Times of each worker, by its number, or by its identity
            in a pool.
        slow_samples (tuple[SlowSample, ...]): Slowest samples, slowest first.
        skipped_samples (int): Number of times that ``on_error="skip"`` left a sample out of its
            batch, also with ``num_workers=0``.
        cache (CacheStats | None): Counts of the caches in the loader's dataset, also with
            ``num_workers=0``, added up over several :func:`penstock.cached`; None without any.
            Pool workers count in their caches, which this does not show.
    """

    iterator: str | None = None
    name: str | None = None
    fallback_reason: str | None = None
    batches: int = 0
    batch_bytes: int = 0
    copied_batches: int = 0
    inline_batches: int = 0
    stale_batches: int = 0
    early_batches: int = 0
    boundary_batches: int = 0
    compiled_batches: int = 0
    unrepeatable_batches: int = 0
    withheld_bytes: int = 0
    recalled_batches: int = 0
    device_widened_batches: int = 0
    arenas: int = 0
    waits: int = 0
    epochs_s: float = 0.0
    wait_s: float = 0.0
    fetch_s: float = 0.0
    prefix_s: float = 0.0
    outstanding: int = 0
    ready: int = 0
    pool_tenancies: int = 0
    pool_metered_tenancies: int = 0
    pool_samples: int = 0
    pool_bytes: int = 0
    pool_worker_s: float = 0.0
    pool_cpu_s: float = 0.0
    pool_metered_energy_j: float = 0.0
    worker_choice: _C.WorkerChoice | None = None
    epoch_end: EpochEnd | None = None
    dataset_s: float = 0.0
    collate_s: float = 0.0
    wire_s: float = 0.0
    ledger: StepTimes = StepTimes()
    workers: Mapping[int, WorkerTimes] = field(default_factory=dict)
    slow_samples: tuple[SlowSample, ...] = ()
    skipped_samples: int = 0
    cache: CacheStats | None = None

    @property
    def pool_energy_j(self) -> float | None:
        """Joules used by a pool's workers for this loader; None if any worker's use is
        unknown.
        """
        is_known = self.pool_tenancies == self.pool_metered_tenancies
        return self.pool_metered_energy_j if is_known else None

    def __str__(self) -> str:
        if self.iterator is None:
            return f"{_words_of(self.name)} has not been iterated over"
        end = "" if self.epoch_end is None else f"\n  {self.epoch_end}"
        if self.skipped_samples:
            end += f"\n  samples were left out of batches {self.skipped_samples} times"
        if self.cache is not None:
            end += f"\n  {self.cache}"
        if not self.batches:
            steps = f"; {self.ledger}" if self.ledger.steps else ""
            return f"{_words_of(self.name)} ({self.iterator}) has delivered no batches{steps}{end}"
        moved = (
            f", {1e3 * self.prefix_s / self.batches:.3g} ms of it on calls that offload() moved, "
            f"in {self.boundary_batches} batches"
            if self.boundary_batches
            else ""
        )
        lines = [
            f"{_words_of(self.name)} ({self.iterator}) delivered {self.batches} batches of "
            f"{self.batch_bytes / self.batches / 1e6:.3g} MB in {self.ledger.total_s:.3g} s, and "
            f"the trainer waited {format_share(self.ledger.waiting_share)} of that time",
            f"workers spent {1e3 * self.fetch_s / self.batches:.3g} ms on a batch{moved}",
            f"{self.ready} batches are ready and {self.outstanding} are requested",
        ]
        if self.ledger.steps:
            lines.append(str(self.ledger))
        notable = {
            "were copied, because the program holds many other batches": self.copied_batches,
            "were sent through a socket, for lack of shared memory": self.inline_batches,
            "arrived after their epoch had been left, and were dropped": self.stale_batches,
            "were made before their epoch started": self.early_batches,
            "were sent again, for a tensor that had been omitted": self.recalled_batches,
            "had tensors that the device decompressed": self.device_widened_batches,
            "have random numbers that cannot be reproduced": self.unrepeatable_batches,
        }
        lines += [f"{count} {what}" for what, count in notable.items() if count]
        if self.worker_choice is not None:
            lines.append(str(self.worker_choice))
        return "\n  ".join(lines) + end


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """Time breakdown of a loader's steps, with advice; returned by ``loader.report()``.

    ``str()`` of it is a text of several lines.

    Attributes:
        iterator (str | None): Kind of iterator, as in :class:`~penstock.loader.stats.LoaderStats`.
        name (str | None): Name of the loader, from its argument ``name``.
        ledger (StepTimes): Seconds of the steps, by part.
        workers (Mapping[int, WorkerTimes]): Times of each worker.
        slow_samples (tuple[SlowSample, ...]): Slowest samples, slowest first.
        limit (str): Name of the part that limits the program. Empty while too few steps were
            counted (less than 4).
        advice (str): A sentence or two. Empty like ``limit``.
        cache (CacheStats | None): Counts of the caches, as in
            :class:`~penstock.loader.stats.LoaderStats`.
    """

    iterator: str | None
    ledger: StepTimes
    workers: Mapping[int, WorkerTimes]
    slow_samples: tuple[SlowSample, ...]
    limit: str
    advice: str
    name: str | None = None
    cache: CacheStats | None = None

    def __str__(self) -> str:
        if self.ledger.steps == 0:
            return (
                f"{_words_of(self.name)} has counted no steps yet; request a report after an epoch"
            )
        steps = self.ledger.steps
        lines = [
            f"{_words_of(self.name)} ({self.iterator}) took {steps} steps of "
            f"{format_time(self.ledger.total_s / steps)}, and waited for batches "
            f"{format_share(self.ledger.waiting_share)} of the time"
        ]
        waited = {name: float(getattr(self.ledger, name)) for name in WAITING_PARTS}
        for name in sorted(waited, key=lambda name: -waited[name]):
            if waited[name] > 0.005 * self.ledger.total_s:
                share = waited[name] / self.ledger.total_s
                lines.append(
                    f"for {PARTS[name]}: {format_time(waited[name] / steps)} a step, "
                    f"{format_share(share)}"
                )
        busiest = sorted(self.workers.items(), key=lambda one: -one[1].waited_s)
        lines += [_worker_line(number, times) for number, times in busiest[:_SHOWN_WORKERS]]
        if len(busiest) > _SHOWN_WORKERS:
            lines.append(f"and {len(busiest) - _SHOWN_WORKERS} more workers")
        if self.slow_samples:
            lines.append("slowest: " + ", ".join(map(str, self.slow_samples[:3])))
        if self.cache is not None:
            lines.append(str(self.cache))
        if self.advice:
            lines.append(self.advice)
        return "\n  ".join(lines)

    def to_json(self) -> str:
        """Return the report as one JSON object.

        Returns:
            str: JSON text with a key per field, ``waiting_share`` and ``schema``. Times are in
            seconds.
        """
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "name": self.name,
            "iterator": self.iterator,
            "ledger": dataclasses.asdict(self.ledger),
            "waiting_share": self.ledger.waiting_share,
            "workers": {
                str(number): dataclasses.asdict(times) for number, times in self.workers.items()
            },
            "slow_samples": [dataclasses.asdict(one) for one in self.slow_samples],
            "limit": self.limit,
            "advice": self.advice,
            "cache": None if self.cache is None else dataclasses.asdict(self.cache),
        }
        return json.dumps(record)


def _words_of(name: str | None) -> str:
    return "DataLoader" if name is None else f"DataLoader {name!r}"


def make_report(options: LoaderOptions, run: LoaderRun, stats: LoaderStats) -> LoaderReport:
    """Return the report of a loader."""
    advice = None
    if stats.ledger.steps >= _STEPS_MIN:
        advice = advise(_observation(options, run, stats))
    return LoaderReport(
        name=stats.name,
        iterator=stats.iterator,
        ledger=stats.ledger,
        workers=stats.workers,
        slow_samples=stats.slow_samples,
        limit=advice.diagnosis.limit.value if advice is not None else "",
        advice=str(advice) if advice is not None else "",
        cache=stats.cache,
    )


def facts_of(options: LoaderOptions, run: LoaderRun) -> dict[str, Any]:
    """Return the fields of an Observation that follow from the options of a loader."""
    values = {name: getattr(options, name) for name in _SETTINGS}
    values["num_workers"] = int(options.num_workers)
    values["offload"] = run.plan is not None
    has_auto_threads = options.fetch_threads == "auto"
    if has_auto_threads:
        values["fetch_threads"] = 1  # at least; no other number is advised
    return {
        "settings": LoaderSettings.of(values),
        "batch_samples": _batch_samples(options),
        "takes_threads": _takes_threads(options) and not has_auto_threads,
        "order_of_workers": _is_order_of_workers(options),
        "has_pool": options.pool is not None,
    }


def _batch_samples(options: LoaderOptions) -> int:
    """Return the samples of a batch; 1 if the dataset makes whole batches, or if it is unknown."""
    samples = options.batch_size
    if samples is None:
        samples = getattr(options.batch_sampler, "batch_size", None)
    return samples if isinstance(samples, int) and samples > 0 else 1


def _takes_threads(options: LoaderOptions) -> bool:
    """Return whether ``fetch_threads`` may be more than 1 and would help."""
    dataset = options.dataset
    if isinstance(dataset, (IterableDataset, IterDataPipe, MapDataPipe)):
        return False
    return options.batch_sampler is not None and not fetches_whole_batches(dataset)


def _is_order_of_workers(options: LoaderOptions) -> bool:
    """Return whether another number of workers gives other batches, apart from their random
    numbers."""
    if not isinstance(options.dataset, IterableDataset):
        return False
    return options.seeding is None or options.shards is None


def _observation(options: LoaderOptions, run: LoaderRun, stats: LoaderStats) -> Observation:
    facts, ledger = facts_of(options, run), stats.ledger
    settings: LoaderSettings = facts["settings"]
    epochs, iter_s = run.iter_count, run.iter_s
    steps = ledger.steps
    waiting = {name: float(getattr(ledger, name)) / steps for name in WAITING_PARTS}
    loader_s = max(0.0, ledger.loader_s - iter_s) / steps
    step_s = max(0.0, ledger.total_s - iter_s) / steps
    start_s = iter_s / max(1, epochs) if settings.num_workers > 0 else 0.0
    making = _making(stats)
    at_once = max(1, settings.num_workers)
    is_local = settings.num_workers > 0 and options.pool is None
    busy_share = sum(making.values()) / at_once / max(step_s, 1e-12)
    if is_local and not settings.persistent_workers and busy_share < _BUSY_SHARE:
        started_s, waiting["worker_s"] = waiting["worker_s"], 0.0
        start_s += started_s * steps / max(1, epochs)
        step_s -= started_s
    worker_cpu_s, delay_s = _worker_cpu(run) if is_local else (None, 0.0)
    return Observation(
        **facts,
        steps=steps,
        step_s=step_s,
        compute_s=ledger.compute_s / steps,
        loader_s=loader_s,
        waiting=waiting,
        dataset_s=making["dataset_s"],
        collate_s=making["collate_s"],
        prefix_s=making["prefix_s"],
        wire_s=stats.wire_s / max(1, stats.batches),
        worker_cpu_s=worker_cpu_s,
        worker_delay_s=delay_s,
        cpus=usable_cpus(),
        start_s=start_s,
        waiting_share=ledger.waiting_share,
        epoch_steps=steps / max(1, epochs),
        batch_bytes=stats.batch_bytes / max(1, stats.batches),
        delivered=stats.batches,
        inline_batches=stats.inline_batches,
        copied_batches=stats.copied_batches,
        memory_free_bytes=memory_left_bytes(),
        slow_samples=tuple(
            (one.seconds, str(one).partition(" took ")[0])
            for one in stats.slow_samples
            if one.place is not None
        ),
        pool_workers=len(stats.workers) if options.pool is not None else 0,
        is_offloaded=run.plan is not None,
    )


def _making(stats: LoaderStats) -> dict[str, float]:
    """Return seconds per batch by part, of a worker, or of the program if it has none."""
    names = ("dataset_s", "collate_s", "prefix_s")
    if stats.batches > 0:
        return {name: getattr(stats, name) / stats.batches for name in names}
    return {name: getattr(stats.ledger, name) / stats.ledger.steps for name in names}


def _worker_cpu(run: LoaderRun) -> tuple[float | None, float]:
    """Return the seconds per batch that running workers are on a CPU, and wait for one; None if no
    worker runs."""
    for iterator in list(run.live_iterators):
        counters = iterator.counters()
        made = counters.get("batches", 0) + counters.get("ready", 0)
        times = process_times([worker.pid for worker in iterator.source.processes])
        if made >= _STEPS_MIN and times is not None and times.on_cpu_s > 0:
            return times.on_cpu_s / int(made), times.delay_s / int(made)
    return None, 0.0


def _worker_line(number: int, times: WorkerTimes) -> str:
    count = max(1, times.batches)
    parts = {
        "samples": times.dataset_s,
        "collating": times.collate_s,
        "moved calls": times.prefix_s,
        "the wire": times.wire_s,
    }
    parts_text = ", ".join(f"{name} {format_time(s / count)}" for name, s in parts.items() if s > 0)
    return (
        f"worker {number} made {times.batches} batches"
        + (f" ({parts_text} each)" if parts_text else "")
        + f", for which the program waited {format_time(times.waited_s)}"
    )
