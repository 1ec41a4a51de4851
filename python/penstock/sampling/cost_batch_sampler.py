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
    """Make batches within a cost budget, with similar costs on all ranks.

    A step takes the next samples of the epoch's order, divides them among the ranks so that their
    batches have similar costs, and fills the remaining room with samples that follow soon. All
    ranks have the same number of batches. Pass it as ``batch_sampler=`` to torch's or penstock's
    loader. Each iteration is the next epoch, starting with epoch 0; :meth:`set_epoch` selects
    another.

    The state is the state of the job: any rank can load the state of any other. It can also be
    loaded with another number of ranks, another budget or another ``batch_size_max``; the remaining
    samples are then divided again.

    Args:
        costs (Sequence[float]): One positive finite number per sample, such as its number of
            tokens, the square of its length, or its bytes. Shape: (number of samples,).
        budget (float): Limit on the cost of a batch, in the unit of ``costs``; positive and finite.
            No sample may cost more.
        rank (int | None): Rank of this process. Default: None, the rank in the default process
            group, else the variable ``RANK``, else 0.
        world_size (int | None): Number of ranks that share the order. Default: None, from the
            process group, else from ``WORLD_SIZE``, else 1.
        batch_size_max (int | None): Maximum number of samples per batch, 1 or more. Default: None,
            no limit.
        shuffle (bool): Use a random order in each epoch, drawn from ``seed`` and the epoch. False:
            in sequence. Default: True.
        seed (int): Seed of the orders, 0 or more, the same on all ranks. Default: 0.
        remainder (str): Handling of a last step with fewer samples than ranks: ``"pad"`` delivers
            some of them twice (:attr:`padded`), ``"drop"`` leaves them out (:attr:`dropped`).
            Default: ``"pad"``.

    Raises:
        ValueError: If an argument has an invalid value, or a sample costs more than ``budget``.

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
            raise ValueError(f"batch_size_max must be >= 1 or None, got {batch_size_max}")
        if remainder not in ("pad", "drop"):
            raise ValueError(f"remainder must be 'pad' or 'drop', got {remainder!r}")
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
        """Limit on the cost of a batch, in the unit of ``costs``."""
        return self._packing.budget

    @property
    def padded(self) -> list[int]:
        """Indices of the samples delivered twice in this epoch so far, over all ranks."""
        return list(self._padded)

    @property
    def dropped(self) -> list[int]:
        """Indices of the samples left out of the last epoch that was read to its end."""
        return list(self._dropped)

    def __len__(self) -> int:
        """Return the number of batches per rank in an epoch.

        The epoch is the last one started, or the one selected since by :meth:`set_epoch` or a
        state. The batches are made to count them, in time proportional to the epoch; the result is
        kept until the epoch changes.

        Returns:
            int: Number of batches.
        """
        epoch, past = self._place.epoch, self._place.past
        key = (epoch, tuple(past))
        if key not in self._lengths:
            begun = _CostPlace(epoch, past)
            count = sum(made_count for _, made_count in past)
            self._lengths = {key: count + sum(1 for _ in self._steps(begun))}
        return self._lengths[key]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the job in the epoch, for :meth:`load_state_dict` on any rank.

        Returns:
            dict[str, Any]: JSON-serializable.
        """
        steps = [*self._place.past, (self._packing, self._place.step_count)]
        return {
            "epoch": self._place.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sample_count": len(self._costs),
            "steps": [[*packing, count] for packing, count in steps if count > 0],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next iteration continues where it was taken.

        Up to that position, samples are divided as they were then.

        Args:
            state (dict[str, Any]): Result of :meth:`state_dict` of a sampler with the same costs,
                ``seed`` and ``shuffle``.

        Raises:
            ValueError: If the state has another seed, another ``shuffle`` or another number of
                samples.
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
        raise ValueError(f"costs must be one number per sample, got the shape {found.shape}")
    if not (math.isfinite(budget) and budget > 0):
        raise ValueError(f"budget must be positive and finite, got {budget}")
    wrong = np.flatnonzero(~(found > 0) | ~np.isfinite(found))
    if wrong.size:
        raise ValueError(
            f"costs must be positive and finite, got {found[wrong[0]]} for sample {wrong[0]}"
        )
    beyond = np.flatnonzero(found > budget)
    if beyond.size:
        raise ValueError(
            f"costs must be <= budget ({budget:g}), got {found[beyond[0]]:g} for sample "
            f"{beyond[0]} ({beyond.size} samples exceed it); raise budget, or leave them out"
        )
    return found
