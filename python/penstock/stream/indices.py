# SPDX-License-Identifier: Apache-2.0
"""The indices of one epoch.

The native side draws the indices of torch's samplers itself, without a Python integer per sample,
and keeps them. If Python needs them, `IndexOrder` draws them once more, from a copy of the
generator before the first pull: they are the same, without side effects. The indices of any other
sampler are kept until their batches have arrived.
"""

from __future__ import annotations

import inspect
from collections import deque
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from penstock import _C
from penstock.ranks.sharding import RankBatchSampler
from penstock.stream.batch_seeds import draw_seed
from penstock.stream.commits import PulledBatch


class IndexRecipe(NamedTuple):
    """Recipe by which the native side draws exactly the indices that the sampler would have
    yielded.
    """

    sample_count: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    generator: torch.Generator | None
    share: _C.RankShareOptions | None = None  # of one rank, replaces batch_size

    @property
    def batch_count(self) -> int:
        if self.share is not None:
            return _C.RankShare(self.sample_count, self.share).step_count
        whole_count, left_count = divmod(self.sample_count, self.batch_size)
        return whole_count + (left_count > 0 and not self.drop_last)


def recognise_sampler(index_sampler: Any) -> IndexRecipe | None:
    """Return the recipe of exactly torch's BatchSampler, or of a rank's part, over RandomSampler
    (without replacement, each sample once) or SequentialSampler; None for anything else, including
    a subclass, and for a class of theirs whose ``__iter__`` the program has replaced."""
    if type(index_sampler) not in (BatchSampler, RankBatchSampler):
        return None
    sampler = index_sampler.sampler
    if getattr(index_sampler, "owned_count", None) is not None:  # not a run of the order
        return None
    if not (_has_own_iter(type(index_sampler)) and _has_own_iter(type(sampler))):
        return None
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
    count = len(sampler.data_source)
    if isinstance(index_sampler, RankBatchSampler):
        share = index_sampler.options(index_sampler.start)
        size = max(1, index_sampler.step_size // index_sampler.world_size)
        return IndexRecipe(count, size, False, shuffle, generator, share)
    batch_size = index_sampler.batch_size
    if type(batch_size) is not int or batch_size <= 0:
        return None
    return IndexRecipe(count, batch_size, bool(index_sampler.drop_last), shuffle, generator)


def _has_own_iter(kind: Any) -> bool:
    scope = getattr(getattr(kind, "__iter__", None), "__globals__", {})
    return bool(scope.get("__name__") == kind.__module__)


def is_untouched(sampler_iter: Any, index_sampler: Any) -> bool:
    """Return whether ``sampler_iter`` is the unused result of iter() of torch's BatchSampler, or of
    a rank's. Programs advance an iterator's ``_sampler_iter``, or replace it, if they have patched
    torch's ``_BaseDataLoaderIter.__init__`` or ``_reset``."""
    if not isinstance(sampler_iter, GeneratorType):
        return False
    frame: FrameType | None = sampler_iter.gi_frame  # None once it is exhausted
    return (
        frame is not None
        and inspect.getgeneratorstate(sampler_iter) == inspect.GEN_CREATED
        and sampler_iter.gi_code is type(index_sampler).__iter__.__code__
        and frame.f_locals.get("self") is index_sampler
    )


class IndexOrder:
    """Batches of indices of one epoch, by place. Confined to the trainer's thread.

    Construct right before the sampler is pulled for the first time. The permutation is drawn on
    demand, since few programs need it: it takes eight bytes per sample.
    """

    def __init__(self, recipe: IndexRecipe) -> None:
        self._recipe = recipe
        self._permutation: torch.Tensor | None = None
        self._state: torch.Tensor | None = None
        if recipe.shuffle:
            generator = torch.default_generator if recipe.generator is None else recipe.generator
            self._state = generator.get_state()

    @property
    def batch_size(self) -> int:
        """Return the number of samples of a batch that is not the last one."""
        return self._recipe.batch_size

    @property
    def permutation(self) -> torch.Tensor | None:
        """Return the indices of the epoch in their order; None if they are in ascending order."""
        if self._state is not None and self._permutation is None:
            self._permutation = self._draw(self._state)
        return self._permutation

    def run(self, place: int) -> tuple[int, int] | None:
        """Return the first place in the order and the number of samples of batch number ``place``;
        None if its samples are not next to each other there."""
        recipe = self._recipe
        if recipe.share is None:
            first = place * recipe.batch_size
            return first, min(recipe.batch_size, recipe.sample_count - first)
        places = self._places(place)
        first, count = places[0], len(places)
        return (first, count) if places[-1] - first == count - 1 else None

    def batch(self, place: int) -> list[int] | None:
        """Return the indices of batch number ``place``, None past the last one."""
        if not 0 <= place < self._recipe.batch_count:
            return None
        places = self._places(place)
        permutation = self.permutation
        if permutation is None:
            return places
        indices: list[int] = permutation[places].tolist()
        return indices

    def whole_batch(self, place: int) -> PulledBatch:
        """Return the indices of batch number ``place``; if ranks share the order, the
        indices of the whole step."""
        recipe = self._recipe
        if recipe.share is None:
            indices = self.batch(place)
            assert indices is not None
            return PulledBatch(indices, place * recipe.batch_size)
        first, count = _C.RankShare(recipe.sample_count, recipe.share).order_part(place)
        permutation = self.permutation
        if permutation is None:
            return PulledBatch([*range(first, first + count)], first)
        return PulledBatch(permutation[first : first + count].tolist(), first)

    def _places(self, place: int) -> list[int]:
        """Return the places of a batch's samples in the order."""
        recipe = self._recipe
        if recipe.share is None:
            first = place * recipe.batch_size
            return list(range(first, min(first + recipe.batch_size, recipe.sample_count)))
        return _C.RankShare(recipe.sample_count, recipe.share).samples(place)

    def _draw(self, state: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(state)
        if self._recipe.generator is None:  # the sampler makes one, from a seed that it draws
            generator = torch.Generator().manual_seed(draw_seed(generator))
        return torch.randperm(self._recipe.sample_count, generator=generator, device="cpu")


class AskedIndices:
    """Indices that a sampler other than torch's gave for batches not yet received."""

    def __init__(self, first: int) -> None:
        """Take ``first``, the place in the epoch of the first batch that will be requested."""
        self._first = first
        self._indices: deque[Any] = deque()

    def add(self, index: Any) -> None:
        # The sampler may fill the same list again.
        self._indices.append(index.copy() if type(index) is list else index)

    def after(self, answered_count: int) -> deque[Any]:
        """Return the indices of the batches from that place on; earlier ones are dropped."""
        while self._indices and self._first < answered_count:
            self._indices.popleft()
            self._first += 1
        return self._indices
