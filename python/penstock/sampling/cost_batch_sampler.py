# SPDX-License-Identifier: Apache-2.0
"""Batches within a cost budget, of similar cost on all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock import _C
from penstock.ranks.sharding import JobRank
from penstock.sampling.epoch_sampler import EpochSampler, drawn_order


class _Packing(NamedTuple):
    """Inputs of a step's batches, apart from the samples that are left."""

    budget: float
    world_size: int
    batch_size_max: int


@dataclass(slots=True)
class _CostPlace:
    epoch: int
    past: list[tuple[_Packing, int]]  # number of steps packed in this way before
    step_count: int = 0  # packed by the sampler after those


class CostBatchSampler(EpochSampler[list[int], _CostPlace]):
    """Batches of samples whose costs differ, each within a budget, and even over the ranks.

    A step takes the next samples of the epoch's order, shares them out over the ranks so that their
    batches cost alike, and fills what room is left with samples that follow soon. All ranks have
    the same number of batches. A sampler for ``batch_sampler=``, of torch's loader as of
    penstock's, with ``state_dict()`` and ``load_state_dict()``.

    costs: of each sample, positive: its tokens, the square of its length, its bytes.
    budget: the most that a batch may cost. No sample may cost more.
    rank, world_size: this process, of so many that share the order. None: those of the default
        process group, or of the variables RANK and WORLD_SIZE, or 0 of 1.
    batch_size_max: the most samples of a batch. None: any number.
    shuffle: each epoch has an order of its own, drawn from ``seed`` and the epoch. False: in
        sequence.
    seed: of all orders: an integer of 0 or more, the same on all ranks.
    remainder: what happens when the last step has fewer samples than ranks. "pad" gives some of
        them twice (:attr:`padded`). "drop" leaves them out (:attr:`dropped`).

    Each iteration is the next epoch, from 0; :meth:`set_epoch` names another. The state is the
    job's: of any rank, for any rank, and for another number of ranks, another budget and another
    ``batch_size_max`` as well, where the samples that are left are shared out anew. Raises
    ``ValueError`` for arguments that make no batches.

    Example::

        sampler = penstock.CostBatchSampler(lengths, budget=8192)
        loader = penstock.DataLoader(dataset, batch_sampler=sampler, num_workers=4)
    """

    def __init__(
        self,
        costs: Sequence[float],
        budget: float,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        batch_size_max: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Literal["pad", "drop"] = "pad",
    ) -> None:
        self._costs = _checked_costs(costs, budget)
        self.rank, self.world_size = JobRank.of(rank, world_size)
        if batch_size_max is not None and batch_size_max < 1:
            raise ValueError(f"batch_size_max is {batch_size_max}; 1 or more, or None, is expected")
        if remainder not in ("pad", "drop"):
            raise ValueError(f"remainder is {remainder!r}; 'pad' or 'drop' is expected")
        self.remainder = remainder
        self._packing = _Packing(float(budget), self.world_size, batch_size_max or 0)
        self._padded: list[int] = []
        self._dropped: list[int] = []
        self._lengths: dict[Any, int] = {}  # by epoch and past
        super().__init__(shuffle, seed)

    def __repr__(self) -> str:
        parts = [f"<{len(self._costs)} costs>", f"budget={self.budget:.12g}"]
        if self.world_size > 1:
            parts.append(f"rank={self.rank}, world_size={self.world_size}")
        if self._packing.batch_size_max:
            parts.append(f"batch_size_max={self._packing.batch_size_max}")
        parts += self._shown_order()
        if self.remainder != "pad":
            parts.append(f"remainder={self.remainder!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def budget(self) -> float:
        """The most that a batch may cost."""
        return self._packing.budget

    @property
    def padded(self) -> list[int]:
        """The samples that were given once more, since the epoch began, over all ranks."""
        return list(self._padded)

    @property
    def dropped(self) -> list[int]:
        """The samples that the last epoch whose end was reached left out."""
        return list(self._dropped)

    def __len__(self) -> int:
        """The number of batches of a rank in the epoch that was begun last, or that set_epoch() or
        a state named since.

        It is found by making them.
        """
        epoch, past = self._place.epoch, self._place.past
        key = (epoch, tuple(past))
        if key not in self._lengths:
            begun = _CostPlace(epoch, past)
            count = sum(made_count for _, made_count in past)
            self._lengths = {key: count + sum(1 for _ in self._steps(begun))}
        return self._lengths[key]

    def state_dict(self) -> dict[str, Any]:
        """The place of the job in the epoch."""
        steps = [*self._place.past, (self._packing, self._place.step_count)]
        return {
            "epoch": self._place.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sample_count": len(self._costs),
            "steps": [[*packing, count] for packing, count in steps if count > 0],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the next iteration go on where the job was that ``state`` is of.

        The costs have to be the same; the samples are shared out as they were up to that place.
        Raises ``ValueError`` for a state of another order.
        """
        sample_count = len(self._costs)
        self._check_state(state, seed=self.seed, shuffle=self.shuffle, sample_count=sample_count)
        past = [(_Packing(*packing), count) for *packing, count in state["steps"]]
        step_count = past.pop()[1] if past and past[-1][0] == self._packing else 0
        self._begin_at(_CostPlace(state["epoch"], past, step_count))

    def _first_place(self, epoch: int) -> _CostPlace:
        return _CostPlace(epoch, [])

    def _rest(self, place: _CostPlace) -> Iterator[list[int]]:
        self._padded, self._dropped = [], []
        for step in self._steps(place):
            place.step_count += 1
            yield step.batch(self.rank) if all(step.batch_sizes) else self._make_whole(step)

    def _steps(self, place: _CostPlace) -> Iterator[_C.CostStep]:
        """Yield the steps of the epoch after the ones already made."""
        count = len(self._costs)
        order = np.arange(count)
        if self.shuffle:
            order = drawn_order(count, self.seed, (place.epoch,))
        packer = _C.CostPacker(self._costs, order)
        for packing, made_count in [*place.past, (self._packing, place.step_count)]:
            for _ in range(made_count):
                packer.next(*packing)
        while (step := packer.next(*self._packing)) is not None:
            if self.remainder == "drop" and not all(step.batch_sizes):
                self._dropped = self._samples(step)
                return
            yield step

    def _samples(self, step: _C.CostStep) -> list[int]:
        batches = map(step.batch, range(len(step.batch_sizes)))
        return list(itertools.chain.from_iterable(batches))

    def _make_whole(self, step: _C.CostStep) -> list[int]:
        """Return this rank's batch in a step of fewer samples than ranks. Each has one at least."""
        again = itertools.cycle(self._samples(step))
        batches = [step.batch(rank) or [next(again)] for rank in range(len(step.batch_sizes))]
        sizes = zip(batches, step.batch_sizes, strict=True)
        self._padded.extend(batch[0] for batch, size in sizes if size == 0)
        return batches[self.rank]


def _checked_costs(costs: Sequence[float], budget: float) -> np.ndarray[Any, Any]:
    found = np.ascontiguousarray(costs, dtype=np.float64)
    if found.ndim != 1:
        raise ValueError(f"costs have the shape {found.shape}; one number a sample is expected")
    if not (math.isfinite(budget) and budget > 0):
        raise ValueError(f"budget is {budget}; a positive finite number is expected")
    wrong = np.flatnonzero(~(found > 0) | ~np.isfinite(found))
    if wrong.size:
        raise ValueError(
            f"the cost of sample {wrong[0]} is {found[wrong[0]]}; a positive finite number is "
            f"expected"
        )
    beyond = np.flatnonzero(found > budget)
    if beyond.size:
        raise ValueError(
            f"sample {beyond[0]} costs {found[beyond[0]]:g}, and budget is {budget:g}, which "
            f"{beyond.size} samples exceed; raise budget, or leave them out"
        )
    return found
