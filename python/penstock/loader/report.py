# SPDX-License-Identifier: Apache-2.0
"""What ``loader.report()`` says: where the time went, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.loader.observed_loader import (
    batch_samples_of,
    is_order_of_workers,
    settings_of,
    takes_threads,
)
from penstock.loader.stats import LoaderStats
from penstock.loader.step_times import PARTS, WAITING_PARTS, SlowSample, StepTimes, WorkerTimes
from penstock.tuning.advice import advise
from penstock.tuning.observation import Observation, spoken_share, spoken_time
from penstock.tuning.process_resources import memory_left_bytes, process_times, usable_cpus

_STEPS_MIN = 4  # from which on advice is given
_BUSY_SHARE = 0.7  # of the workers' time; below it a wait for a free one is a wait for its start
_SHOWN_WORKERS = 8


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """The steps of a loader: ``ledger`` says where their seconds went, ``workers`` what each worker
    took, ``slow_samples`` which samples took longest. ``limit`` names what limits the program, and
    ``advice`` is a sentence or two; both are empty while too few steps were counted."""

    iterator: str | None
    ledger: StepTimes
    workers: Mapping[int, WorkerTimes]
    slow_samples: tuple[SlowSample, ...]
    limit: str
    advice: str

    def __str__(self) -> str:
        if self.ledger.steps == 0:
            return "DataLoader has counted no step yet; ask for a report after an epoch"
        steps = self.ledger.steps
        lines = [
            f"DataLoader ({self.iterator}) took {steps} steps of "
            f"{spoken_time(self.ledger.total_s / steps)}, and waited for batches "
            f"{spoken_share(self.ledger.waiting_share)} of the time"
        ]
        waited = {name: float(getattr(self.ledger, name)) for name in WAITING_PARTS}
        for name in sorted(waited, key=lambda name: -waited[name]):
            if waited[name] > 0.005 * self.ledger.total_s:
                share = waited[name] / self.ledger.total_s
                lines.append(
                    f"for {PARTS[name]}: {spoken_time(waited[name] / steps)} a step, "
                    f"{spoken_share(share)}"
                )
        busiest = sorted(self.workers.items(), key=lambda one: -one[1].waited_s)
        lines += [_worker_line(number, times) for number, times in busiest[:_SHOWN_WORKERS]]
        if len(busiest) > _SHOWN_WORKERS:
            lines.append(f"and {len(busiest) - _SHOWN_WORKERS} more workers")
        if self.slow_samples:
            lines.append("slowest: " + ", ".join(map(str, self.slow_samples[:3])))
        if self.advice:
            lines.append(self.advice)
        return "\n  ".join(lines)

    def to_json(self) -> str:
        """The report as one JSON object; times are seconds."""
        record: dict[str, Any] = {
            "iterator": self.iterator,
            "ledger": dataclasses.asdict(self.ledger),
            "waiting_share": self.ledger.waiting_share,
            "workers": {
                str(number): dataclasses.asdict(times) for number, times in self.workers.items()
            },
            "slow_samples": [dataclasses.asdict(one) for one in self.slow_samples],
            "limit": self.limit,
            "advice": self.advice,
        }
        return json.dumps(record)


def make_report(loader: Any, stats: LoaderStats, epochs: int, iter_s: float) -> LoaderReport:
    """Of a loader that has begun so many epochs, with calls of ``iter()`` of ``iter_s``."""
    advice = None
    if stats.ledger.steps >= _STEPS_MIN:
        advice = advise(_observation(loader, stats, epochs, iter_s))
    return LoaderReport(
        iterator=stats.iterator,
        ledger=stats.ledger,
        workers=stats.workers,
        slow_samples=stats.slow_samples,
        limit=advice.diagnosis.limit.value if advice is not None else "",
        advice=str(advice) if advice is not None else "",
    )


def _observation(loader: Any, stats: LoaderStats, epochs: int, iter_s: float) -> Observation:
    settings, ledger = settings_of(loader), stats.ledger
    steps = ledger.steps
    waiting = {name: float(getattr(ledger, name)) / steps for name in WAITING_PARTS}
    loader_s = max(0.0, ledger.loader_s - iter_s) / steps
    step_s = max(0.0, ledger.total_s - iter_s) / steps
    start_s = iter_s / max(1, epochs) if settings.num_workers > 0 else 0.0
    making = _making(stats)
    at_once = max(1, settings.num_workers)
    is_local = settings.num_workers > 0 and loader.pool is None
    busy_share = sum(making.values()) / at_once / max(step_s, 1e-12)
    if is_local and not settings.persistent_workers and busy_share < _BUSY_SHARE:
        started_s, waiting["worker_s"] = waiting["worker_s"], 0.0
        start_s += started_s * steps / max(1, epochs)
        step_s -= started_s
    worker_cpu_s, delay_s = _worker_cpu(loader) if is_local else (None, 0.0)
    return Observation(
        settings=settings,
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
        batch_samples=batch_samples_of(loader),
        delivered=stats.batches,
        inline_batches=stats.inline_batches,
        copied_batches=stats.copied_batches,
        memory_free_bytes=memory_left_bytes(),
        slow_samples=tuple(
            (one.seconds, str(one).partition(" took ")[0])
            for one in stats.slow_samples
            if one.place is not None
        ),
        takes_threads=takes_threads(loader),
        order_of_workers=is_order_of_workers(loader),
        has_pool=loader.pool is not None,
        pool_workers=len(stats.workers) if loader.pool is not None else 0,
        is_offloaded=loader.plan is not None,
    )


def _making(stats: LoaderStats) -> dict[str, float]:
    """Seconds for a batch by part, of a worker, or of the program where it has none."""
    names = ("dataset_s", "collate_s", "prefix_s")
    if stats.batches > 0:
        return {name: getattr(stats, name) / stats.batches for name in names}
    return {name: getattr(stats.ledger, name) / stats.ledger.steps for name in names}


def _worker_cpu(loader: Any) -> tuple[float | None, float]:
    """Seconds on a CPU for a batch, and waiting for one, of workers that still run; None where none
    does."""
    for iterator in list(loader._live_iterators):
        counters = iterator.counters()
        made = counters.get("batches", 0) + counters.get("ready", 0)
        times = process_times([worker.pid for worker in iterator._workers])
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
    told = ", ".join(f"{name} {spoken_time(s / count)}" for name, s in parts.items() if s > 0)
    return (
        f"worker {number} made {times.batches} batches"
        + (f" ({told} each)" if told else "")
        + f", for which the program waited {spoken_time(times.waited_s)}"
    )
