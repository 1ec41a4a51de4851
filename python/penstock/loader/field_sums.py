# SPDX-License-Identifier: Apache-2.0
"""Records of totals that are added up, and taken one from another, field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

Totals = TypeVar("Totals", bound="FieldSums")


class FieldSums:
    """A base for dataclasses whose fields can all be added and taken from each other."""

    __slots__ = ()

    def __add__(self: Totals, other: Totals) -> Totals:
        """What both counted, of two loaders or of two windows."""
        return type(self)(*(mine + theirs for mine, theirs in _pairs(self, other)))

    def __sub__(self: Totals, before: Totals) -> Totals:
        """What was counted since ``before``, which was taken earlier of the same."""
        return type(self)(*(mine - theirs for mine, theirs in _pairs(self, before)))


def _pairs(first: Any, second: Any) -> list[tuple[Any, Any]]:
    return [(getattr(first, one.name), getattr(second, one.name)) for one in fields(first)]
