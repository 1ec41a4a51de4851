# SPDX-License-Identifier: Apache-2.0
"""The places where the time of a training step goes, as a trainer's ledger names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepPart:
    """``name`` is the member of the ledger without its unit, ``title`` is for people."""

    name: str
    title: str
    meaning: str
    is_waiting: bool = True


STEP_PARTS = (
    StepPart("compute", "compute", "the program is at work between two batches", False),
    StepPart("dataset", "dataset", "waiting for samples to be read"),
    StepPart("collate", "collate", "waiting for samples to become a batch"),
    StepPart("prefix", "prefix", "waiting for the part of the model that workers run"),
    StepPart("worker", "free worker", "waiting for a worker to begin"),
    StepPart("wire", "wire", "waiting for bytes to arrive"),
    StepPart("device", "device copy", "waiting for the copy to the device"),
    StepPart("order", "order", "waiting for its turn while a later batch was here"),
    StepPart("ranks", "other ranks", "waiting for ranks that take the same steps"),
    StepPart("loader", "loader", "the loader's own work in the trainer", False),
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The seconds of each part, and of how many steps, since a trainer began."""

    steps: int
    seconds: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def since(self, before: Ledger | None) -> Ledger:
        """What came after ``before``; all of it if that is of another trainer, or of none."""
        if before is None or before.steps > self.steps:
            return self
        parts = {
            name: max(0.0, s - before.seconds.get(name, 0.0)) for name, s in self.seconds.items()
        }
        return Ledger(self.steps - before.steps, parts)

    def shares(self) -> dict[str, float]:
        """Of each part, its share of the whole; none of a ledger without time."""
        total = self.total_s
        return {name: s / total for name, s in self.seconds.items()} if total > 0 else {}


def ledger_of(trainer: Mapping[str, Any]) -> Ledger | None:
    """None for a trainer that reports none, or has not taken a step."""
    fields = trainer.get("ledger")
    if not isinstance(fields, dict) or not fields.get("steps"):
        return None
    parts = {part.name: float(fields.get(f"{part.name}_s") or 0.0) for part in STEP_PARTS}
    return Ledger(int(fields["steps"]), parts)
