# SPDX-License-Identifier: Apache-2.0
"""Indices of a batch that is asked for out of turn: after a resume, by another number than its
place in the epoch, from which its random numbers follow."""

from __future__ import annotations

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


def in_its_place(indices: Any, place: BatchPlace) -> tuple[Any, BatchPlace]:
    """The indices themselves, and where their batch belongs."""
    if type(indices) is not OutOfTurn:
        return indices, place
    return indices.indices, place._replace(sequence=indices.place)
