# SPDX-License-Identifier: Apache-2.0
"""Recognises torch's own samplers, whose indices the native side can draw without a Python integer
per sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from penstock.table_rows import plain_rows

if TYPE_CHECKING:
    from penstock.dataloader import DataLoader

_DEEP_PREFETCH_BYTES = 1 << 20
_DEEP_PREFETCH_COUNT = 16


class IndexRecipe(NamedTuple):
    """What the native side needs to draw the very indices that the sampler would have yielded."""

    sample_count: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    generator: torch.Generator | None

    @property
    def batch_count(self) -> int:
        whole_count, left_count = divmod(self.sample_count, self.batch_size)
        return whole_count + (left_count > 0 and not self.drop_last)


def recognise_sampler(index_sampler: Any) -> IndexRecipe | None:
    """The recipe of exactly torch's BatchSampler over RandomSampler (without replacement, each
    sample once) or
    SequentialSampler; None for anything else, a subclass included."""
    if type(index_sampler) is not BatchSampler:
        return None
    sampler = index_sampler.sampler
    if type(sampler) is SequentialSampler:
        shuffle, generator = False, None
    elif type(sampler) is RandomSampler:
        if sampler.replacement or sampler._num_samples is not None:
            return None
        if sampler.generator is not None and sampler.generator.device.type != "cpu":
            return None
        shuffle, generator = True, sampler.generator
    else:
        return None
    batch_size = index_sampler.batch_size
    if type(batch_size) is not int or batch_size <= 0:
        return None
    count = len(sampler.data_source)
    return IndexRecipe(count, batch_size, bool(index_sampler.drop_last), shuffle, generator)


def prefetch_depth(loader: DataLoader[Any]) -> int:
    """How many batches each worker is asked for ahead: ``prefetch_factor``, or more where nobody
    can see the difference.

    A small batch of a plain TensorDataset is ready sooner than the request for it has crossed two
    processes, so two of them in flight leave the workers idle. Reading ahead further is
    unobservable there: rows are read from tensors, and torch's own sampler, without a generator of
    the user's, draws at the first pull alone.
    """
    factor = loader.prefetch_factor or 1
    rows = plain_rows(loader.dataset, loader.collate_fn)
    recipe = recognise_sampler(loader._index_sampler)
    if rows is None or recipe is None or recipe.generator is not None or recipe.sample_count == 0:
        return factor
    row_bytes = sum(tensor[:1].nbytes for tensor in rows)
    batch_bytes = max(1, row_bytes * recipe.batch_size)
    return max(factor, min(_DEEP_PREFETCH_COUNT, _DEEP_PREFETCH_BYTES // batch_bytes))
