# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to a batch or a sample and not to the process that makes it.

With ``seeding="batch"`` the global generators of torch, random and numpy are seeded before each
batch from the epoch's base seed, the number of the epoch and the place of the batch in it; with
``seeding="sample"`` before each sample, from its place in the order of the epoch. Seeds are derived
by numpy's SeedSequence, whose streams are fixed across versions and platforms
(https://numpy.org/doc/stable/reference/random/bit_generators/generated/numpy.random.SeedSequence.html).

A dataset written as ``__getitem__(self, index, generator=None)`` gets a separate
``torch.Generator`` for every sample. With ``seeding="batch"`` it is seeded by the sample's place in
its batch and by the batch's place in the epoch, so its draws do not depend on the threads and
processes that fetch.

Code that draws more than torch's program would, such as a second run of a model's code, runs in a
context that restores the generators (:class:`GeneratorsKept`, :class:`AllGeneratorsKept`).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import inspect
import random
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from penstock.compat.devices import module_in_use
from penstock.program_line import warn
from penstock.ranks.sharding import has_places

_MT19937_BYTES = 624 * 4 + 4  # its words and the place in them


class SampleSeed(enum.IntEnum):
    """Use of a sample's seed. A batch that is collated counts as the sample of its first place."""

    GLOBALS = 0  # torch's default generator, and the generators of random and numpy
    GENERATOR = 1  # the generator passed to the dataset
    COLLATE = 2  # as GLOBALS, while the samples are collated


class EpochSeeds(NamedTuple):
    """Seeds that the random numbers of one epoch follow from. Picklable."""

    base_seed: int
    epoch: int  # counts the loader's iter() calls, from 0
    by_sample: bool = False  # each sample has separate seeds, in any batch

    def seed_generators(self, *place: int) -> None:
        """Seed the global generators of torch, random and numpy for one place in the epoch.

        ``place`` is the batch's number for a map-style dataset; for an iterable one the shard and
        the batch's number in it from 1, where 0 stands for the call of ``iter(dataset)``.
        """
        self._seed_generators(self._words(8, place))

    def seed_generators_at(self, order_place: int, which: SampleSeed) -> None:
        """Seed by sample: as :meth:`seed_generators`, for one place in the order of the epoch."""
        self._seed_generators(self._words(8, (order_place, which)))

    def seed_at(self, order_place: int, which: SampleSeed) -> int:
        """Return the 64-bit seed of one place in the order of the epoch, for seeding by sample."""
        words = self._words(2, (order_place, which))
        return int(words[0]) << 32 | int(words[1])

    def _seed_generators(self, words: Any) -> None:
        torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
        random.seed(int(words[2]) << 32 | int(words[3]))
        np.random.seed(words[4:])

    def seed_of_sample(self, sequence: int, place: int) -> int:
        """Return the 64-bit seed of one sample of a map-style dataset."""
        words = self._words(2, (sequence, place))
        return int(words[0]) << 32 | int(words[1])

    def seed_of_draws(self) -> int:
        """Return the 64-bit seed of an offloaded model's draws in this epoch."""
        words = self._words(2, ())
        return int(words[0]) << 32 | int(words[1])

    def _words(self, count: int, place: tuple[int, ...]) -> Any:
        sequence = np.random.SeedSequence(self.base_seed, spawn_key=(self.epoch, *place))
        return sequence.generate_state(count)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw as torch's loader and its RandomSampler do; with None, from torch's default
    generator."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators, for comparing or restoring."""
    return (torch.get_rng_state(), random.getstate(), _numpy_state())


def restore(states: tuple[Any, ...]) -> None:
    """Restore the global generators to their states at :func:`generator_states`."""
    of_torch, of_random, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_random)
    np.random.set_state(of_numpy)


def have_moved(states: tuple[Any, ...]) -> bool:
    """Return whether numbers were drawn since :func:`generator_states`."""
    return _differ(states, _numpy_state)


def _differ(states: tuple[Any, ...], numpy_state: Callable[[], Any]) -> bool:
    """Return whether the global generators have other states; ``numpy_state()`` returns numpy's in
    the form that ``states`` has."""
    of_torch, of_random, of_numpy = states
    return (
        not torch.equal(of_torch, torch.get_rng_state())
        or of_random != random.getstate()
        or not _is_same(of_numpy, numpy_state())
    )


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)


def _is_same(some: Any, other: Any) -> bool:
    """Return whether two states of numpy's generator are equal, for any kind of generator."""
    if isinstance(some, bytes) and isinstance(other, bytes):
        return some == other
    if isinstance(some, dict) and isinstance(other, dict):
        if some.keys() != other.keys():
            return False
        return all(_is_same(some[name], other[name]) for name in some)
    return np.array_equal(some, other)


class SeededWatch:
    """Notices draws from the global generators after they were seeded.

    It costs a third of :func:`have_moved`. numpy copies the state of its generator word by word, so
    it is read where it lies (``BitGenerator.ctypes``). The normal number that numpy may have in
    reserve is not part of that, but seeding leaves none.
    """

    def __init__(self) -> None:
        self._states = torch.get_rng_state(), random.getstate(), _numpy_words()

    def has_drawn(self) -> bool:
        return _differ(self._states, _numpy_words)


def _numpy_words() -> Any:
    """Return the state of numpy's global generator without a normal number in reserve."""
    get_bit_generator = getattr(np.random, "get_bit_generator", None)  # from numpy 1.24 on
    bits = None if get_bit_generator is None else get_bit_generator()
    if type(bits) is not np.random.MT19937:
        return _numpy_state()
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


class GeneratorsKept:
    """Restores the global generators after any draws and exceptions."""

    def __enter__(self) -> None:
        self._states = generator_states()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        restore(self._states)


class AllGeneratorsKept(GeneratorsKept):
    """Restores the global generators: torch's, including its devices', Python's and NumPy's."""

    def __enter__(self) -> None:
        super().__enter__()
        self._of_devices = device_states()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore their states at the start of the block; may be called after its end."""
        super().__exit__(None, None, None)
        if self._of_devices:
            module = module_in_use()
            assert module is not None
            module.set_rng_state_all(self._of_devices)


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's generators, including its devices' generators."""
    return [torch.get_rng_state(), *device_states()]


def device_states() -> list[Any]:
    module = module_in_use()
    return [] if module is None else list(module.get_rng_state_all())


def below_subsets(dataset: Any) -> Any:
    """Return the dataset that torch's Subsets select from, or the dataset itself without any."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def selected(dataset: Any, index: Any) -> tuple[Any, Any]:
    """Return the dataset below torch's Subsets, and its index there."""
    while type(dataset) is Subset:
        index = dataset.indices[index]
        dataset = dataset.dataset
    return dataset, index


def accepts_generator(dataset: Any) -> bool:
    """Return whether a map-style dataset, also below torch's Subsets, accepts a generator.

    Never with ``__getitems__``, which gets whole batches.
    """
    dataset = below_subsets(dataset)
    if hasattr(dataset, "__getitems__"):
        return False
    try:
        parameter = inspect.signature(dataset.__getitem__).parameters.get("generator")
    except (AttributeError, TypeError, ValueError):  # no method, or one without a signature
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


class PlacedIndex(NamedTuple):
    """Index of a sample and its place, in its batch or in the order of the epoch."""

    place: int
    index: Any
    sequence: int  # of its batch

    def __repr__(self) -> str:  # messages about the sample name the index
        return repr(self.index)


class PlacedSamples:
    """Dataset with generators that are seeded by the places of its samples.

    A dataset that takes ``generator`` gets one for each sample. With ``seeds_globals`` the global
    generators are seeded for each sample, too, by sample; if samples are fetched on several
    threads, these share them. Indexed by results of :meth:`placed`, on any threads.
    """

    def __init__(self, dataset: Any, seeds: EpochSeeds, seeds_globals: bool) -> None:
        self._dataset = dataset
        self._seeds = seeds
        self._seeds_globals = seeds_globals
        self._takes_generator = accepts_generator(dataset)

    def placed(self, indices: Any, sequence: int, first_place: int, is_batch: bool) -> Any:
        """Return the indices of a batch, or the one index if there are no batches, with places."""
        first = first_place if self._seeds.by_sample else 0
        if not is_batch:
            return PlacedIndex(first, indices, sequence)
        if has_places(indices):
            return [PlacedIndex(index.place, int(index), sequence) for index in indices]
        return [PlacedIndex(place, index, sequence) for place, index in enumerate(indices, first)]

    @contextlib.contextmanager
    def globals_unseeded(self) -> Iterator[None]:
        """Leave the global generators alone, for samples that do not use them."""
        seeds_globals, self._seeds_globals = self._seeds_globals, False
        try:
            yield
        finally:
            self._seeds_globals = seeds_globals

    def seed_globals_of(self, placed: PlacedIndex) -> None:
        """Seed the global generators as the sample does, if they are seeded for each sample."""
        if self._seeds_globals:
            self._seeds.seed_generators_at(placed.place, SampleSeed.GLOBALS)

    def __getitem__(self, placed: PlacedIndex) -> Any:
        self.seed_globals_of(placed)
        dataset, index = selected(self._dataset, placed.index)
        if not self._takes_generator:
            return dataset[index]
        if self._seeds.by_sample:
            seed = self._seeds.seed_at(placed.place, SampleSeed.GENERATOR)
        else:
            seed = self._seeds.seed_of_sample(placed.sequence, placed.place)
        return dataset.__getitem__(index, generator=torch.Generator().manual_seed(seed))


class DrawWarning:
    """Warns once per loader that threads made draws that ``seeding="batch"`` should repeat."""

    def __init__(self) -> None:
        self._was_given = False

    def give(self, fetch_threads: int) -> None:
        if self._was_given:
            return
        self._was_given = True
        warn(
            f"samples drew from the global random generators while they were fetched on "
            f"{fetch_threads} threads, so seeding='batch' cannot make them reproducible; draw from "
            f"the torch.Generator that penstock passes to a dataset with "
            f"__getitem__(self, index, generator=None), or set fetch_threads=1",
            UserWarning,
        )
