# SPDX-License-Identifier: Apache-2.0
"""Which batches of an epoch are still to come, where batches may come out of turn.

The place of a batch is its number in the order of the sampler. With ``in_order=False`` a batch is
delivered before one with a lower place that its worker still makes. A resumed epoch asks for the
places that were left out first, from the lowest on, and then for all that follow. So a request's
number is its place again as soon as those have been asked for.
"""

from __future__ import annotations

from typing import NamedTuple


class PlacesLeft(NamedTuple):
    """The places in ``missing``, in their order, and all from ``through`` on."""

    through: int
    missing: tuple[int, ...] = ()

    @property
    def delivered_count(self) -> int:
        return self.through - len(self.missing)

    @property
    def first(self) -> int:
        """The lowest place that is left."""
        return self.missing[0] if self.missing else self.through

    def place_of(self, number: int) -> int:
        """The place of request ``number`` of an epoch that goes on here, where the first request
        has the number ``delivered_count``."""
        return number if number >= self.through else self.missing[number - self.delivered_count]

    def after(self, number: int) -> PlacesLeft:
        """The places that are left when all requests before ``number`` were answered."""
        missing = self.missing[number - self.delivered_count :]
        return PlacesLeft(max(self.through, number), missing)


class DeliveredPlaces:
    """Notes deliveries in any order. A place is left if it is in ``_missing``, or not before
    ``_through``.

    Those that were asked for and raised an error stay missing: the number of a batch that could not
    be made is not known here.
    """

    def __init__(self, resumed: PlacesLeft) -> None:
        self._resumed = resumed
        self._through = resumed.through
        self._missing = set(resumed.missing)

    def note(self, number: int) -> None:
        """Request ``number`` was answered with a batch, and the program has it."""
        place = self._resumed.place_of(number)
        self._missing.update(range(self._through, place))
        self._through = max(self._through, place + 1)
        self._missing.discard(place)

    def left(self) -> PlacesLeft:
        return PlacesLeft(self._through, tuple(sorted(self._missing)))
