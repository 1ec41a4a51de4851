# SPDX-License-Identifier: Apache-2.0
"""Recording the visits of a loader: the samples of each batch that it delivers.

A record is written before the program receives its batch, so each batch that a program has is in
the record even if the process is killed right after. The native part has the format, and reads it.
"""

from __future__ import annotations

import hashlib
import operator
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    WeightedRandomSampler,
)

from penstock import _pool
from penstock.loader.data_version import data_version
from penstock.loader.options import LoaderOptions
from penstock.program_line import warn
from penstock.ranks.sharding import JobRank, RankBatchSampler
from penstock.sampling.mixture_sampler import MixtureSampler
from penstock.stream.indices import IndexOrder
from penstock.stream.progress import Progress
from penstock.tracking.leaves import flatten_batch

# The files that loaders of this process record into.
_open_recorders: weakref.WeakValueDictionary[str, VisitWriter] = weakref.WeakValueDictionary()


class StreamFacts(NamedTuple):
    """Facts about a loader's stream, as its record states them."""

    job: JobRank
    loader: str  # its kind
    title: str
    dataset: str
    dataset_size: int
    sampler: str
    samples_per_epoch: int
    flags: int

    @staticmethod
    def of(
        dataset: Any,
        index_sampler: Any,
        *,
        is_batched: bool,
        loader: str,
        title: str,
        job: JobRank,
        flags: int,
    ) -> StreamFacts:
        """Return the facts of a stream over ``dataset``. ``index_sampler`` is None for an iterable
        dataset, whose samples have no indices. With ``is_batched`` it yields batches."""
        sampler = getattr(index_sampler, "sampler", index_sampler)
        if _may_repeat(sampler):
            flags |= _pool.VISIT_MAY_REPEAT
        size = -1 if index_sampler is None else _length(dataset)
        return StreamFacts(
            job,
            loader,
            title,
            _name_dataset(dataset),
            size,
            "" if index_sampler is None else type(sampler).__name__,
            -1 if _may_repeat(sampler) else _samples_per_epoch(index_sampler, size, is_batched),
            flags,
        )

    def session(self, *, is_same_process: bool) -> _pool.VisitSession:
        return _pool.VisitSession(
            time_ns=time.time_ns(),
            loader=self.loader,
            dataset=self.dataset,
            sampler=self.sampler,
            job=self.title,
            dataset_size=self.dataset_size,
            samples_per_epoch=self.samples_per_epoch,
            flags=self.flags | (_pool.VISIT_SAME_PROCESS if is_same_process else 0),
        )


def _name_dataset(dataset: Any) -> str:
    """Return the type, the length and the version of a data set, as far as it has them."""
    kind = type(dataset)
    text = f"{kind.__module__}.{kind.__qualname__}"
    if (size := _length(dataset)) >= 0:
        text += f", {size} samples"
    version = data_version(dataset)
    return text if version is None else f"{text}, {version}"


def _length(thing: Any) -> int:
    """Return the number of items, -1 if it is unknown."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return -1


def _may_repeat(sampler: Any) -> bool:
    """Return whether a sampler gives some samples more than once in an epoch on purpose."""
    if isinstance(sampler, RandomSampler):
        return sampler.replacement or sampler.num_samples > _length(sampler.data_source)
    return isinstance(sampler, (WeightedRandomSampler, MixtureSampler))


def _samples_per_epoch(index_sampler: Any, dataset_size: int, is_batched: bool) -> int:
    """Return how many samples all ranks together are given in an epoch; -1 if that is unknown."""
    if index_sampler is None or dataset_size < 0:
        return -1
    sampler = getattr(index_sampler, "sampler", index_sampler)
    count = _length(sampler)
    if isinstance(index_sampler, RankBatchSampler):
        if index_sampler.remainder == "drop":
            count -= count % index_sampler.step_size
        return min(count, dataset_size)
    if is_batched and not isinstance(index_sampler, BatchSampler):
        return -1  # the lengths of its batches are not known
    if count >= 0 and isinstance(index_sampler, BatchSampler) and index_sampler.drop_last:
        count -= count % index_sampler.batch_size
    if count >= 0 and isinstance(sampler, DistributedSampler):
        count *= sampler.num_replicas
    return min(count, dataset_size)


class VisitWriter:
    """A rank's file of visits. Confined to one thread."""

    def __init__(self, folder: Path, facts: StreamFacts) -> None:
        self.facts = facts
        path = str(folder / _pool.visit_file_name(facts.job.rank, facts.job.world_size))
        # The system's lock is between processes.
        if path in _open_recorders:
            raise ValueError(
                f"{path} is in use by another loader of this process; give each loader another "
                f"folder"
            )
        session = facts.session(is_same_process=False)
        self.native = _pool.VisitRecorder(path, facts.job.rank, facts.job.world_size, session)
        _open_recorders[path] = self
        self._path = path
        if self.native.repair:
            warn(self.native.repair)

    def note_facts(self, facts: StreamFacts) -> None:
        """Record the facts of the next epoch, if they are others."""
        if facts != self.facts:
            self.native.append_session(facts.session(is_same_process=True))
            self.facts = facts

    def append(self, epoch: int, step: int, index: Any) -> None:
        """Record a batch by the result of the sampler."""
        indices = index if type(index) is list else _listed(index)
        if not self.native.append(epoch, step, indices):
            numbers, flags = _as_numbers(indices)
            self.native.append(epoch, step, numbers, flags)

    def close(self) -> None:
        self.native.close()
        _open_recorders.pop(self._path, None)


def _listed(index: Any) -> list[Any]:
    """Return the indices of a batch. Without batching the sampler yields a single one."""
    if isinstance(index, torch.Tensor):
        listed: Any = index.tolist()
        return listed if type(listed) is list else [listed]
    if isinstance(index, (tuple, range)) or type(index).__module__ == "numpy":
        return list(index) if hasattr(index, "__len__") else [index]
    return [*index] if isinstance(index, list) else [index]


def _as_numbers(indices: list[Any]) -> tuple[list[int], int]:
    """Return 64-bit integers for the keys of a batch, and the flags of its record."""
    try:
        numbers = [operator.index(one) for one in indices]
        if all(-(2**63) <= one < 2**63 for one in numbers):
            return numbers, 0
    except TypeError:
        pass
    return [_digest(one) for one in indices], _pool.VISIT_HASHED_KEYS


def _digest(key: Any) -> int:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class VisitLog:
    """The visits of one loader, in a folder."""

    def __init__(self, folder: str | os.PathLike[str] | Callable[[], Path]) -> None:
        """``folder`` may be a function, which is called before the first epoch."""
        self._folder = folder
        self._writer: VisitWriter | None = None
        self._next_epoch = 0
        self._epoch: int | None = None

    def begin_epoch(
        self, options: LoaderOptions, progress: Progress, state: dict[str, Any] | None
    ) -> EpochVisits | None:
        """Return the record of an epoch that starts or, from ``state``, is resumed; None if another
        rank records the batches that this one receives, too."""
        if not options.speaks_for_group:
            return None
        writer = self._writer_for(_facts_of(options))
        self._epoch = self._number(options, progress, state, writer)
        return EpochVisits(self, writer, self._epoch, options.is_map)

    def note_step(self, epoch: int) -> None:
        """Note that an epoch has a first step. An iterator that is given up before has none."""
        self._next_epoch = epoch + 1

    def _writer_for(self, facts: StreamFacts) -> VisitWriter:
        writer = self._writer
        if writer is not None and writer.facts.job == facts.job:
            writer.note_facts(facts)
            return writer
        self.close()  # the rank is another one since reshard()
        folder = self._folder() if callable(self._folder) else Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = VisitWriter(folder, facts)
        return self._writer

    def _number(
        self,
        options: LoaderOptions,
        progress: Progress,
        state: dict[str, Any] | None,
        writer: VisitWriter,
    ) -> int:
        if progress.commits is not None:
            return progress.commits.number
        if options.is_seeded_by_batch:
            return progress.epoch
        if state is not None and "visits" in state:
            return int(state["visits"]["epoch"])
        if progress.point is not None and self._epoch is None:
            return max(0, writer.native.last_epoch)  # the state is of a loader that recorded none
        if progress.point is not None:
            return self._epoch or 0
        return self._next_epoch

    def note_state(self, state: dict[str, Any], is_between: bool) -> None:
        """Add the number of the epoch in which a loader with this state continues."""
        if self._epoch is not None:
            state["visits"] = {"epoch": self._next_epoch if is_between else self._epoch}

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _facts_of(options: LoaderOptions) -> StreamFacts:
    sampler = getattr(options.index_sampler, "sampler", options.index_sampler)
    if options.shard_by_rank:
        job = options.job_rank
    elif options.replica_group is not None:
        job = JobRank(0, 1)
    elif isinstance(sampler, DistributedSampler):
        job = JobRank(sampler.rank, sampler.num_replicas)
    else:
        job = JobRank.of(None, None)
    return StreamFacts.of(
        options.dataset,
        options.index_sampler if options.is_map else None,
        is_batched=options.auto_collation,
        loader="penstock.DataLoader",
        title=options.title,
        job=job,
        flags=_pool.VISIT_IN_ORDER if options.in_order and options.commit is None else 0,
    )


class EpochVisits:
    """The visits of one epoch."""

    def __init__(self, log: VisitLog, writer: VisitWriter, epoch: int, is_map: bool) -> None:
        self._log = log
        self._writer = writer
        self._epoch = epoch
        self._is_map = is_map
        self._order: IndexOrder | None = None  # that the native side draws
        self._has_set_order = False
        self._pulled: dict[int, Any] = {}  # results of the sampler, by place
        self._failed: dict[int, tuple[Any, ...]] = {}  # descriptions of left-out samples
        self._step_count = 0

    def draw_from(self, order: IndexOrder) -> None:
        """Take the indices of the following batches from an order that the native side draws."""
        self._order = order
        self._has_set_order = False

    def note_pull(self, place: int, index: Any) -> None:
        """Note the result of the sampler for the batch at ``place``."""
        # The sampler may fill the same list again.
        self._pulled[place] = index.copy() if type(index) is list else index

    def note_failed(self, place: int, samples: tuple[Any, ...]) -> None:
        """Note the samples that the batch at ``place`` lacks."""
        self._failed[place] = samples

    def deliver(self, place: int, batch: Any) -> None:
        """Record that the program receives ``batch``, which is at ``place``."""
        self._note_step(place)
        native = self._writer.native
        if not self._is_map:
            native.append_unknown(self._epoch, place, row_count(batch))
            return
        if place in self._failed:
            index = _without(self._index_at(place), self._failed.pop(place))
        elif place in self._pulled:
            index = self._pulled.pop(place)
        elif self._order is not None and self._append_drawn(self._order, place):
            return
        else:
            index = self._index_at(place)
        self._writer.append(self._epoch, place, index)

    def omit(self, place: int) -> None:
        """Record that the batch at ``place`` has no sample, and is not delivered."""
        self._pulled.pop(place, None)
        self._failed.pop(place, None)
        self._note_step(place)
        self._writer.append(self._epoch, place, [])

    def end(self) -> None:
        """Record that the epoch is over."""
        if self._step_count == 0:
            self._log.note_step(self._epoch)
        self._writer.native.end_epoch(self._epoch, self._step_count)

    def _note_step(self, place: int) -> None:
        if self._step_count == 0:
            self._log.note_step(self._epoch)
        self._step_count = max(self._step_count, place + 1)

    def _index_at(self, place: int) -> Any:
        index = self._pulled.pop(place, None)
        if index is None and self._order is not None:
            index = self._order.batch(place)
        if index is None:
            raise AssertionError(f"the indices of batch {place} are not known")
        return index

    def _append_drawn(self, order: IndexOrder, place: int) -> bool:
        """Record a batch that is a run of the drawn order; False if it is not."""
        run = order.run(place)
        if run is None:
            return False
        first, count = run
        native = self._writer.native
        permutation = order.permutation
        if permutation is None:
            native.append_run(self._epoch, place, first, count)
            return True
        if not self._has_set_order:
            native.set_order(permutation.numpy())
            self._has_set_order = True
        native.append_order(self._epoch, place, first, count)
        return True


def _without(index: Any, failed: tuple[Any, ...]) -> list[Any]:
    """Return the indices of a batch without its failed samples."""
    left = {one.sample_index: one.times for one in failed}
    kept = []
    for one in _listed(index):
        name = one if type(one) in (int, str) else repr(one)
        if left.get(name, 0) > 0:
            left[name] -= 1
        else:
            kept.append(one)
    return kept


def row_count(batch: Any) -> int:
    """Return the length of a batch's first tensor, or of a list; 0 if it has neither."""
    tensor = next(iter(flatten_batch(batch)), None)
    if tensor is not None and tensor.dim() > 0:
        return int(tensor.shape[0])
    return len(batch) if isinstance(batch, list) else 0
