# SPDX-License-Identifier: Apache-2.0
"""Places in the order of an epoch: which batches are left, after deliveries in any order."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

# More missing places are written as bits, which take less than a list from here on.
LISTED_PLACES_MAX = 256


class PlacesLeft(NamedTuple):
    """The places in ``missing``, in their order, and all from ``through`` on."""

    through: int
    missing: tuple[int, ...] = ()

    @property
    def delivered_count(self) -> int:
        return self.through - len(self.missing)

    @property
    def first(self) -> int:
        """Return the lowest place that is left."""
        return self.missing[0] if self.missing else self.through

    def place_of(self, number: int) -> int:
        """Return the place of request ``number`` of an epoch that continues here, where the first
        request has the number ``delivered_count``."""
        return number if number >= self.through else self.missing[number - self.delivered_count]

    def after(self, number: int) -> PlacesLeft:
        """Return the places that are left when all requests before ``number`` were answered."""
        missing = self.missing[number - self.delivered_count :]
        return PlacesLeft(max(self.through, number), missing)


def places_to_json(places: tuple[int, ...]) -> Any:
    """Return ascending places in a form for JSON: a list, or a dictionary if there are many.

    The dictionary has the ``first`` place and ``bits``, base64 of bytes whose lowest bit comes
    first: bit n is set if ``first + n`` is among the places.
    """
    if len(places) <= LISTED_PLACES_MAX:
        return list(places)
    offsets = np.asarray(places, dtype=np.int64) - places[0]
    bits = np.zeros(int(offsets[-1]) + 1, dtype=np.uint8)
    bits[offsets] = 1
    packed = np.packbits(bits, bitorder="little").tobytes()
    return {"first": places[0], "bits": base64.b64encode(packed).decode()}


def places_from_json(value: Any) -> tuple[int, ...]:
    """Return the places. Raises ValueError for ``bits`` that are not base64."""
    if not isinstance(value, Mapping):
        return tuple(value)
    packed = np.frombuffer(base64.b64decode(value["bits"], validate=True), dtype=np.uint8)
    offsets = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    return tuple((offsets + value["first"]).tolist())


class DeliveredPlaces:
    """Notes deliveries in any order. A place is left if it is in ``_missing``, or not before
    ``_through``.

    Requests that raised an error stay missing: the number of a batch that could not be made is not
    known here.
    """

    def __init__(self, resumed: PlacesLeft) -> None:
        self._resumed = resumed
        self._through = resumed.through
        self._missing = set(resumed.missing)

    def note(self, number: int) -> None:
        """Note that request ``number`` was answered with a batch, and the program has it."""
        self.note_place(self._resumed.place_of(number))

    def note_place(self, place: int) -> None:
        """Note that the batch at ``place`` is not left."""
        self._missing.update(range(self._through, place))
        self._through = max(self._through, place + 1)
        self._missing.discard(place)

    def left(self) -> PlacesLeft:
        return PlacesLeft(self._through, tuple(sorted(self._missing)))
