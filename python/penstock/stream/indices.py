# SPDX-License-Identifier: Apache-2.0
"""Recognises torch's own samplers, whose indices the native side can draw without a Python integer
per sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler


class IndexRecipe(NamedTuple):
    """The recipe by which the native side draws the very indices that the sampler would have
    yielded.
    """

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
