# SPDX-License-Identifier: Apache-2.0
"""Indices of batches that are asked for out of turn after a resume: by another number than the
place in the epoch, from which the random numbers follow; or after others, made for nothing, which
bring a map-style dataset to the state that it had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.worker.fetching import BatchPlace


@dataclass(frozen=True, slots=True, repr=False)
class OutOfTurn:
    """Takes the place of the indices in a request."""

    indices: Any
    place: int

    def __repr__(self) -> str:
        """As the indices: a message about a batch that is late shows them."""
        return repr(self.indices)


@dataclass(frozen=True, slots=True, repr=False)
class AfterOthers:
    """Takes the place of the indices in the first request to a worker."""

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
    """Makes the batches that come before, if there are some, and returns the indices."""
    if type(indices) is not AfterOthers:
        return indices
    for others, number, first_place in indices.others:
        begin()
        try:
            fetch(others, BatchPlace(number, place.shard_id, first_place))
        except Exception:
            pass  # it was raised before the state was taken
    begin()
    return indices.indices


def in_its_place(indices: Any, place: BatchPlace) -> tuple[Any, BatchPlace]:
    """The indices themselves, and where their batch belongs."""
    if type(indices) is not OutOfTurn:
        return indices, place
    return indices.indices, place._replace(sequence=indices.place)
