# SPDX-License-Identifier: Apache-2.0
"""A random generator of its own for every sample, for datasets whose ``__getitem__`` takes one.

With ``seeding="batch"`` a dataset written as ``__getitem__(self, index, generator=None)`` is given
a ``torch.Generator`` that is seeded by the sample's place in its batch and by the batch's place in
the epoch, so its draws do not depend on the threads and processes that fetch. With
``seeding="sample"`` it is seeded by the sample's place in the order of the epoch, and so are the
global generators, for any dataset.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset

from penstock.program_line import warn
from penstock.stream.batch_seeds import EpochSeeds, SampleSeed


def below_subsets(dataset: Any) -> Any:
    """The dataset that Subsets of torch's select from, itself where there are none."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def selected(dataset: Any, index: Any) -> tuple[Any, Any]:
    """The dataset below Subsets of torch's, and what its index is there."""
    while type(dataset) is Subset:
        index = dataset.indices[index]
        dataset = dataset.dataset
    return dataset, index


def accepts_generator(dataset: Any) -> bool:
    """Whether a map-style dataset, or the one that Subsets of torch's select from, takes one.

    Never with ``__getitems__``, which is asked for whole batches.
    """
    dataset = below_subsets(dataset)
    if hasattr(dataset, "__getitems__"):
        return False
    try:
        parameter = inspect.signature(dataset.__getitem__).parameters.get("generator")
    except (AttributeError, TypeError, ValueError):  # no method, or none that tells
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


class PlacedIndex(NamedTuple):
    """The index of a sample and its place, in its batch or in the order of the epoch."""

    place: int
    index: Any

    def __repr__(self) -> str:  # which names the sample in messages about it
        return repr(self.index)


class PlacedSamples:
    """The dataset with generators that are seeded by the places of its samples.

    A dataset that takes ``generator`` is given one for each sample. With ``seeds_globals`` the
    global generators are seeded for each sample, too, by sample; where samples of one batch are
    fetched on several threads, these share them. Indexed by results of :meth:`placed`. Samples of
    one batch may be fetched on several threads; batches come one after the other.
    """

    def __init__(self, dataset: Any, seeds: EpochSeeds, seeds_globals: bool) -> None:
        self._dataset = dataset
        self._seeds = seeds
        self._seeds_globals = seeds_globals
        self._takes_generator = accepts_generator(dataset)
        self._sequence = 0

    def placed(self, indices: Any, sequence: int, first_place: int, is_batch: bool) -> Any:
        """The indices of a batch, or the one index where there are no batches, with places."""
        self._sequence = sequence
        first = first_place if self._seeds.by_sample else 0
        if not is_batch:
            return PlacedIndex(first, indices)
        return [PlacedIndex(place, index) for place, index in enumerate(indices, first)]

    def __getitem__(self, placed: PlacedIndex) -> Any:
        place, index = placed
        if self._seeds_globals:
            self._seeds.seed_generators_at(place, SampleSeed.GLOBALS)
        dataset, index = selected(self._dataset, index)
        if not self._takes_generator:
            return dataset[index]
        if self._seeds.by_sample:
            seed = self._seeds.seed_at(place, SampleSeed.GENERATOR)
        else:
            seed = self._seeds.seed_of_sample(self._sequence, place)
        return dataset.__getitem__(index, generator=torch.Generator().manual_seed(seed))


class DrawWarning:
    """Says once, for a loader, that threads made draws that ``seeding="batch"`` should repeat."""

    def __init__(self) -> None:
        self._was_given = False

    def give(self, fetch_threads: int) -> None:
        if self._was_given:
            return
        self._was_given = True
        warn(
            f"samples drew from the global random generators while they were fetched on "
            f"{fetch_threads} threads, so seeding='batch' cannot make them reproducible; draw from "
            f"the torch.Generator that a dataset with __getitem__(self, index, generator=None) is "
            f"given, or set fetch_threads=1",
            UserWarning,
        )
