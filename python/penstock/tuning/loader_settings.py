# SPDX-License-Identifier: Apache-2.0
"""The options of a loader that its speed depends on and its batches do not, or not all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """As a loader has them. ``seeding`` and ``in_order`` change the random numbers of samples or
    the order of batches; the others leave the batches of a map-style dataset alone."""

    num_workers: int = 0
    fetch_threads: int = 1
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    in_order: bool = True
    seeding: str | None = None
    offload: bool = False  # whether penstock.offload has moved a part of the model

    @property
    def ahead(self) -> int:
        """The batches that are asked for ahead."""
        return self.num_workers * self.prefetch_factor

    def changes_from(self, before: LoaderSettings) -> dict[str, Any]:
        """The options, ``offload`` apart, whose values differ from those of ``before``, and without
        which the new values could not be."""
        changed = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name != "offload" and getattr(self, one.name) != getattr(before, one.name)
        }
        if "num_workers" in changed and before.num_workers == 0:
            changed["prefetch_factor"] = self.prefetch_factor  # torch's is none without workers
        return changed

    def spoken_changes_from(self, before: LoaderSettings) -> str:
        """In words of code: ``num_workers=2, prefetch_factor=4``."""
        words = [f"{name}={value!r}" for name, value in self.changes_from(before).items()]
        if self.offload and not before.offload:
            words.append("penstock.offload(model, loader)")
        return ", ".join(words) or "as it is"

    @staticmethod
    def of(values: Mapping[str, Any]) -> LoaderSettings:
        """Of attributes as a loader has them, where ``prefetch_factor`` may be None."""
        given = {
            one.name: values[one.name]
            for one in fields(LoaderSettings)
            if values.get(one.name) is not None
        }
        return LoaderSettings(**given)
