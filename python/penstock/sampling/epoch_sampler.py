# SPDX-License-Identifier: Apache-2.0
"""Samplers whose order follows from a seed and the number of an epoch, and which have a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler

_T = TypeVar("_T")


class EpochPlace(Protocol):
    """Place of an iteration: the epoch, and a sampler's data about it."""

    epoch: int


_Place = TypeVar("_Place", bound=EpochPlace)


class EpochSampler(Sampler[_T], Generic[_T, _Place]):
    """Sampler whose iterations are successive epochs, from 0, unless a start place was given."""

    _place: _Place  # of the last iteration, or the start of the next one
    _is_to_begin: bool

    def __init__(self, shuffle: bool, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.shuffle = shuffle
        self.seed = seed
        self._begin_at(self._first_place(0))

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the first sample of ``epoch``.

        Args:
            epoch (int): Number of the epoch, from 0.
        """
        self._begin_at(self._first_place(epoch))

    def __iter__(self) -> Iterator[_T]:
        # A generator, which starts when its first item is requested: loaders call iter()
        # repeatedly.
        if not self._is_to_begin:
            self._place = self._first_place(self._place.epoch + 1)
        self._is_to_begin = False
        yield from self._rest(self._place)

    def _first_place(self, epoch: int) -> _Place:
        """Return the start of an epoch."""
        raise NotImplementedError

    def _rest(self, place: _Place) -> Iterator[_T]:
        """Yield the rest of the epoch after ``place``; moves the place along."""
        raise NotImplementedError

    def _begin_at(self, place: _Place) -> None:
        self._place = place
        self._is_to_begin = True

    def _shown_order(self) -> list[str]:
        """The arguments of the order with other values than the defaults, for ``repr()``."""
        parts = [] if self.shuffle else ["shuffle=False"]
        return [*parts, f"seed={self.seed}"] if self.seed != 0 else parts

    def _check_state(self, state: dict[str, Any], **mine: Any) -> None:
        """Raise ValueError for the state of a sampler that was constructed with other arguments."""
        for name, value in mine.items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state is of a {type(self).__name__} with {name} {state.get(name)!r}, but "
                    f"this one has {name} {value!r}; create it with the same arguments"
                )


def drawn_order(count: int, seed: int, place: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a permutation of ``count`` indices: int64, shape (count,).

    Seeds are derived by numpy's SeedSequence, and the permutation is drawn by ``torch.randperm``.
    """
    words = np.random.SeedSequence(seed, spawn_key=place).generate_state(2)
    generator = torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
    order: np.ndarray[Any, Any] = torch.randperm(count, generator=generator).numpy()
    return order
