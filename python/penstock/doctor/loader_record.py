# SPDX-License-Identifier: Apache-2.0
"""The record of one loader while the program runs, and the observation made from it.

A program may create a new loader for each epoch: one record covers all similar loaders that the
same line creates.
"""

from __future__ import annotations

import bisect
import resource
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.compat.devices import module_in_use
from penstock.doctor.column_reads import ColumnReads
from penstock.doctor.program_runs import ColumnUse
from penstock.doctor.timed_transform import time_transforms, transform_seconds
from penstock.loader.loader_run import run_of
from penstock.loader.options import LoaderOptions
from penstock.loader.stats import LoaderStats, facts_of
from penstock.loader.step_times import WAITING_PARTS, FieldSums, SlowSample, StepTimes
from penstock.loader.watched_steps import WatchedStep
from penstock.tracking.leaves import flatten_batch
from penstock.tuning.limiting import SLOW_SAMPLE_RATIO
from penstock.tuning.observation import MadeBatch, Observation
from penstock.tuning.process_resources import (
    ProcessTimes,
    memory_left_bytes,
    process_times,
    thread_delay_s,
    usable_cpus,
)

_LISTED_BATCHES_MAX = 512  # batches of an observation that are listed individually
_WARM_S = 2.0
_SECONDS_MIN = 1.5  # of a measurement, however fast the steps are
_SHOWN_SAMPLES = 5
_READ_S = 0.1  # between two readings of the workers' times

# Two consecutive steps of one epoch.
_Pairs = Sequence[tuple[WatchedStep, WatchedStep]]


@dataclass(slots=True)
class _Moment:
    """The counts of the process and of the loader at the end of a step."""

    at: float
    process_cpu_s: float
    pages_read: int
    totals: LoaderTotals
    transform_s: float
    delay_s: float  # how long the thread has waited for a CPU


class LoaderRecord:
    """Confined to the thread that reads the loader."""

    def __init__(self, number: int, dataset: str, folder: str) -> None:
        self.number = number
        self.dataset = dataset
        self._folder = Path(folder) / f"loader-{number}"
        self._folder.mkdir(exist_ok=True)
        self._loader: weakref.ref[Any] | None = None
        # To the end of its first epoch, and during the later ones: the program may have dropped it.
        self._read_loader: Any = None
        self._facts: dict[str, Any] = {}  # of the newest loader
        self._past = LoaderTotals()  # of the loaders before the newest
        self._newest = LoaderTotals()  # of the newest, at the end of its last epoch
        self._is_transform_timed = False
        self._columns: ColumnReads | None = None
        self._steps: list[WatchedStep] = []  # that delivered a batch
        self._epoch_lengths: list[int] = []
        self._starts: list[float] = []  # of all epochs
        self._length = 0  # of the current epoch, so far
        self._window: _Moment | None = None
        self._last = (0.0, 0)  # the process's CPU seconds and pages read, at the last step
        self._last_delay_s = 0.0
        self._cpu = WorkerCpu()
        self._samples: set[SlowSample] = set()  # the slowest
        # Seconds of the slowest sample of a batch, by iterator, its epoch, and the batch in it.
        self._slow: dict[tuple[int, int, int], float] = {}
        self._iterator: weakref.ref[Any] | None = None  # of the newest step
        self._iterator_numbers: list[int] = []  # of the steps
        self._batch_bytes = 0.0

    # ---- During the program's run

    def add_loader(self, loader: Any) -> None:
        """Replace the loader by a new one of the program."""
        self._past = self._past + self._totals_of_newest()
        self._newest = LoaderTotals()
        self._read_loader = loader
        self._loader = weakref.ref(loader)
        self._facts = facts_of(LoaderOptions.of(loader), run_of(loader))
        if not self._facts["has_pool"]:  # a pool's workers could not write the sums
            self._is_transform_timed |= time_transforms(loader.dataset, str(self._folder)) > 0
            self._columns = self._columns or ColumnReads.watch(loader.dataset, self._folder)

    def view(self, batch: Any) -> Any:
        """Return the batch as the program receives it."""
        return batch if self._columns is None else self._columns.batch(batch)

    def note(self, step: WatchedStep, iterator: Any, batch: Any) -> None:
        """Record a step, which ends its epoch if it has no batch."""
        if step.iter_s is not None:
            self._length = 0
            self._read_loader = step.loader() or self._read_loader
        if not step.has_batch:
            self._end_epoch(iterator)
            return
        if self._length == 0:
            self._starts.append((step.iter_s or 0.0) + step.left_at - step.entered_at)
        self._length += 1
        self._steps.append(step)
        number = self._iterator_numbers[-1] if self._iterator_numbers else 0
        is_same = self._iterator is not None and self._iterator() is iterator
        self._iterator_numbers.append(number if is_same else number + 1)
        self._iterator = weakref.ref(iterator)
        if not self._batch_bytes:
            self._batch_bytes = _bytes_of(batch)
        if not self._facts["has_pool"]:
            self._cpu.read(iterator, step.left_at)
        self._last = (time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt)
        if self._window is None and self._is_warm(step.left_at):
            transform_s = transform_seconds(str(self._folder))
            self._window = _Moment(
                step.left_at, *self._last, self._totals(), transform_s, thread_delay_s()
            )

    def _end_epoch(self, iterator: Any) -> None:
        self._epoch_lengths.append(self._length)
        self._note_slow(iterator)
        self._newest = self._totals_of_newest()
        self._read_loader = None
        self._last_delay_s = thread_delay_s()

    def is_done(self, steps: int, seconds: float) -> bool:
        """Return whether there are enough measurements."""
        if self._window is None or not self._steps:
            return False
        elapsed_s = self._steps[-1].left_at - self._window.at
        if elapsed_s < min(_SECONDS_MIN, seconds):
            return False
        count = len(self._steps_since(self._window.at))
        return count >= steps or (elapsed_s >= seconds and count >= 2)

    def _steps_since(self, at: float) -> Sequence[WatchedStep]:
        first = bisect.bisect_right(self._steps, at, key=lambda step: step.left_at)
        return self._steps[first:]

    def _is_warm(self, now: float) -> bool:
        enough = len(self._steps) >= self._facts["settings"].num_workers + 2
        return len(self._steps) >= 2 and (enough or now - self._steps[0].left_at >= _WARM_S)

    def _totals(self) -> LoaderTotals:
        return self._past + self._totals_of_newest()

    def _totals_of_newest(self) -> LoaderTotals:
        loader = None if self._loader is None else self._loader()
        if loader is None:
            return self._newest
        stats = loader.stats()
        # Without a place it covers all samples of a batch.
        self._samples |= {one for one in stats.slow_samples if one.place is not None}
        return LoaderTotals.of(stats)

    def _note_slow(self, iterator: Any) -> None:
        stream = getattr(iterator, "_stream", None)
        if stream is None or iterator._shutdown or not self._iterator_numbers:
            return
        for seconds, _index, epoch, sequence, place, _worker in stream.slow_samples():
            if place is not None:
                batch = self._iterator_numbers[-1], epoch, sequence
                self._slow[batch] = max(seconds, self._slow.get(batch, 0.0))

    # ---- Results

    def columns(self) -> ColumnUse | None:
        return None if self._columns is None else self._columns.use()

    def observation(self, is_reading: bool = False) -> Observation | None:
        """Return the observation; None if fewer than two batches were delivered. ``is_reading`` if
        this thread is in the middle of an epoch."""
        if len(self._steps) < 2:
            return None
        if is_reading:
            self._last_delay_s = thread_delay_s()
            self._note_slow(self._iterator and self._iterator())
        first = self._steps[0].left_at
        begin = self._window or _Moment(first, 0.0, 0, LoaderTotals(), 0.0, self._last_delay_s)
        consecutive = list(zip(self._steps, self._steps[1:], strict=False))
        pairs = [
            (one, two) for one, two in consecutive if two.iter_s is None and one.left_at >= begin.at
        ]
        # Otherwise epochs of one batch, or an end before the warm-up was over.
        return self._means(pairs or consecutive, begin)

    def _means(self, pairs: _Pairs, begin: _Moment) -> Observation:
        settings = self._facts["settings"]
        totals = self._totals() - begin.totals
        step_s = _mean([two.left_at - one.left_at for one, two in pairs])
        compute_s = _mean([two.entered_at - one.left_at for one, two in pairs])
        waiting, loader_s = self._waiting(totals, begin, max(0.0, step_s - compute_s))
        step_count = max(1, len(self._steps_since(begin.at)))
        trainer_cpu_s = (self._last[0] - begin.process_cpu_s) / step_count
        is_in_process = settings.num_workers == 0 and not self._facts["has_pool"]
        if is_in_process:
            worker_cpu_s, delay_s = _mean([two.cpu_s for _, two in pairs]), 0.0
            trainer_cpu_s = max(0.0, trainer_cpu_s - worker_cpu_s)
        else:
            worker_cpu_s, delay_s = self._cpu.of_batch()  # type: ignore[assignment]
        made = totals if totals.batches > 0 else LoaderTotals()
        count = max(1, totals.batches)
        dataset_s = made.dataset_s / count
        collate_s = made.collate_s / count
        if is_in_process:
            steps = max(1, totals.ledger.steps)
            dataset_s, collate_s = totals.ledger.dataset_s / steps, totals.ledger.collate_s / steps
        elapsed_s = max(1e-9, self._steps[-1].left_at - begin.at)
        loader = None if self._loader is None else self._loader()
        return Observation(
            **self._facts,
            steps=len(pairs),
            step_s=step_s,
            compute_s=compute_s,
            loader_s=loader_s,
            waiting=waiting,
            dataset_s=dataset_s,
            collate_s=collate_s,
            prefix_s=made.prefix_s / count,
            wire_s=made.wire_s / count,
            transform_s=self._transform_s(begin, dataset_s, step_count),
            worker_cpu_s=worker_cpu_s,
            worker_delay_s=delay_s,
            trainer_cpu_s=trainer_cpu_s,
            trainer_delay_s=max(0.0, self._last_delay_s - begin.delay_s) / step_count,
            cpus=usable_cpus(),
            batches=self._made_batches(pairs, begin.at, dataset_s, is_in_process),
            start_s=self._start_s(),
            epoch_steps=self._epoch_steps(),
            batch_bytes=self._batch_bytes,
            delivered=totals.batches,
            inline_batches=totals.inline_batches,
            copied_batches=totals.copied_batches,
            memory_free_bytes=memory_left_bytes(),
            memory_reads_per_s=(self._last[1] - begin.pages_read) / elapsed_s,
            slow_samples=self._shown_samples(),
            pool_workers=0
            if loader is None or loader.pool is None
            else len(loader.stats().workers),
            is_on_gpu=module_in_use() is not None,
            is_offloaded=loader is not None and loader.plan is not None,
        )

    def _waiting(
        self, totals: LoaderTotals, begin: _Moment, next_s: float
    ) -> tuple[dict[str, float], float]:
        """Divide a step's seconds within ``next()`` like the ledger, but without the waits at the
        starts of epochs. The ledger's steps include these."""
        waited = {name: float(getattr(totals.ledger, name)) for name in WAITING_PARTS}
        firsts = [one for one in self._steps_since(begin.at) if one.iter_s is not None]
        own_s = max(0.0, totals.ledger.loader_s - sum(one.iter_s or 0.0 for one in firsts))
        if self._facts["settings"].num_workers > 0:
            starts_s = sum(one.left_at - one.entered_at for one in firsts)
            waited = _without_starts(waited, starts_s)
        noted_s = sum(waited.values()) + own_s
        scale = next_s / noted_s if noted_s > 0 else 0.0
        waiting = {name: seconds * scale for name, seconds in waited.items()}
        return waiting, own_s * scale

    def _transform_s(self, begin: _Moment, dataset_s: float, steps: int) -> float | None:
        if not self._is_transform_timed:
            return None
        seconds = (transform_seconds(str(self._folder)) - begin.transform_s) / steps
        threads = int(self._facts["settings"].fetch_threads)
        return min(dataset_s, seconds / max(1, threads))

    def _made_batches(
        self, pairs: _Pairs, began_at: float, dataset_s: float, is_in_process: bool
    ) -> tuple[MadeBatch, ...]:
        computes = {one.left_at: two.entered_at - one.left_at for one, two in pairs}
        if is_in_process:
            making = [two.left_at - two.entered_at for _, two in pairs]
            return tuple(map(MadeBatch, making[:_LISTED_BATCHES_MAX], computes.values()))
        usual_s, mean_s = dataset_s / self._facts["batch_samples"], _mean([*computes.values()])
        made = []
        for step, iterator in zip(self._steps, self._iterator_numbers, strict=True):
            for one in step.batches if step.left_at >= began_at else ():
                slowest_s = self._slow.get((iterator, one.epoch, one.sequence), 0.0)
                is_slow = slowest_s > SLOW_SAMPLE_RATIO * usual_s
                made.append(
                    MadeBatch(
                        one.made_at - one.begun_at,
                        computes.get(step.left_at, mean_s),
                        max(0.0, slowest_s - usual_s) if is_slow else 0.0,
                    )
                )
        return tuple(made[:_LISTED_BATCHES_MAX])

    def _shown_samples(self) -> tuple[tuple[float, str], ...]:
        names: dict[str, float] = {}
        for one in sorted(self._samples, key=lambda one: -one.seconds):
            names.setdefault(str(one).partition(" took ")[0], one.seconds)
        return tuple((seconds, name) for name, seconds in names.items())[:_SHOWN_SAMPLES]

    def _start_s(self) -> float:
        """Return the duration of an epoch's start. The first start is a cold one, and is used only
        if there is no other."""
        settings = self._facts["settings"]
        if settings.num_workers == 0 or not self._starts:
            return 0.0
        if later := self._starts[1:]:
            return _mean(later)
        return 0.0 if settings.persistent_workers or self._facts["has_pool"] else self._starts[0]

    def _epoch_steps(self) -> float | None:
        if self._epoch_lengths:
            return max(1.0, float(_mean(self._epoch_lengths)))
        loader = None if self._loader is None else self._loader()
        try:
            length = 0 if loader is None else int(len(loader))
        except TypeError:
            length = 0
        return float(length) if length > 0 else None


def _without_starts(waited: dict[str, float], starts_s: float) -> dict[str, float]:
    """Subtract the waits at the starts of epochs, first from the parts that usually contain
    them."""
    left = dict(waited)
    for name in ("worker_s", "dataset_s", "collate_s", "prefix_s", "wire_s"):
        taken = min(left[name], starts_s)
        left[name] -= taken
        starts_s -= taken
    return left


def _bytes_of(batch: Any) -> float:
    try:
        leaves = flatten_batch(batch)
    except (AttributeError, RecursionError):
        return 0.0
    return float(sum(leaf.numel() * leaf.element_size() for leaf in leaves))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


@dataclass(frozen=True, slots=True)
class LoaderTotals(FieldSums):
    """Sums over the loaders of a record. ``batches`` counts the workers' batches; ``ledger`` has
    the steps of all loaders."""

    batches: int = 0
    inline_batches: int = 0
    copied_batches: int = 0
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    wire_s: float = 0.0
    ledger: StepTimes = StepTimes()

    @staticmethod
    def of(stats: LoaderStats) -> LoaderTotals:
        return LoaderTotals(
            batches=stats.batches,
            inline_batches=stats.inline_batches,
            copied_batches=stats.copied_batches,
            dataset_s=stats.dataset_s,
            collate_s=stats.collate_s,
            prefix_s=stats.prefix_s,
            wire_s=stats.wire_s,
            ledger=stats.ledger,
        )


class WorkerCpu:
    """How long a loader's workers run on a CPU per batch, and wait for one: summed over periods in
    which the processes stayed the same. Confined to the trainer's thread."""

    def __init__(self) -> None:
        self._sum = ProcessTimes()
        self._batches = 0
        self._pids: tuple[int, ...] = ()
        self._last: ProcessTimes | None = None
        self._last_made = 0
        self._read_at = 0.0

    def read(self, iterator: Any, now: float) -> None:
        """Update the sums; call after each batch of ``iterator``. Reads the system's files at most
        every ``_READ_S``."""
        workers = getattr(iterator, "_workers", None)
        if not workers or now - self._read_at < _READ_S:
            return
        self._read_at = now
        pids = tuple(worker.pid for worker in workers)
        counters = iterator.counters()
        made = counters.get("batches", 0) + counters.get("ready", 0)
        is_same = pids == self._pids and self._last is not None
        if is_same and made <= self._last_made:
            return
        times = process_times(pids)
        if is_same and times is not None and self._last is not None:
            self._sum = self._sum + ProcessTimes(
                times.on_cpu_s - self._last.on_cpu_s, times.delay_s - self._last.delay_s
            )
            self._batches += made - self._last_made
        self._pids, self._last, self._last_made = pids, times, made

    def of_batch(self) -> tuple[float | None, float]:
        """Return a batch's seconds on a CPU, None if unknown, and its seconds of waiting for a
        CPU."""
        if self._batches == 0:
            return None, 0.0
        return self._sum.on_cpu_s / self._batches, self._sum.delay_s / self._batches
