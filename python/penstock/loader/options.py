# SPDX-License-Identifier: Apache-2.0
"""The options of a loader: their values, and their combined meaning.

It includes unobservable optimisations: how far ahead workers get requests, and which worker gets
which request. `options_check.py` rejects values that options cannot have.
"""

from __future__ import annotations

import numbers
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.utils.data
from torch.utils.data import (
    IterableDataset,
    IterDataPipe,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from penstock.compat.iterators import DatasetKind
from penstock.loader.grouped_arguments import Pool, Ranks, pool_in_use, set_fields, shown_pool
from penstock.ranks.replica_group import LeafReaders
from penstock.ranks.sharding import JobRank, RankShards
from penstock.sampling.chunk_sampler import ChunkSampler
from penstock.stream.indices import recognise_sampler
from penstock.stream.shard_state import is_stateful
from penstock.stream.table_rows import plain_rows
from penstock.tuning.worker_tuner import AUTO, AutomaticCount

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

# The default value of each option.
DEFAULTS: dict[str, Any] = {
    "snapshot_every_n_steps": 1,
    "device": None,
    "seeding": None,
    "shards": None,
    "prefetch_bytes": None,
    "fetch_threads": 1,
    "on_error": "raise",
    "max_skipped": 100,
    "overlap_epochs": True,
    "commit": None,
    "pool": None,
    "ranks": None,
}
# The options of torch that `repr()` of a loader shows if they have other values.
_TORCH_DEFAULTS: dict[str, Any] = {
    "batch_size": 1,
    "num_workers": 0,
    "collate_fn": default_collate,
    "pin_memory": False,
    "drop_last": False,
    "timeout": 0,
    "worker_init_fn": None,
    "multiprocessing_context": None,
    "generator": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
KEYS_VARIABLE = "PENSTOCK_KEYS"
NAME_LENGTH_MAX = 64
# torch's constructor argument in place of an option that belongs to the pool.
DEFAULT_PREFETCH_FACTOR = 2
ANY_ORDER = 0xFFFF_FFFF  # session::kAnyOrder
_DEEP_PREFETCH_BYTES = 1 << 20
_DEEP_PREFETCH_COUNT = 16


@dataclass(frozen=True, slots=True, eq=False)
class LoaderOptions:
    """The options of a loader at one moment, and their combined meaning.

    A program may assign a loader's options after construction. An iterator is made with the record
    of that moment and keeps it.
    """

    # Torch's.
    dataset: Any
    batch_size: int | None
    sampler: Any
    batch_sampler: Any
    num_workers: int
    collate_fn: Callable[[Any], Any]
    pin_memory: bool
    pin_memory_device: str
    drop_last: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | None
    generator: torch.Generator | None
    prefetch_factor: int | None  # with a pool, torch's default in the place of None
    persistent_workers: bool
    in_order: bool  # whether no batch overtakes another
    # penstock's.
    snapshot_every_n_steps: int
    device: torch.device | str | int | None
    seeding: str | None
    shards: int | None
    prefetch_bytes: int | None
    fetch_threads: int | str
    on_error: str
    max_skipped: int
    overlap_epochs: bool
    commit: str | None
    pool: str | None
    keys: str | os.PathLike[str] | None
    code_paths: Sequence[str | os.PathLike[str]] | None
    trust_workers: bool
    ranks: Ranks | None
    shard_by_rank: bool
    rank: int | None
    world_size: int | None
    remainder: str | None
    replica_group: tuple[int, ...] | None
    # Derived.
    overtaking_max: int  # batches that may be delivered before the oldest one, or ANY_ORDER
    pool_record: Pool
    dataset_kind: int
    auto_collation: bool
    index_sampler: Any
    sharding_words: str  # the argument by which ranks share one order
    title: str  # its name, or else the class of its dataset

    @staticmethod
    def of(loader: torch.utils.data.DataLoader[Any]) -> LoaderOptions:
        """Return the options of a `penstock.DataLoader`."""
        values = {name: getattr(loader, name) for name in _ATTRIBUTES if name != "commit"}
        values["commit"] = commit_option(loader)
        window: Any = values["in_order"]
        # For torch, 0 and 1 are False and True; a window of one batch is as good as none.
        is_number = isinstance(window, numbers.Integral) and not isinstance(window, bool)
        has_window = is_number and window not in (0, 1)
        values["in_order"] = not has_window and bool(window)
        has_pool = values["pool"] is not None or values["replica_group"] is not None
        if has_pool and values["prefetch_factor"] is None:
            values["prefetch_factor"] = DEFAULT_PREFETCH_FACTOR
        return LoaderOptions(
            **values,
            overtaking_max=int(window) if has_window else 0 if window else ANY_ORDER,
            pool_record=pool_in_use(loader),
            dataset_kind=loader._dataset_kind,
            auto_collation=loader._auto_collation,
            index_sampler=loader._index_sampler,
            sharding_words=loader._sharding_words,  # type: ignore[attr-defined]
            title=title_of(loader),
        )

    @property
    def kept(self) -> tuple[Any, ...]:
        """Return the options that an iterator is made with and keeps: changing one needs a new
        iterator."""
        return (*(getattr(self, name) for name in DEFAULTS), self.pool_record)

    @property
    def is_datapipe(self) -> bool:
        """Return whether torch's iterator must read the dataset: only it shards and seeds it."""
        return isinstance(self.dataset, (IterDataPipe, MapDataPipe))

    @property
    def is_map(self) -> bool:
        """Return whether the dataset is read by index."""
        return self.dataset_kind == DatasetKind.Map

    @property
    def is_iterable(self) -> bool:
        """Return whether the dataset is iterated."""
        return self.dataset_kind == DatasetKind.Iterable

    @property
    def has_pool(self) -> bool:
        """Return whether batches arrive as from a pool: from its workers, or through a replica
        group."""
        return self.pool is not None or self.replica_group is not None

    @property
    def is_parallel(self) -> bool:
        """Return whether processes other than the trainer make batches."""
        return self.num_workers > 0 or self.has_pool

    @property
    def is_seeded_by_batch(self) -> bool:
        """Return whether each batch is seeded by its place in the epoch, or each sample, and not
        each worker by its id."""
        is_chosen = self.seeding in ("batch", "sample")
        return is_chosen or (self.seeding is None and (self.has_pool or self.shard_by_rank))

    @property
    def is_seeded_by_sample(self) -> bool:
        """Return whether each sample is seeded by its place in the epoch's order."""
        is_left_out = self.seeding is None and self.shard_by_rank
        return self.seeding == "sample" or (is_left_out and not self.reads_shards_of_rank)

    @property
    def reads_shards_of_rank(self) -> bool:
        """Return whether the ranks of a job share the shards of an iterable dataset."""
        return self.shard_by_rank and self.is_iterable

    @property
    def speaks_for_group(self) -> bool:
        """Return whether this rank is the first of its replica group, or is in none. The ranks of a
        group have the same batches, so one of them compares their order with other groups, and
        records their samples. The leader of the group is known later, once the ranks have met."""
        group = self.replica_group
        return group is None or min(group) == JobRank.of(None, None).rank

    @property
    def leaf_readers(self) -> LeafReaders | None:
        """Return the ranks of the replica group that read each leaf named by ``leaves``."""
        leaves: Any = None if self.ranks is None else self.ranks.leaves
        return cast("LeafReaders | None", leaves)

    @property
    def job_rank(self) -> JobRank:
        """Return the rank among those that share one order."""
        return JobRank(cast(int, self.rank), cast(int, self.world_size))

    @property
    def shards_of_rank(self) -> RankShards | None:
        """Return the shards that this rank reads, if the ranks share them."""
        return (
            RankShards(*self.job_rank, cast(int, self.shards))
            if self.reads_shards_of_rank
            else None
        )

    @property
    def is_same_on_all_ranks(self) -> bool:
        """Return whether a rank's state is the job's state: not if each rank has its own shards."""
        return self.shard_by_rank and self.is_map

    @property
    def shard_count(self) -> int:
        """Return the number of shards that a dataset is read in: one per worker unless ``shards``
        is set. With ``ranks``, the number of this rank's shards."""
        of_rank = self.shards_of_rank
        if of_rank is not None:
            return len(of_rank.ids)
        if self.is_seeded_by_batch and self.shards is not None:
            return self.shards
        if self.has_pool and self.is_map:
            return 1
        return max(1, operator.index(self.num_workers))  # torch counts with it, too

    @property
    def drawing_threads(self) -> int:
        """Return the number of threads on which a batch's samples may make draws that
        ``seeding="batch"`` should repeat; 0 if it can repeat them."""
        count = self.fetch_threads
        return count if self.is_seeded_by_batch and isinstance(count, int) and count > 1 else 0

    @property
    def skip_limit(self) -> int | None:
        """Return the number of samples that may be left out of their batches; None if their
        exceptions are raised."""
        return self.max_skipped if self.on_error == "skip" else None

    @property
    def prefetch_depth(self) -> int:
        """Return the number of batches requested ahead from each worker: ``prefetch_factor``, or
        more if the difference is unobservable.

        A small batch of a plain TensorDataset is ready sooner than its request has crossed two
        processes, so two of them in flight leave the workers idle. Reading ahead further is
        unobservable there: rows are read from tensors, and torch's sampler, without a generator
        from the user, draws only at the first pull.
        """
        factor = self.prefetch_factor or 1
        rows = plain_rows(self.dataset, self.collate_fn)
        recipe = recognise_sampler(self.index_sampler)
        if rows is None or recipe is None or recipe.generator is not None:
            return factor
        if recipe.sample_count == 0:
            return factor
        row_bytes = sum(tensor[:1].nbytes for tensor in rows)
        batch_bytes = max(1, row_bytes * recipe.batch_size)
        return max(factor, min(_DEEP_PREFETCH_COUNT, _DEEP_PREFETCH_BYTES // batch_bytes))

    def any_worker_serves(self, worker_count: int) -> bool:
        """Return whether no part of the stream shows which worker made a batch. Then each request
        is sent to the worker that will answer soonest, and the others make the missing batches of a
        dead worker."""
        return (
            self.is_seeded_by_batch
            and self.is_map
            and worker_count > 1
            and self.worker_init_fn is None  # it gets the worker's id, and may fail in one
            and not is_stateful(self.dataset)
            and plain_rows(self.dataset, self.collate_fn) is None  # no row is slow
            and (self.chunk_sampler is None or self.chunk_sampler.readers == 1)
        )

    @property
    def chunk_sampler(self) -> ChunkSampler | None:
        """Return the sampler by chunks. With several readers, each worker keeps its chunks."""
        return self.sampler if isinstance(self.sampler, ChunkSampler) else None

    @property
    def may_begin_early(self) -> bool:
        """Return whether the next epoch may be requested before it starts, as far as visible here.
        Its worker checks the dataset."""
        return bool(
            self.persistent_workers
            and self.overlap_epochs
            and self.in_order
            and not is_stateful(self.dataset)
        )


_names = [one.name for one in fields(LoaderOptions)]
_ATTRIBUTES = tuple(_names[: _names.index("overtaking_max")])  # the loader has the same names


def commit_option(loader: torch.utils.data.DataLoader[Any]) -> str | None:
    """Return the option of this name, which is also a method of the loader."""
    option: str | None = as_commit_option(vars(loader).get("commit"))
    return option


def as_commit_option(value: Any) -> Any:
    """Return the option of the loader whose method ``value`` is, or else ``value``: frameworks that
    rebuild a loader, such as ignite, read the attributes named like its arguments."""
    owner = getattr(value, "__self__", None)
    if isinstance(owner, torch.utils.data.DataLoader) and value.__name__ == "commit":
        return commit_option(owner)
    return value


def name_of(loader: torch.utils.data.DataLoader[Any]) -> str | None:
    """Return the name that the program gave a loader.

    The loader may be torch's; a subclass may have a ``name`` of another kind.
    """
    name = getattr(loader, "name", None)
    return name if isinstance(name, str) and name else None


def title_of(loader: torch.utils.data.DataLoader[Any]) -> str:
    """Return the name that the program gave a loader, or else the class of its dataset."""
    return name_of(loader) or type(loader.dataset).__name__


def check_name(name: str | None) -> None:
    """Raise TypeError or ValueError for a name that displays cannot show."""
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {name!r}; pass a short name, such as 'train'")
    if not 0 < len(name) <= NAME_LENGTH_MAX or not name.isprintable():
        raise ValueError(
            f"name must be 1 to {NAME_LENGTH_MAX} printable characters, got {name[:80]!r}; pass a "
            f"short name, such as 'train'"
        )


def chosen_keys(keys: str | os.PathLike[str] | None) -> str | None:
    """Return the folder of keys that ``keys`` and the environment name."""
    chosen = os.environ.get(KEYS_VARIABLE) if keys is None else os.fspath(keys)
    return chosen or None


def shown_options(loader: torch.utils.data.DataLoader[Any]) -> list[str]:
    """The options with other values than the defaults, as ``repr()`` of a loader shows them."""
    shown = [_shown_order(loader)]
    for name, default in {**_TORCH_DEFAULTS, **DEFAULTS}.items():
        value = commit_option(loader) if name == "commit" else getattr(loader, name, default)
        if name == "prefetch_factor" and value == DEFAULT_PREFETCH_FACTOR:
            continue  # torch's default with workers
        if name == "batch_size" and _has_own_batches(loader):
            continue
        if name == "collate_fn" and value in (default_collate, default_convert):
            continue
        if name == "pool":
            pool = pool_in_use(loader)
            if pool.address is not None or set_fields(pool):
                shown.append(f"pool={shown_pool(pool)}")
        elif isinstance(value, AutomaticCount):
            shown.append(f'{name}="{AUTO}"')
        elif value is not default and not (type(value) is type(default) and value == default):
            shown.append(f"{name}={_shown_value(value)}")
    return [text for text in shown if text]


def _shown_order(loader: torch.utils.data.DataLoader[Any]) -> str:
    """Return the argument that determines the order; empty for the order of the dataset."""
    if _has_own_batches(loader):
        return f"batch_sampler=<{type(loader.batch_sampler).__name__}>"
    sampler = getattr(loader, "sampler", None)  # the constructor may not have set it yet
    if type(sampler) is RandomSampler:
        return "shuffle=True"
    is_iterable = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_iterable or sampler is None or type(sampler) is SequentialSampler:
        return ""
    return f"sampler=<{type(sampler).__name__}>"


def _has_own_batches(loader: torch.utils.data.DataLoader[Any]) -> bool:
    """Whether it was given a ``batch_sampler``, for which torch sets ``batch_size`` to None."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler is not None and loader.batch_size is None


def _shown_value(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, tuple, list)):
        return repr(value)
    if isinstance(value, (torch.device, os.PathLike)):
        return repr(str(value))
    if isinstance(value, Ranks):
        return repr(value)
    return str(getattr(value, "__qualname__", f"<{type(value).__name__}>"))
