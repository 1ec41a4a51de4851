# SPDX-License-Identifier: Apache-2.0
"""penstock's options in addition to torch's: their values, and their combined meaning.

They include the options of ``pool=``, the loaders that a pool cannot serve, and unobservable
optimisations: how far ahead workers get requests, and which worker gets which request.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
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
from penstock.loader.device import names_device
from penstock.loader.grouped_arguments import (
    Ranks,
    check_ranks,
    is_address,
    pool_in_use,
    set_fields,
    shown_pool,
)
from penstock.loader.loader_protocol import LoaderProtocol
from penstock.ranks.sharding import RankShards
from penstock.stream.indices import recognise_sampler
from penstock.stream.shard_state import is_stateful
from penstock.stream.table_rows import plain_rows
from penstock.tuning.worker_tuner import AUTO, AutomaticCount

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
# Attributes that torch's iterator does not support.
_BEYOND_TORCH: dict[str, Any] = {
    "device": None,
    "seeding": None,
    "shards": None,
    "prefetch_bytes": None,
    "fetch_threads": 1,
    "on_error": "raise",
    "code_paths": (),
    "trust_workers": False,
}
KEYS_VARIABLE = "PENSTOCK_KEYS"
# torch's constructor argument in place of an option that belongs to the pool.
DEFAULT_PREFETCH_FACTOR = 2
_DEEP_PREFETCH_BYTES = 1 << 20
_DEEP_PREFETCH_COUNT = 16


def check_options(loader: LoaderProtocol) -> None:
    """Reject values that the loader's penstock options cannot have. Raises ValueError or TypeError.

    They may be assigned after construction, so ``iter()`` checks again.
    """
    _check_datapipe(loader)
    _check_snapshots(loader)
    _check_seeding(loader)
    _check_shards(loader)
    _check_prefetch_bytes(loader)
    _check_fetch_threads(loader)
    _check_on_error(loader)
    _check_num_workers(loader)
    check_pool_options(loader)
    _check_ranks(loader)
    if type(loader.overlap_epochs) is not bool:
        raise TypeError(
            f"overlap_epochs must be a bool, got {loader.overlap_epochs!r}; pass True to have the "
            f"first batches of the next epoch made while an epoch ends, else False"
        )


def own_options(loader: LoaderProtocol) -> tuple[Any, ...]:
    """Return the options that an iterator is made with and keeps: changing one needs a new
    iterator.
    """
    return (*(getattr(loader, name) for name in DEFAULTS), pool_in_use(loader))


def is_seeded_by_batch(loader: LoaderProtocol) -> bool:
    """Return whether each batch is seeded by its place in the epoch, or each sample, and not each
    worker by its id."""
    is_chosen = loader.seeding in ("batch", "sample")
    return is_chosen or (loader.seeding is None and (has_pool(loader) or loader.shard_by_rank))


def is_seeded_by_sample(loader: LoaderProtocol) -> bool:
    """Return whether each sample is seeded by its place in the epoch's order."""
    is_left_out = loader.seeding is None and loader.shard_by_rank
    return loader.seeding == "sample" or (is_left_out and not reads_shards_of_rank(loader))


def reads_shards_of_rank(loader: LoaderProtocol) -> bool:
    """Return whether the ranks of a job share the shards of an iterable dataset."""
    return bool(loader.shard_by_rank) and loader._dataset_kind == DatasetKind.Iterable


def shards_of_rank(loader: LoaderProtocol) -> RankShards | None:
    """Return the shards that this rank reads, if the ranks share them."""
    if not reads_shards_of_rank(loader):
        return None
    return RankShards(loader.rank, loader.world_size, cast(int, loader.shards))


def has_pool(loader: LoaderProtocol) -> bool:
    """Return whether batches arrive as from a pool: from its workers, or through a replica
    group."""
    return loader.pool is not None or loader.replica_group is not None


def is_parallel(loader: LoaderProtocol) -> bool:
    """Return whether processes other than the trainer make batches."""
    return loader.num_workers > 0 or has_pool(loader)


def shard_count(loader: LoaderProtocol) -> int:
    """Return the number of shards that a dataset is read in: one per worker unless ``shards`` is
    set. With ``ranks``, the number of this rank's shards."""
    of_rank = shards_of_rank(loader)
    if of_rank is not None:
        return len(of_rank.ids)
    if is_seeded_by_batch(loader) and loader.shards is not None:
        return loader.shards
    if has_pool(loader) and loader._dataset_kind == DatasetKind.Map:
        return 1
    return max(1, operator.index(loader.num_workers))  # torch counts with it, too


def drawing_threads(loader: LoaderProtocol) -> int:
    """Return the number of threads on which a batch's samples may make draws that
    ``seeding="batch"`` should repeat; 0 if it can repeat them.
    """
    return loader.fetch_threads if is_seeded_by_batch(loader) and loader.fetch_threads > 1 else 0


def skip_limit(loader: LoaderProtocol) -> int | None:
    """Return the number of samples that may be left out of their batches; None if their exceptions
    are raised."""
    return loader.max_skipped if loader.on_error == "skip" else None


def prefetch_factor(loader: LoaderProtocol) -> int | None:
    """Return the loader's value, which torch's constructor omits without workers, or the default if
    a pool makes the batches of such a loader."""
    factor: int | None = loader.prefetch_factor
    return DEFAULT_PREFETCH_FACTOR if factor is None and has_pool(loader) else factor


def prefetch_depth(loader: LoaderProtocol) -> int:
    """Return the number of batches requested ahead from each worker: ``prefetch_factor``, or more
    if the difference is unobservable.

    A small batch of a plain TensorDataset is ready sooner than its request has crossed two
    processes, so two of them in flight leave the workers idle. Reading ahead further is
    unobservable there: rows are read from tensors, and torch's sampler, without a generator from
    the user, draws only at the first pull.
    """
    factor = prefetch_factor(loader) or 1
    rows = plain_rows(loader.dataset, loader.collate_fn)
    recipe = recognise_sampler(loader._index_sampler)
    if rows is None or recipe is None or recipe.generator is not None or recipe.sample_count == 0:
        return factor
    row_bytes = sum(tensor[:1].nbytes for tensor in rows)
    batch_bytes = max(1, row_bytes * recipe.batch_size)
    return max(factor, min(_DEEP_PREFETCH_COUNT, _DEEP_PREFETCH_BYTES // batch_bytes))


def any_worker_serves(loader: LoaderProtocol, worker_count: int) -> bool:
    """Return whether no part of the stream shows which worker made a batch. Then each request is
    sent to the worker that will answer soonest, and the others make the missing batches of a dead
    worker.
    """
    return (
        is_seeded_by_batch(loader)
        and loader._dataset_kind == DatasetKind.Map
        and worker_count > 1
        and loader.worker_init_fn is None  # it gets the worker's id, and may fail in one
        and not is_stateful(loader.dataset)
        and plain_rows(loader.dataset, loader.collate_fn) is None  # no row is slow
    )


def may_begin_early(loader: LoaderProtocol) -> bool:
    """Return whether the next epoch may be requested before it starts, as far as visible here. Its
    worker checks the dataset.
    """
    return bool(
        loader.persistent_workers
        and loader.overlap_epochs
        and loader.in_order
        and not is_stateful(loader.dataset)
    )


class Obstacle(NamedTuple):
    """Reason why a pool cannot serve a loader."""

    seen: str
    remedy: str


def chosen_keys(keys: str | os.PathLike[str] | None) -> str | None:
    """Return the folder of keys that ``keys`` and the environment name."""
    chosen = os.environ.get(KEYS_VARIABLE) if keys is None else os.fspath(keys)
    return chosen or None


def check_pool_options(loader: LoaderProtocol) -> None:
    """Reject values that a pool's options cannot have. Raises ValueError or TypeError."""
    _check_code_paths(loader.code_paths)
    if type(loader.trust_workers) is not bool:
        raise TypeError(
            f"trust_workers must be a bool, got {loader.trust_workers!r}; pass True to unpickle "
            f"objects from the pool's workers, which can run arbitrary code, or leave it out"
        )
    if loader.pool is None and loader.replica_group is None:
        return
    if loader.pool is not None and not is_address(loader.pool):
        raise ValueError(
            f"pool must be the address of a controller, such as 'tcp://host:7000', got "
            f"{loader.pool!r}"
        )
    obstacle = obstacle_to_pool(loader)
    if obstacle is not None:
        name = "pool" if loader.replica_group is None else "replica_group"
        raise ValueError(
            f"{name}={getattr(loader, name)!r} cannot be used: {obstacle.seen}; {obstacle.remedy}, "
            f"or leave {name} out"
        )
    if loader.pool is None and loader.num_workers == 0:
        raise ValueError(
            f"replica_group={loader.replica_group} requires workers, which make the batches of "
            f"these ranks, got num_workers=0; pass pool=, or num_workers=1 or more"
        )


def obstacle_to_pool(loader: LoaderProtocol) -> Obstacle | None:
    """Return an option of the loader that no pool can serve, if there is one."""
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return Obstacle(
            "the dataset is a datapipe, which only torch's iterator reads",
            "use a map-style or an iterable dataset",
        )
    if isinstance(loader.num_workers, AutomaticCount):
        return Obstacle(
            "num_workers='auto' chooses a number of processes on this machine, but with a pool, it "
            "is the pool that grows and shrinks",
            "pass the number of local worker processes to use in addition to the pool",
        )
    if loader.seeding == "worker":
        return Obstacle(
            "seeding='worker' makes the stream depend on the workers that there are, and the "
            "workers of a pool change",
            "pass seeding='batch' (the default with a pool)",
        )
    if loader._dataset_kind == DatasetKind.Map and is_stateful(loader.dataset):
        return Obstacle(
            f"{type(loader.dataset).__name__} has a state_dict() and is read by index, so each "
            f"worker has a separate state and the stream depends on the workers that there are",
            "leave the state out of the dataset",
        )
    return None


def _check_datapipe(loader: LoaderProtocol) -> None:
    """Reject options that torch's iterator would ignore."""
    if not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return
    for name, default in _BEYOND_TORCH.items():
        value = getattr(loader, name)
        is_cpu = name == "device" and names_device(value) and torch.device(value).type == "cpu"
        is_default = value == default or (name == "seeding" and value == "worker")
        if not (is_cpu or is_default):
            raise ValueError(
                f"{name} must be {default!r} for a datapipe, which torch's iterator reads, got "
                f"{value!r}; leave {name} at {default!r}, or use a map-style or an iterable dataset"
            )


def _check_positive(name: str, value: Any) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an int >= 1 or None, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be >= 1, got {value}")


def _check_snapshots(loader: LoaderProtocol) -> None:
    steps = loader.snapshot_every_n_steps
    try:
        step_count = operator.index(steps)
    except TypeError:
        raise TypeError(
            f"snapshot_every_n_steps must be an int >= 0, got {steps!r}; leave it out for a "
            f"snapshot after each step"
        ) from None
    if step_count < 0:
        raise ValueError(
            f"snapshot_every_n_steps must be >= 0, got {steps}; leave it out for a snapshot after "
            f"each step"
        )


def _check_seeding(loader: LoaderProtocol) -> None:
    if loader.seeding not in (None, "worker", "batch", "sample"):
        raise ValueError(
            f"seeding must be 'worker' (torch's random numbers, as with None), 'batch' (the same "
            f"for any number of workers) or 'sample' (also the same for any batch size), got "
            f"{loader.seeding!r}"
        )
    is_stream = reads_shards_of_rank(loader)
    if loader.seeding == "worker" and is_stream:
        raise ValueError(
            f"seeding must not be 'worker' with {loader._sharding_words}, since random numbers "
            f"would depend on the number of ranks; leave seeding out, which then means 'batch' for "
            f"an IterableDataset"
        )
    if loader.seeding in ("worker", "batch") and loader.shard_by_rank and not is_stream:
        raise ValueError(
            f"seeding must be 'sample' with {loader._sharding_words}, got {loader.seeding!r}, with "
            f"which random numbers would depend on the number of ranks; leave seeding out, which "
            f"then means 'sample'"
        )
    if loader.seeding == "sample" and loader._dataset_kind == DatasetKind.Iterable:
        raise ValueError(
            f"seeding='sample' requires a map-style dataset, got the IterableDataset "
            f"{type(loader.dataset).__name__}, whose samples have no positions in an order; pass "
            f"seeding='batch'"
        )


def _check_shards(loader: LoaderProtocol) -> None:
    shards = loader.shards
    if shards is None and reads_shards_of_rank(loader):
        raise ValueError(
            f"{loader._sharding_words} requires shards for the IterableDataset "
            f"{type(loader.dataset).__name__}, got shards=None; pass shards=N, the number of parts "
            f"that are distributed among the ranks, evenly if it is a multiple of their number"
        )
    if shards is None:
        return
    _check_positive("shards", shards)
    if reads_shards_of_rank(loader) and shards < loader.world_size:
        raise ValueError(
            f"shards must be at least {loader.world_size}, one for each rank, got {shards}; pass a "
            f"multiple of {loader.world_size}"
        )
    if reads_shards_of_rank(loader) and not loader.in_order:
        raise ValueError(
            f"in_order must be True with {loader._sharding_words} and an IterableDataset, whose "
            f"order of batches does not depend on the number of ranks, got False; leave in_order "
            f"out"
        )
    if loader._dataset_kind != DatasetKind.Iterable:
        raise ValueError(
            f"shards requires an IterableDataset, got shards={shards} and a "
            f"{type(loader.dataset).__name__}, which is read by index; leave shards out"
        )
    if not is_seeded_by_batch(loader):
        raise ValueError(
            f"shards={shards} requires seeding='batch', since with torch's seeding each worker is "
            f"one shard; pass seeding='batch', or leave shards out"
        )


def _check_num_workers(loader: LoaderProtocol) -> None:
    """Reject ``num_workers="auto"`` if the stream would depend on the measured number."""
    if isinstance(loader.num_workers, str) and loader.num_workers == AUTO:
        raise ValueError(
            "num_workers must be an int when assigned after construction, got 'auto'; make the "
            "loader with num_workers='auto', or assign a number"
        )
    if not isinstance(loader.num_workers, AutomaticCount):
        return
    dataset = loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, (IterDataPipe, MapDataPipe)):
        raise ValueError(
            "num_workers='auto' does not support datapipes, of which torch's iterator takes no "
            "measurements; pass a number"
        )
    if not is_seeded_by_batch(loader):
        raise ValueError(
            f"num_workers='auto' requires seeding='batch', got seeding={loader.seeding!r}, with "
            f"which each worker has different random numbers, so the stream would depend on the "
            f"speed of the machine; pass seeding='batch', or a number of workers"
        )
    if loader._dataset_kind == DatasetKind.Iterable and loader.shards is None:
        raise ValueError(
            f"num_workers='auto' requires a fixed number of shards, got shards=None, with which "
            f"the shard of the {name} that a worker reads depends on the number of workers; pass "
            f"shards=N, which is also the largest useful number of workers"
        )
    if loader._dataset_kind == DatasetKind.Map and is_stateful(dataset):
        raise ValueError(
            f"num_workers='auto' does not support {name}, which has a state_dict() and is read by "
            f"index, so each worker has a separate state and the stream depends on their number; "
            f"pass a number of workers, or leave the state out of the dataset"
        )


def _check_prefetch_bytes(loader: LoaderProtocol) -> None:
    count = loader.prefetch_bytes
    if count is None:
        return
    _check_positive("prefetch_bytes", count)
    if not is_parallel(loader):
        raise ValueError(
            f"prefetch_bytes={count} requires workers, which prefetch, got num_workers=0; use "
            f"workers, or leave prefetch_bytes out"
        )


def _check_fetch_threads(loader: LoaderProtocol) -> None:
    count = loader.fetch_threads
    if type(count) is not int:
        raise TypeError(
            f"fetch_threads must be an int >= 1, got {count!r} of type {type(count).__name__}"
        )
    if count < 1:
        raise ValueError(f"fetch_threads must be >= 1, got {count}; pass 1 to fetch as torch does")
    if count == 1:
        return
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"fetch_threads={count} requires a map-style dataset, got the IterableDataset "
            f"{type(loader.dataset).__name__}, which makes its samples one after the other; leave "
            f"fetch_threads at 1 and read ahead inside it, or make it a map-style dataset"
        )
    if not loader._auto_collation:
        raise ValueError(
            f"fetch_threads={count} requires batches of samples, got batch_size=None, with which "
            f"each request is a single call of the dataset; pass a batch_size or a batch_sampler, "
            f"or leave fetch_threads at 1 and use threads inside the dataset"
        )


def _check_ranks(loader: LoaderProtocol) -> None:
    ranks = loader.ranks
    if ranks is None:
        return
    if not isinstance(ranks, Ranks):
        raise TypeError(
            f"ranks must be a penstock.Ranks or None, got {ranks!r}; assign Ranks(...), or make a "
            f"new loader"
        )
    check_ranks(ranks)


def _check_on_error(loader: LoaderProtocol) -> None:
    if loader.on_error not in ("raise", "skip"):
        raise ValueError(
            f"on_error must be 'raise' or 'skip', got {loader.on_error!r}; 'skip' leaves samples "
            f"that raise an exception out of their batches"
        )
    if type(loader.max_skipped) is not int:
        raise TypeError(f"max_skipped must be an int of 1 or more, got {loader.max_skipped!r}")
    if loader.max_skipped < 1:
        raise ValueError(
            f"max_skipped must be 1 or more, got {loader.max_skipped}; pass on_error='raise' to "
            f"skip no sample"
        )
    if loader.on_error == "raise" and loader.max_skipped != DEFAULTS["max_skipped"]:
        raise ValueError(
            f"max_skipped={loader.max_skipped} requires on_error='skip', got on_error='raise', "
            f"which skips no sample; pass on_error='skip', or leave max_skipped out"
        )
    if loader.on_error == "skip" and loader._dataset_kind == DatasetKind.Iterable:
        raise ValueError(
            f"on_error='skip' requires a map-style dataset, got the IterableDataset "
            f"{type(loader.dataset).__name__}, whose iterator ends when it raises; handle "
            f"exceptions in its __iter__, or leave on_error out"
        )


def _check_code_paths(code_paths: Any) -> None:
    if code_paths is None:
        return
    if isinstance(code_paths, (str, bytes)) or not isinstance(code_paths, Sequence):
        raise TypeError(
            f"code_paths must be a sequence of paths or None, got {code_paths!r}; pass a list of "
            f"folders and .py files to send to the pool's workers with the modules of the program, "
            f"or None to send no modules"
        )
    for path in code_paths:
        if not Path(path).exists():
            raise ValueError(
                f"code_paths must name existing folders or files, got {os.fspath(path)!r}; list "
                f"the folders or .py files with the modules that the dataset needs"
            )


def shown_options(loader: LoaderProtocol) -> list[str]:
    """The options with other values than the defaults, as ``repr()`` of a loader shows them."""
    shown = [_shown_order(loader)]
    for name, default in {**_TORCH_DEFAULTS, **DEFAULTS}.items():
        value = getattr(loader, name, default)
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


def _shown_order(loader: LoaderProtocol) -> str:
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


def _has_own_batches(loader: LoaderProtocol) -> bool:
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
