# SPDX-License-Identifier: Apache-2.0
"""The options that penstock has beyond torch's: what they may be, and what they mean together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, _DatasetKind

from penstock.errors import UnsupportedError

if TYPE_CHECKING:
    from penstock.dataloader import DataLoader


def check_options(loader: DataLoader[Any]) -> None:
    """Refuses what the own options of a loader cannot be. Raises ValueError or TypeError.

    They may be assigned after construction, so ``iter()`` asks again.
    """
    _check_seeding(loader)
    _check_shards(loader)
    _check_prefetch_bytes(loader)
    _check_fetch_threads(loader)


def own_options(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """The options that workers are started with, so that a change of one needs new workers."""
    return (loader.seeding, loader.shards, loader.prefetch_bytes, loader.fetch_threads)


def is_seeded_by_batch(loader: DataLoader[Any]) -> bool:
    """Whether each batch is seeded by its place in the epoch, and not each worker by its id."""
    return loader.seeding == "batch"


def shard_count(loader: DataLoader[Any]) -> int:
    """In how many shards a dataset is read: one a worker unless ``shards`` says otherwise."""
    if is_seeded_by_batch(loader) and loader.shards is not None:
        return loader.shards
    return max(1, loader.num_workers)


def check_torch_iterator_suffices(loader: DataLoader[Any], reason: str) -> None:
    """Refuses to hand over to torch's iterator what it would ignore. Raises UnsupportedError."""
    if is_seeded_by_batch(loader):
        raise UnsupportedError(
            f"seeding='batch' was asked for where torch's iterator has to be used: {reason}; leave "
            f"seeding out, or use another dataset"
        )


def _check_seeding(loader: DataLoader[Any]) -> None:
    if loader.seeding not in (None, "worker", "batch"):
        raise ValueError(
            f"seeding is {loader.seeding!r}; 'worker' (torch's random numbers, which is what None "
            f"means too) or 'batch' (the same for any number of workers) is expected"
        )


def _check_shards(loader: DataLoader[Any]) -> None:
    shards = loader.shards
    if shards is None:
        return
    if type(shards) is not int:
        raise TypeError(f"shards is {shards!r}; a positive int or None is expected")
    if shards < 1:
        raise ValueError(f"shards is {shards}; at least 1 is expected")
    if loader._dataset_kind != _DatasetKind.Iterable:
        raise ValueError(
            f"shards={shards} was given, but a {type(loader.dataset).__name__} is read by index; "
            f"shards are for an IterableDataset, leave the option out"
        )
    if not is_seeded_by_batch(loader):
        raise ValueError(
            f"shards={shards} was given without seeding='batch'; with torch's seeding every worker "
            f"is one shard, so pass seeding='batch' or leave shards out"
        )


def _check_prefetch_bytes(loader: DataLoader[Any]) -> None:
    count = loader.prefetch_bytes
    if count is None:
        return
    if type(count) is not int:
        raise TypeError(f"prefetch_bytes is {count!r}; a positive int or None is expected")
    if count < 1:
        raise ValueError(f"prefetch_bytes is {count}; at least 1 is expected")
    if loader.num_workers == 0:
        raise ValueError(
            f"prefetch_bytes={count} was given with num_workers=0, where nothing is prefetched; "
            f"use workers or leave it out"
        )


def _check_fetch_threads(loader: DataLoader[Any]) -> None:
    count = loader.fetch_threads
    if type(count) is not int:
        raise TypeError(
            f"fetch_threads is {count!r}, of type {type(count).__name__}; an int of 1 or more "
            f"is expected"
        )
    if count < 1:
        raise ValueError(
            f"fetch_threads is {count}; a number of threads of 1 or more is expected, and 1 "
            f"fetches as torch does"
        )
    if count == 1:
        return
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        raise ValueError(
            f"fetch_threads is {count} but the dataset is a datapipe, which torch's own "
            f"iterator reads; leave fetch_threads at 1, or make it a map-style dataset"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"fetch_threads is {count} but the dataset is the IterableDataset "
            f"{type(loader.dataset).__name__}, which makes its samples one after the other; "
            f"leave fetch_threads at 1 and read ahead inside it, or make it a map-style dataset"
        )
    if not loader._auto_collation:
        raise ValueError(
            f"fetch_threads is {count} but batch_size is None, so each request is one call of "
            f"the dataset and there is nothing to share out; give a batch_size or a "
            f"batch_sampler, or leave fetch_threads at 1 and use threads inside the dataset"
        )
