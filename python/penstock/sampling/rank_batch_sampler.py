# SPDX-License-Identifier: Apache-2.0
"""The part of one rank in the batches of an order that knows no ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

from torch.utils.data import Sampler

from penstock import _C
from penstock.sampling.job_rank import JobRank

Remainder = Literal["pad", "drop", "uneven"]
_REMAINDERS = {
    "pad": _C.Remainder.PAD,
    "drop": _C.Remainder.DROP,
    "uneven": _C.Remainder.UNEVEN,
}


class RankBatchSampler(Sampler[list[int]]):
    """Batches of indices for one rank of several, which all read ``sampler``'s one order.

    A step takes the next ``step_size`` samples of the order, and each rank a run of them. So the
    samples of a step are the same for any number of ranks with the same ``step_size``, and all
    ranks have the same number of steps. ``sampler`` has to give the same order on all ranks, and a
    length. :class:`penstock.DataLoader` makes one for ``shard_by_rank=True``.

    remainder: what becomes of the samples that do not fill the last step. "pad": they are shared
        out evenly, some of them given twice. "drop": they are left out. "uneven": some ranks have
        one more than others; where there are fewer samples than ranks, as "pad".
    """

    def __init__(
        self, sampler: Any, job: JobRank, step_size: int, remainder: Remainder = "pad"
    ) -> None:
        self.sampler = sampler
        self.rank, self.world_size = job
        self.step_size = step_size
        self.remainder = remainder
        self.first_place = 0  # of the batch that was given last, in the order of the epoch
        self._first_step = self._first_sample = 0  # where the next iteration begins
        self._first_of_sampler = 0  # the sample that the sampler begins at by itself

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, which begins when it is first asked: loaders call iter() more than once.
        first_step, first_sample = self._first_step, self._first_sample
        left_out = first_sample - self._first_of_sampler
        self.begin_at(0, 0)
        share = self.share(first_step, first_sample)
        order = iter(self.sampler)
        next(itertools.islice(order, left_out, left_out), None)
        taken = first_sample
        for step in range(first_step, share.step_count):
            samples = list(itertools.islice(order, self.step_size))
            self.first_place = share.first_place(step)
            yield [samples[place - taken] for place in share.samples(step)]
            taken += len(samples)
        for _ in order:  # a sampler of torch's draws once more as it ends
            pass

    def __len__(self) -> int:
        """The number of steps of a whole epoch."""
        return self.share(0, 0).step_count

    def options(self, first_step: int, first_sample: int) -> _C.RankShareOptions:
        """Of an epoch that begins after so many steps and samples."""
        return _C.RankShareOptions(
            rank=self.rank,
            rank_count=self.world_size,
            step_size=self.step_size,
            remainder=_REMAINDERS[self.remainder],
            first_step=first_step,
            first_sample=first_sample,
        )

    def share(self, first_step: int, first_sample: int) -> _C.RankShare:
        """Of an epoch that begins after so many steps and samples."""
        return _C.RankShare(len(self.sampler), self.options(first_step, first_sample))

    def begin_at(self, step: int, sample: int, first_of_sampler: int = 0) -> None:
        """Makes the next iteration begin after so many steps and samples of the epoch.

        ``first_of_sampler``: the sampler has a state, and begins after so many samples by itself.
        """
        self._first_step, self._first_sample = step, sample
        self._first_of_sampler = first_of_sampler

    @property
    def start(self) -> tuple[int, int]:
        """The step and the sample at which the next iteration begins."""
        return self._first_step, self._first_sample
