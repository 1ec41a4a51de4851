# SPDX-License-Identifier: Apache-2.0
"""Values that a loader's options cannot have, and loaders that a pool cannot serve."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from penstock.errors import UnsupportedError
from penstock.loader.device import names_device
from penstock.loader.grouped_arguments import Ranks, check_ranks, is_address
from penstock.loader.options import ANY_ORDER, DEFAULTS, LoaderOptions
from penstock.program_line import warn
from penstock.stream.shard_state import is_stateful
from penstock.tuning.worker_tuner import AUTO, AutomaticCount

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


def check_options(options: LoaderOptions) -> None:
    """Reject values that the loader's penstock options cannot have. Raises ValueError or TypeError.

    They may be assigned after construction, so ``iter()`` checks again.
    """
    _check_datapipe(options)
    _check_snapshots(options)
    _check_seeding(options)
    _check_shards(options)
    _check_prefetch_bytes(options)
    _check_fetch_threads(options)
    _check_on_error(options)
    _check_commit(options)
    _check_in_order(options)
    _check_num_workers(options)
    check_pool_options(options)
    _check_ranks(options)
    if type(options.overlap_epochs) is not bool:
        raise TypeError(
            f"overlap_epochs must be a bool, got {options.overlap_epochs!r}; pass True to have the "
            f"first batches of the next epoch made while an epoch ends, else False"
        )


def warn_of_chunks(options: LoaderOptions) -> None:
    """Warn if several processes would read the same chunks of a :class:`ChunkSampler`."""
    sampler = options.chunk_sampler
    if sampler is None:
        return
    if options.pool is not None or isinstance(options.num_workers, AutomaticCount):
        workers = "a pool" if options.pool is not None else "num_workers='auto'"
        warn(
            f"ChunkSampler needs workers that make the batches in turn for each chunk to be read "
            f"once, got {workers}, with which any worker makes any batch and reads most chunks; "
            f"pass a number of workers and no pool",
            UserWarning,
        )
        return
    rank_count = options.job_rank.world_size if options.shard_by_rank else 1
    worker_count = max(1, operator.index(options.num_workers))
    process_count = rank_count * worker_count
    # A batch may consist of several runs of the sampler: the job had more ranks before.
    whole, rest = divmod(options.batch_size or 1, sampler.batch_size or 1)
    is_by_process = rest == 0 and sampler.readers % (process_count * max(1, whole)) == 0
    if process_count > 1 and not is_by_process:
        warn(
            f"readers of the ChunkSampler must be {process_count} or a multiple, and its "
            f"batch_size {options.batch_size}, for each chunk to be read by one of the "
            f"{process_count} processes (world size {rank_count}, {worker_count} workers each), "
            f"got readers={sampler.readers} and batch_size={sampler.batch_size}; pass "
            f"readers={process_count}, batch_size={options.batch_size} to it",
            UserWarning,
        )


class Obstacle(NamedTuple):
    """Reason why a pool cannot serve a loader."""

    seen: str
    remedy: str


def check_pool_options(options: LoaderOptions) -> None:
    """Reject values that a pool's options cannot have. Raises ValueError or TypeError."""
    _check_code_paths(options.code_paths)
    if type(options.trust_workers) is not bool:
        raise TypeError(
            f"trust_workers must be a bool, got {options.trust_workers!r}; pass True to unpickle "
            f"objects from the pool's workers, which can run arbitrary code, or leave it out"
        )
    if options.pool is None and options.replica_group is None:
        return
    if options.pool is not None and not is_address(options.pool):
        raise ValueError(
            f"pool must be the address of a controller, such as 'tcp://host:7000', got "
            f"{options.pool!r}"
        )
    obstacle = obstacle_to_pool(options)
    if obstacle is not None:
        name = "pool" if options.replica_group is None else "replica_group"
        raise ValueError(
            f"{name}={getattr(options, name)!r} cannot be used: {obstacle.seen}; "
            f"{obstacle.remedy}, or leave {name} out"
        )
    if options.pool is None and options.num_workers == 0:
        raise ValueError(
            f"replica_group={options.replica_group} requires workers, which make the batches of "
            f"these ranks, got num_workers=0; pass pool=, or num_workers=1 or more"
        )


def obstacle_to_pool(options: LoaderOptions) -> Obstacle | None:
    """Return an option of the loader that no pool can serve, if there is one."""
    if options.is_datapipe:
        return Obstacle(
            "the dataset is a datapipe, which only torch's iterator reads",
            "use a map-style or an iterable dataset",
        )
    if isinstance(options.num_workers, AutomaticCount):
        return Obstacle(
            "num_workers='auto' chooses a number of processes on this machine, but with a pool, it "
            "is the pool that grows and shrinks",
            "pass the number of local worker processes to use in addition to the pool",
        )
    if options.seeding == "worker":
        return Obstacle(
            "seeding='worker' makes the stream depend on the workers that there are, and the "
            "workers of a pool change",
            "pass seeding='batch' (the default with a pool)",
        )
    if options.is_map and is_stateful(options.dataset):
        return Obstacle(
            f"{type(options.dataset).__name__} has a state_dict() and is read by index, so each "
            f"worker has a separate state and the stream depends on the workers that there are",
            "leave the state out of the dataset",
        )
    return None


def _check_datapipe(options: LoaderOptions) -> None:
    """Reject options that torch's iterator would ignore."""
    if not options.is_datapipe:
        return
    for name, default in _BEYOND_TORCH.items():
        value = getattr(options, name)
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


def _check_snapshots(options: LoaderOptions) -> None:
    steps = options.snapshot_every_n_steps
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


def _check_seeding(options: LoaderOptions) -> None:
    if options.seeding not in (None, "worker", "batch", "sample"):
        raise ValueError(
            f"seeding must be 'worker' (torch's random numbers, as with None), 'batch' (the same "
            f"for any number of workers) or 'sample' (also the same for any batch size), got "
            f"{options.seeding!r}"
        )
    is_stream = options.reads_shards_of_rank
    if options.seeding == "worker" and is_stream:
        raise ValueError(
            f"seeding must not be 'worker' with {options.sharding_words}, since random numbers "
            f"would depend on the number of ranks; leave seeding out, which then means 'batch' for "
            f"an IterableDataset"
        )
    if options.seeding in ("worker", "batch") and options.shard_by_rank and not is_stream:
        raise ValueError(
            f"seeding must be 'sample' with {options.sharding_words}, got {options.seeding!r}, "
            f"with which random numbers would depend on the number of ranks; leave seeding out, "
            f"which then means 'sample'"
        )
    if options.seeding == "sample" and options.is_iterable:
        raise ValueError(
            f"seeding='sample' requires a map-style dataset, got the IterableDataset "
            f"{type(options.dataset).__name__}, whose samples have no positions in an order; pass "
            f"seeding='batch'"
        )


def _check_shards(options: LoaderOptions) -> None:
    shards = options.shards
    if shards is None and options.reads_shards_of_rank:
        raise ValueError(
            f"{options.sharding_words} requires shards for the IterableDataset "
            f"{type(options.dataset).__name__}, got shards=None; pass shards=N, the number of "
            f"parts that are distributed among the ranks, evenly if it is a multiple of their "
            f"number"
        )
    if shards is None:
        return
    _check_positive("shards", shards)
    if options.reads_shards_of_rank and shards < options.job_rank.world_size:
        raise ValueError(
            f"shards must be at least {options.world_size}, one for each rank, got {shards}; pass "
            f"a multiple of {options.world_size}"
        )
    if options.reads_shards_of_rank and not options.in_order:
        raise ValueError(
            f"in_order must be True with {options.sharding_words} and an IterableDataset, whose "
            f"order of batches does not depend on the number of ranks, got "
            f"{_in_order_as_given(options)}; leave in_order out"
        )
    if not options.is_iterable:
        raise ValueError(
            f"shards requires an IterableDataset, got shards={shards} and a "
            f"{type(options.dataset).__name__}, which is read by index; leave shards out"
        )
    if not options.is_seeded_by_batch:
        raise ValueError(
            f"shards={shards} requires seeding='batch', since with torch's seeding each worker is "
            f"one shard; pass seeding='batch', or leave shards out"
        )


def _in_order_as_given(options: LoaderOptions) -> bool | int:
    return options.overtaking_max != ANY_ORDER and options.overtaking_max


def _check_in_order(options: LoaderOptions) -> None:
    if options.replica_group is not None and not options.in_order:
        raise ValueError(
            f"in_order must be True with replica_group={list(options.replica_group)}, whose ranks "
            f"take the same batch in each step, got {_in_order_as_given(options)}; leave in_order "
            f"out"
        )
    if options.in_order or 2 <= options.overtaking_max <= ANY_ORDER:
        return
    raise ValueError(
        f"in_order must be True, False (any batch may overtake others) or the number of batches "
        f"that may overtake the oldest one, from 2 to {ANY_ORDER}, got {options.overtaking_max}; "
        f"pass in_order=True for none"
    )


def _check_commit(options: LoaderOptions) -> None:
    mode = options.commit
    if mode is None:
        return
    if mode not in ("manual", "auto"):
        raise ValueError(
            f'commit must be None, "manual" (the program calls commit()) or "auto" (the steps of '
            f"an optimizer commit the batches before them), got {mode!r}"
        )
    needs = f"commit={mode!r} requires"
    if not options.is_map:
        raise UnsupportedError(
            f"{needs} a map-style dataset, got {_type_name(options)}, whose batches can only be "
            f"repeated in order; use a map-style dataset, or leave commit out"
        )
    if is_stateful(options.dataset):
        raise UnsupportedError(
            f"{needs} a dataset without state_dict(), got {_type_name(options)}, whose state "
            f"covers the delivered batches; leave the state out of the dataset, or leave commit out"
        )


def _type_name(options: LoaderOptions) -> str:
    return type(options.dataset).__name__


def _check_num_workers(options: LoaderOptions) -> None:
    """Reject ``num_workers="auto"`` if the stream would depend on the measured number."""
    if isinstance(options.num_workers, str) and options.num_workers == AUTO:
        raise ValueError(
            "num_workers must be an int when assigned after construction, got 'auto'; make the "
            "loader with num_workers='auto', or assign a number"
        )
    if not isinstance(options.num_workers, AutomaticCount):
        return
    dataset = options.dataset
    name = type(dataset).__name__
    if options.is_datapipe:
        raise ValueError(
            "num_workers='auto' does not support datapipes, of which torch's iterator takes no "
            "measurements; pass a number"
        )
    if not options.is_seeded_by_batch:
        raise ValueError(
            f"num_workers='auto' requires seeding='batch', got seeding={options.seeding!r}, with "
            f"which each worker has different random numbers, so the stream would depend on the "
            f"speed of the machine; pass seeding='batch', or a number of workers"
        )
    if options.is_iterable and options.shards is None:
        raise ValueError(
            f"num_workers='auto' requires a fixed number of shards, got shards=None, with which "
            f"the shard of the {name} that a worker reads depends on the number of workers; pass "
            f"shards=N, which is also the largest useful number of workers"
        )
    if options.is_map and is_stateful(dataset):
        raise ValueError(
            f"num_workers='auto' does not support {name}, which has a state_dict() and is read by "
            f"index, so each worker has a separate state and the stream depends on their number; "
            f"pass a number of workers, or leave the state out of the dataset"
        )


def _check_prefetch_bytes(options: LoaderOptions) -> None:
    count = options.prefetch_bytes
    if count is None:
        return
    _check_positive("prefetch_bytes", count)
    if not options.is_parallel:
        raise ValueError(
            f"prefetch_bytes={count} requires workers, which prefetch, got num_workers=0; use "
            f"workers, or leave prefetch_bytes out"
        )


def _check_fetch_threads(options: LoaderOptions) -> None:
    count = options.fetch_threads
    if count != "auto" and type(count) is not int:
        raise TypeError(
            f"fetch_threads must be an int >= 1 or 'auto', got {count!r} of type "
            f"{type(count).__name__}"
        )
    if isinstance(count, int) and count < 1:
        raise ValueError(f"fetch_threads must be >= 1, got {count}; pass 1 to fetch as torch does")
    if count == 1:
        return
    if isinstance(options.dataset, IterableDataset):
        raise ValueError(
            f"fetch_threads={count!r} requires a map-style dataset, got the IterableDataset "
            f"{type(options.dataset).__name__}, which makes its samples one after the other; leave "
            f"fetch_threads at 1 and read ahead inside it, or make it a map-style dataset"
        )
    if not options.auto_collation:
        raise ValueError(
            f"fetch_threads={count!r} requires batches of samples, got batch_size=None, with which "
            f"each request is a single call of the dataset; pass a batch_size or a batch_sampler, "
            f"or leave fetch_threads at 1 and use threads inside the dataset"
        )


def _check_ranks(options: LoaderOptions) -> None:
    ranks = options.ranks
    if ranks is None:
        return
    if not isinstance(ranks, Ranks):
        raise TypeError(
            f"ranks must be a penstock.Ranks or None, got {ranks!r}; assign Ranks(...), or make a "
            f"new loader"
        )
    check_ranks(ranks)


def _check_on_error(options: LoaderOptions) -> None:
    if options.on_error not in ("raise", "skip"):
        raise ValueError(
            f"on_error must be 'raise' or 'skip', got {options.on_error!r}; 'skip' leaves samples "
            f"that raise an exception out of their batches"
        )
    if type(options.max_skipped) is not int:
        raise TypeError(f"max_skipped must be an int of 1 or more, got {options.max_skipped!r}")
    if options.max_skipped < 1:
        raise ValueError(
            f"max_skipped must be 1 or more, got {options.max_skipped}; pass on_error='raise' to "
            f"skip no sample"
        )
    if options.on_error == "raise" and options.max_skipped != DEFAULTS["max_skipped"]:
        raise ValueError(
            f"max_skipped={options.max_skipped} requires on_error='skip', got on_error='raise', "
            f"which skips no sample; pass on_error='skip', or leave max_skipped out"
        )
    if options.on_error == "skip" and options.is_iterable:
        raise ValueError(
            f"on_error='skip' requires a map-style dataset, got the IterableDataset "
            f"{type(options.dataset).__name__}, whose iterator ends when it raises; handle "
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
