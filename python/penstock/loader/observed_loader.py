# SPDX-License-Identifier: Apache-2.0
"""A loader as the advice about it sees it (:mod:`penstock.tuning.advice`)."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from penstock.tuning.observation import LoaderSettings
from penstock.worker.threaded_fetch import fetches_whole_batches

_NAMES = (
    "fetch_threads",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory",
    "in_order",
    "seeding",
)


def settings_of(loader: Any) -> LoaderSettings:
    values = {name: getattr(loader, name) for name in _NAMES}
    values["num_workers"] = int(loader.num_workers)
    values["offload"] = loader.plan is not None
    return LoaderSettings.of(values)


def batch_samples_of(loader: Any) -> int:
    """The samples of a batch; 1 where the dataset makes whole batches, or nobody can know."""
    samples = loader.batch_size
    if samples is None:
        samples = getattr(loader.batch_sampler, "batch_size", None)
    return samples if isinstance(samples, int) and samples > 0 else 1


def takes_threads(loader: Any) -> bool:
    """Whether ``fetch_threads`` may be more than 1 and would be of use."""
    dataset = loader.dataset
    if isinstance(dataset, (IterableDataset, IterDataPipe, MapDataPipe)):
        return False
    return loader.batch_sampler is not None and not fetches_whole_batches(dataset)


def is_order_of_workers(loader: Any) -> bool:
    """Whether the batches are others with another number of workers, their random numbers apart."""
    if not isinstance(loader.dataset, IterableDataset):
        return False
    return loader.seeding is None or loader.shards is None
