# SPDX-License-Identifier: Apache-2.0
"""Make batches from samples: by torch's fetchers unchanged, or with a seed for each batch."""

from __future__ import annotations

import copy
import functools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from penstock import _C
from penstock.compat.iterators import (
    BaseIterator,
    DatasetKind,
    MapDatasetFetcher,
    WorkerInfo,
    set_worker_info,
    worker_info,
)
from penstock.errors import UnsupportedError
from penstock.ranks.sharding import RankShards, has_places
from penstock.stream.batch_seeds import (
    EpochSeeds,
    GeneratorsKept,
    PlacedSamples,
    SampleSeed,
    SeededWatch,
    accepts_generator,
)
from penstock.stream.batch_types import RegisteredType, registered_types
from penstock.stream.progress import Progress
from penstock.stream.shard_state import (
    ResumedDataset,
    ShardStarts,
    StateFailure,
    continue_iteration,
    draws_nothing,
    is_stateful,
    load_dataset_state,
    shard_state,
)
from penstock.worker.automatic_threads import AutomaticMapFetcher, AutomaticPool, make_pool
from penstock.worker.map_fetchers import (
    NamingMapFetcher,
    RowFetcher,
    SampleRows,
    TimedMapFetcher,
    timed_collate,
)
from penstock.worker.partial_batch import skipping, without_errors
from penstock.worker.threaded_fetch import (
    FetchPool,
    ThreadedMapFetcher,
    fetches_whole_batches,
)


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """The parts that make a batch from samples, in torch's terms. Picklable if its parts are."""

    dataset_kind: int
    dataset: Any
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    fetch_threads: int | str  # or "auto"
    rows: SampleRows | None = None  # of the worker's batches, if default_collate makes them
    shards: RankShards | None = None  # of an iterable dataset that ranks share
    clock: _C.FetchClock | None = None  # in the process that makes the batches
    # The number of samples that may be left out of their batches; None if their errors are raised.
    max_skipped: int | None = None
    # How the program's classes in batches are taken apart.
    batch_types: tuple[RegisteredType, ...] = field(default_factory=registered_types)

    @staticmethod
    def of(
        iterator: BaseIterator,
        fetch_threads: int | str,
        shards: RankShards | None = None,
        max_skipped: int | None = None,
    ) -> FetchSpec:
        return FetchSpec(
            iterator._dataset_kind,
            iterator._dataset,
            iterator._auto_collation,
            iterator._collate_fn,
            iterator._drop_last,
            fetch_threads,
            shards=shards,
            max_skipped=max_skipped,
        )

    def make_fetcher(self, dataset: Any, pool: FetchPool | None) -> Any:
        """Return torch's fetcher over ``dataset``, which fetches samples on ``pool`` if there is
        one; start the iteration of an iterable dataset. With ``max_skipped``, it returns a
        :class:`.PartialBatch` for a batch with failed samples.
        """
        clock, collate_fn = self.clock, self.collate_fn
        placed = dataset if isinstance(dataset, PlacedSamples) else None
        if clock is not None:
            collate_fn = timed_collate(clock, collate_fn)
        if self.max_skipped is not None:
            dataset, collate_fn = skipping(dataset, collate_fn)
        is_by_sample = self.dataset_kind == DatasetKind.Map and not fetches_whole_batches(dataset)
        if isinstance(pool, AutomaticPool):
            if is_by_sample:
                pool.search_generators(self.dataset)
                serial = functools.partial(self._make_serial_fetcher, dataset)
                return AutomaticMapFetcher(
                    dataset, collate_fn, self.drop_last, serial, pool, placed
                )
        elif pool is not None:
            return ThreadedMapFetcher(
                dataset, self.auto_collation, collate_fn, self.drop_last, pool
            )
        if is_by_sample:
            return self._make_serial_fetcher(dataset, collate_fn)
        return DatasetKind.create_fetcher(
            self.dataset_kind, dataset, self.auto_collation, collate_fn, self.drop_last
        )

    def _make_serial_fetcher(
        self, dataset: Any, collate_fn: Callable[[Any], Any]
    ) -> MapDatasetFetcher:
        options = (dataset, self.auto_collation, collate_fn, self.drop_last)
        plain = (
            NamingMapFetcher(*options)
            if self.clock is None
            else TimedMapFetcher(self.clock, *options)
        )
        if self.rows is None:
            return plain
        return RowFetcher(dataset, collate_fn, self.drop_last, self.rows, plain)


class BatchPlace(NamedTuple):
    """The position of a batch in its epoch."""

    sequence: int  # its number
    shard_id: int  # of an iterable dataset
    first_place: int  # of its first sample in the order of the epoch


class Fetcher(Protocol):
    """The part of a worker that makes the batches of one epoch.

    It raises StopIteration at the end of a shard, and the exceptions of the dataset and its
    collate_fn. ``threads_drew`` becomes True if samples that were fetched on several threads drew
    numbers from generators that cannot make them reproducible in this case.
    """

    threads_drew: bool

    def fetch(self, indices: Any, place: BatchPlace) -> Any: ...

    def expect(self, indices: Any, place: BatchPlace) -> None:
        """Announce a later batch of a map-style dataset, while another is fetched."""

    def state(self, shard_id: int) -> dict[str, Any] | StateFailure | None:
        """Return the state for resuming a shard after its last batch, if any part has one."""
        ...


class TorchFetcher:
    """Torch's fetcher, unchanged.

    A shard of ``starts`` continues where it was left. ``before_dropped`` is called before each
    batch that is then made and discarded. ``resumed`` has the datasets that were given a state in
    this epoch or an earlier one.
    """

    threads_drew = False

    def __init__(
        self,
        spec: FetchSpec,
        pool: FetchPool | None,
        starts: ShardStarts,
        before_dropped: Callable[[], None],
        resumed: dict[int, ResumedDataset],
    ) -> None:
        self._dataset = spec.dataset
        self._starts = dict(starts) if spec.dataset_kind == DatasetKind.Iterable else {}
        self._before_dropped = before_dropped
        for shard_id, start in self._starts.items():
            _note_resumed(resumed, shard_id, load_dataset_state(self._dataset, start))
        self._to_watch = dict(resumed)  # until their first batch
        self._collate_draws_nothing = draws_nothing(spec.collate_fn)
        self._make_fetcher = functools.partial(spec.make_fetcher, self._dataset, pool)
        self._fetcher = self._make_fetcher()

    def fetch(self, indices: Any, place: BatchPlace) -> Any:
        start = self._starts.pop(place.shard_id, None)
        if start is not None:
            continue_iteration(self._fetcher, start, indices, lambda number: self._before_dropped())
        resumed = self._to_watch.pop(place.shard_id, None)
        if resumed is None:
            return self._fetcher.fetch(indices)
        return resumed.fetch_first(lambda: self._fetcher.fetch(indices), self._restart)

    def expect(self, indices: Any, place: BatchPlace) -> None:
        is_automatic = isinstance(self._fetcher, AutomaticMapFetcher)
        if isinstance(self._fetcher, ThreadedMapFetcher) or (
            is_automatic and self._collate_draws_nothing
        ):
            self._fetcher.expect(indices)

    def _restart(self) -> None:
        self._before_dropped()
        self._fetcher = self._make_fetcher()

    def state(self, shard_id: int) -> dict[str, Any] | StateFailure | None:
        return shard_state(self._fetcher, self._dataset)


class SeededFetcher:
    """Makes batches whose random numbers depend only on the batch's position in the epoch, or, for
    each sample, only on the sample's position in the epoch's order.

    An iterable dataset is read in ``shard_count`` shards; this process serves the shards of
    ``datasets``, from :func:`datasets_of_shards`. Each is read as by a separate worker, with a
    separate ``get_worker_info()``. ``starts``, ``before_dropped`` and ``resumed`` are as for
    :class:`TorchFetcher`.
    """

    def __init__(
        self,
        spec: FetchSpec,
        pool: FetchPool | None,
        datasets: Mapping[int, Any],
        shard_count: int,
        seeds: EpochSeeds,
        starts: ShardStarts,
        before_dropped: Callable[[], None],
        resumed: dict[int, ResumedDataset] | None = None,
    ) -> None:
        self._spec = spec
        self._starts = starts
        self._resumed = {} if resumed is None else resumed
        self._before_dropped = before_dropped
        self._datasets = datasets
        self._shards = spec.shards or RankShards(0, 1, shard_count)
        self._seeds = seeds
        self._fetchers: dict[int, Any] = {}
        self._places: Counter[int] = Counter()
        self._is_map = spec.dataset_kind == DatasetKind.Map
        self._placed: PlacedSamples | None = None
        self._seeded: SeededWatch | None = None
        self._has_looked_ahead = False
        # Automatic ones fetch the samples as one thread does.
        self._has_threads = pool is not None and not isinstance(pool, AutomaticPool)
        self.threads_drew = False  # from the global generators, and so not reproducibly
        self.watches_draws = False  # whether drew_nothing is determined
        self.drew_nothing = False  # the last batch, of a map-style dataset
        if self._is_map:
            dataset = spec.dataset
            self._collate_draws = not draws_nothing(spec.collate_fn)
            seeds_globals = seeds.by_sample and not self._has_threads
            is_by_one = not fetches_whole_batches(dataset)
            if accepts_generator(dataset) or (seeds_globals and is_by_one):
                dataset = self._placed = PlacedSamples(dataset, seeds, seeds_globals)
            if seeds.by_sample and self._collate_draws:
                spec = replace(spec, collate_fn=self._collate_by_sample)
            if self._has_threads:
                spec = replace(spec, collate_fn=self._collate_after_threads)
            self._fetcher = spec.make_fetcher(dataset, pool)

    def fetch(self, indices: Any, place: BatchPlace) -> Any:
        shard_id = place.shard_id
        if self._is_map:
            return self._fetch_by_index(indices, place)
        if isinstance(self._datasets[shard_id], UnsupportedError):
            raise self._datasets[shard_id]
        before = worker_info()
        if self._shards.shard_count > 1 or before is not None:
            set_worker_info(
                WorkerInfo(
                    id=self._shards.ids[shard_id],
                    num_workers=self._shards.shard_count,
                    seed=self._seeds.base_seed + self._shards.ids[shard_id],
                    dataset=self._datasets[shard_id],
                )
            )
        try:
            return self._fetch_of_shard(indices, shard_id)
        finally:
            set_worker_info(before)

    def _fetch_by_index(self, indices: Any, place: BatchPlace) -> Any:
        self._place = place
        # Samples that are fetched ahead may have drawn after the last batch.
        self.threads_drew = self._has_looked_ahead and self._has_drawn()
        if not self._seeds.by_sample:
            self._seeds.seed_generators(place.sequence)
        elif self._has_threads or self._placed is None:
            self._seeds.seed_generators_at(place.first_place, SampleSeed.GLOBALS)
        # With a seed for each sample, the generators change without draws.
        watches_draws = self.watches_draws and not self._seeds.by_sample and self._placed is None
        if self._has_threads or watches_draws:
            self._seeded = SeededWatch()
        batch = self._fetcher.fetch(self._placed_indices(indices, place))
        self.drew_nothing = watches_draws and not (self.threads_drew or self._has_drawn())
        return batch

    def expect(self, indices: Any, place: BatchPlace) -> None:
        # Draws of samples must not mix with the draws of a collate_fn.
        if isinstance(self._fetcher, ThreadedMapFetcher) and not self._collate_draws:
            self._has_looked_ahead = True
            self._fetcher.expect(self._placed_indices(indices, place))

    def _has_drawn(self) -> bool:
        return self._seeded is not None and self._seeded.has_drawn()

    def _placed_indices(self, indices: Any, place: BatchPlace) -> Any:
        if self._placed is not None:
            is_batch = self._spec.auto_collation
            return self._placed.placed(indices, place.sequence, place.first_place, is_batch)
        return [int(index) for index in indices] if has_places(indices) else indices

    def _collate_by_sample(self, samples: Any) -> Any:
        self._seeds.seed_generators_at(self._place.first_place, SampleSeed.COLLATE)
        return self._spec.collate_fn(samples)

    def _collate_after_threads(self, samples: Any) -> Any:
        """Call collate_fn; its draws are as reproducible as without threads."""
        if self._has_drawn():
            self.threads_drew = True
            if not self._seeds.by_sample:
                self._seeds.seed_generators(self._place.sequence)
        if self._seeds.by_sample and self._collate_draws:
            return self._collate_by_sample(samples)
        return self._spec.collate_fn(samples)

    def _fetch_of_shard(self, indices: Any, shard_id: int) -> Any:
        is_first = shard_id not in self._fetchers
        if is_first:
            self._fetchers[shard_id] = self._make_fetcher(shard_id, indices)
        resumed = self._resumed.get(shard_id) if is_first else None
        if resumed is None:
            return self._fetch_next(indices, shard_id)

        def restart() -> None:
            self.forget(shard_id)
            self._before_dropped()
            self._fetchers[shard_id] = self._make_fetcher(shard_id, indices)

        return resumed.fetch_first(lambda: self._fetch_next(indices, shard_id), restart)

    def _fetch_next(self, indices: Any, shard_id: int) -> Any:
        self._places[shard_id] += 1
        self._seeds.seed_generators(self._shards.ids[shard_id], self._places[shard_id])
        return self._fetchers[shard_id].fetch(indices)

    def _make_fetcher(self, shard_id: int, indices: Any) -> Any:
        self._seeds.seed_generators(self._shards.ids[shard_id], 0)
        start = self._starts.get(shard_id)
        resumed = load_dataset_state(self._datasets[shard_id], start)
        _note_resumed(self._resumed, shard_id, resumed)
        fetcher = self._spec.make_fetcher(self._datasets[shard_id], None)
        if start is None:
            return fetcher

        def before_batch(place: int) -> None:
            self._before_dropped()
            self._seeds.seed_generators(self._shards.ids[shard_id], place)

        continue_iteration(fetcher, start, indices, before_batch)
        self._places[shard_id] = start.batch_count
        return fetcher

    def forget(self, shard_id: int) -> None:
        """Restart a shard, with its dataset and start at that time."""
        self._fetchers.pop(shard_id, None)
        self._places.pop(shard_id, None)

    def state(self, shard_id: int) -> dict[str, Any] | StateFailure | None:
        if self._is_map:
            return shard_state(self._fetcher, self._spec.dataset)
        if shard_id not in self._fetchers:
            return None
        return shard_state(self._fetchers[shard_id], self._datasets[shard_id])

    def has_stateful_iterator(self) -> bool:
        iterators = (getattr(one, "dataset_iter", None) for one in self._fetchers.values())
        return any(map(is_stateful, iterators))


def _note_resumed(
    resumed: dict[int, ResumedDataset], shard_id: int, dataset: ResumedDataset | None
) -> None:
    if dataset is not None:
        resumed[shard_id] = dataset


def datasets_of_shards(spec: FetchSpec, shards: Sequence[int]) -> dict[int, Any]:
    """Return a dataset for each shard that a process serves: the dataset itself for the first, and
    copies for the others, as separate workers would have.

    If a copy fails, its place has the UnsupportedError to raise for its batches.
    """
    datasets: dict[int, Any] = {}
    if spec.dataset_kind == DatasetKind.Map:
        return datasets
    for shard_id in shards:
        datasets[shard_id] = copy_for_shard(spec, shard_id) if datasets else spec.dataset
    return datasets


def copy_for_shard(spec: FetchSpec, shard_id: int) -> Any:
    """Return a copy of the dataset for one shard, or the UnsupportedError to raise for it."""
    try:
        return copy.deepcopy(spec.dataset)
    except Exception as error:
        number = shard_id if spec.shards is None else spec.shards.ids[shard_id]
        return UnsupportedError(
            f"shard {number} needs its own copy of the {type(spec.dataset).__name__}, "
            f"but copy.deepcopy failed: {type(error).__name__}: {error}; make the dataset "
            f"copyable, or use as many workers as shards"
        )


class InProcessFetcher:
    """Makes batches in the trainer's process with a seed for each batch, without effect on the
    trainer's generators.

    It replaces torch's fetcher: shards take turns in :meth:`fetch`, as the workers' batches do.
    """

    def __init__(
        self,
        spec: FetchSpec,
        shard_count: int,
        seeds: EpochSeeds,
        progress: Progress,
        place_of_pulled: Callable[[], int],
        resumed: dict[int, ResumedDataset],
    ) -> None:
        """``place_of_pulled`` returns the place in the order of the first of the indices pulled
        last. ``resumed`` is from the previous epoch; only the first shard uses the same dataset
        object in all epochs."""
        datasets = datasets_of_shards(spec, range(shard_count))
        if spec.shards is not None and shard_count > 0:
            # Otherwise, each rank's first shard would use the same dataset object in all epochs.
            datasets[0] = copy_for_shard(spec, 0)
        self._datasets = datasets
        pool = make_pool(spec.fetch_threads)
        self._dataset = spec.dataset
        self._is_map = spec.dataset_kind == DatasetKind.Map
        self._fetcher = SeededFetcher(
            spec,
            pool,
            datasets,
            shard_count,
            seeds,
            progress.starts,
            lambda: None,
            resumed if shard_count == 1 else None,
        )
        self._starts = progress.starts
        self._place_of_pulled = place_of_pulled
        self._place_of = progress.place_of
        self._shard_count = shard_count
        self._turns = deque(range(shard_count))
        self._turns.rotate(-progress.first_shard_id)
        self._sequence = progress.answered_count - 1
        self.shard_id = 0  # of the last batch

    @property
    def threads_drew(self) -> bool:
        return self._fetcher.threads_drew

    def fetch(self, indices: Any) -> Any:
        self._sequence += 1
        with GeneratorsKept():
            if self._is_map:
                number = self._place_of(self._sequence)
                place = BatchPlace(number, 0, self._place_of_pulled())
                return self._fetcher.fetch(indices, place)
            while self._turns:
                shard_id = self.shard_id = self._turns.popleft()
                try:
                    place = BatchPlace(self._sequence, shard_id, 0)
                    batch = self._fetcher.fetch(indices, place)
                except StopIteration:
                    continue
                except BaseException:
                    self._turns.append(shard_id)
                    raise
                self._turns.append(shard_id)
                return batch
        raise StopIteration

    def has_state(self) -> bool:
        """Return whether a dataset or one of the iterators has a state."""
        return is_stateful(self._dataset) or self._fetcher.has_stateful_iterator()

    def states_reader(self) -> Callable[[], list[dict[str, Any] | StateFailure | None]]:
        """Return a function that reads the current states of all shards, without any threads."""
        if self._is_map:
            return functools.partial(_states_of_map, self._dataset, self._shard_count)
        return self._states

    def recreate_batch(self, indices: Any, number: int, first_place: int) -> None:
        """Make a batch of a map-style dataset and discard it."""
        with GeneratorsKept():
            without_errors(self._fetcher.fetch(indices, BatchPlace(number, 0, first_place)))

    def _states(self) -> list[dict[str, Any] | StateFailure | None]:
        return [self._state(shard_id) for shard_id in range(self._shard_count)]

    def _state(self, shard_id: int) -> dict[str, Any] | StateFailure | None:
        state = self._fetcher.state(shard_id)
        start = self._starts.get(shard_id)
        if state is None and start is not None:
            return start.state  # the shard has not been read since it was resumed
        dataset: Any = self._datasets.get(shard_id)
        if state is None and dataset is not None:  # the shard has not started in this epoch
            return shard_state(None, dataset)
        return state


def _states_of_map(dataset: Any, shard_count: int) -> list[dict[str, Any] | StateFailure | None]:
    return [shard_state(None, dataset) for _ in range(shard_count)]
