# SPDX-License-Identifier: Apache-2.0
"""Indices of batches that are requested out of turn after a resume: with a number other than the
position in the epoch that determines the random numbers; or after other batches, made and
discarded, that bring a map-style dataset to its earlier state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.worker.fetching import BatchPlace


@dataclass(frozen=True, slots=True, repr=False)
class OutOfTurn:
    """Replaces the indices in a request."""

    indices: Any
    place: int

    def __repr__(self) -> str:
        """Return the repr of the indices, which a message about a late batch shows."""
        return repr(self.indices)


@dataclass(frozen=True, slots=True, repr=False)
class AfterOthers:
    """Replaces the indices in the first request to a worker."""

    indices: Any
    others: tuple[tuple[Any, int, int], ...]  # indices, number and first place of each

    def __repr__(self) -> str:
        return repr(self.indices)


def make_others(
    indices: Any,
    place: BatchPlace,
    fetch: Callable[[Any, BatchPlace], Any],
    begin: Callable[[], None],
) -> Any:
    """Make the preceding batches, if there are any, and return the indices."""
    if type(indices) is not AfterOthers:
        return indices
    for others, number, first_place in indices.others:
        begin()
        try:
            fetch(others, BatchPlace(number, place.shard_id, first_place))
        except Exception:
            pass  # it was also raised before the state was taken
    begin()
    return indices.indices


def in_its_place(indices: Any, place: BatchPlace) -> tuple[Any, BatchPlace]:
    """Return the indices themselves, and the position of their batch."""
    if type(indices) is not OutOfTurn:
        return indices, place
    return indices.indices, place._replace(sequence=indices.place)
