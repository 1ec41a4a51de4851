# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to a batch or a sample and not to the process that makes it.

With ``seeding="batch"`` the global generators of torch, random and numpy are seeded before each
batch from the epoch's base seed, the number of the epoch and the place of the batch in it; with
``seeding="sample"`` before each sample, from its place in the order of the epoch. Seeds
are derived by numpy's SeedSequence, whose streams are fixed across versions and platforms
(https://numpy.org/doc/stable/reference/random/bit_generators/generated/numpy.random.SeedSequence.html).
"""

from __future__ import annotations

import enum
import random
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch


class SampleSeed(enum.IntEnum):
    """The use of a sample's seed. A batch that is collated is the sample of its first place."""

    GLOBALS = 0  # torch's default generator, and those of random and numpy
    GENERATOR = 1  # the generator that is handed to the dataset
    COLLATE = 2  # as GLOBALS, while the samples are collated


class EpochSeeds(NamedTuple):
    """The seeds that the random numbers of one epoch follow from. Picklable."""

    base_seed: int
    epoch: int  # counts the loader's iter() calls, from 0
    by_sample: bool = False  # each sample has seeds of its own, whatever batch it is in

    def seed_generators(self, *place: int) -> None:
        """Seeds the global generators of torch, random and numpy for one place in the epoch.

        ``place`` is the batch's number for a map-style dataset; for an iterable one the shard and
        the batch's number in it from 1, where 0 stands for the call of ``iter(dataset)``.
        """
        self._seed_generators(self._words(8, place))

    def seed_generators_at(self, order_place: int, which: SampleSeed) -> None:
        """By sample: as :meth:`seed_generators`, for one place in the order of the epoch."""
        self._seed_generators(self._words(8, (order_place, which)))

    def seed_at(self, order_place: int, which: SampleSeed) -> int:
        """By sample: a seed for one place in the order of the epoch: 64 bits."""
        words = self._words(2, (order_place, which))
        return int(words[0]) << 32 | int(words[1])

    def _seed_generators(self, words: Any) -> None:
        torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
        random.seed(int(words[2]) << 32 | int(words[3]))
        np.random.seed(words[4:])

    def seed_of_sample(self, sequence: int, place: int) -> int:
        """The seed of one sample of a map-style dataset: 64 bits."""
        words = self._words(2, (sequence, place))
        return int(words[0]) << 32 | int(words[1])

    def seed_of_draws(self) -> int:
        """The seed of an offloaded model's draws in this epoch: 64 bits."""
        words = self._words(2, ())
        return int(words[0]) << 32 | int(words[1])

    def _words(self, count: int, place: tuple[int, ...]) -> Any:
        sequence = np.random.SeedSequence(self.base_seed, spawn_key=(self.epoch, *place))
        return sequence.generate_state(count)


def draw_seed(generator: torch.Generator | None) -> int:
    """The draws of torch's loader and its RandomSampler, from torch's default generator if None."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def generator_states() -> tuple[Any, ...]:
    """The states of the global generators, to be compared or put back."""
    return (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))


def put_back(states: tuple[Any, ...]) -> None:
    """Puts the global generators back to their states at :func:`generator_states`."""
    of_torch, of_random, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_random)
    np.random.set_state(of_numpy)


def have_moved(states: tuple[Any, ...]) -> bool:
    """Whether something was drawn since :func:`generator_states`."""
    of_torch, of_random, of_numpy = states
    return (
        not torch.equal(of_torch, torch.get_rng_state())
        or of_random != random.getstate()
        or not _is_same(of_numpy, np.random.get_state(legacy=False))
    )


def _is_same(some: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are the same, of whichever kind it is."""
    if isinstance(some, dict) and isinstance(other, dict):
        names = some.keys()
        return names == other.keys() and all(_is_same(some[name], other[name]) for name in names)
    return np.array_equal(some, other)


class GeneratorsKept:
    """Puts the global generators back as they were, whatever was drawn or raised meanwhile."""

    def __enter__(self) -> None:
        self._states = generator_states()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        put_back(self._states)
