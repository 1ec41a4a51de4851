# SPDX-License-Identifier: Apache-2.0
"""What the jobs of a pool have had since somebody began to watch, added up by job and rank, so that
it never shrinks when a trainer leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.live.pool_view import PoolView, TrainerView
from penstock.live.step_parts import STEP_PARTS

SERIES_MAX = 256  # pairs of a job and a rank; further ones count as OTHER
OTHER = "other"
JobRank = tuple[str, str]


@dataclass(slots=True)
class RankTotals:
    """``parts_s`` is by the part of a step; it stays empty for a trainer without a ledger."""

    batches: float = 0.0
    bytes: float = 0.0
    waited_s: float = 0.0
    hedged: float = 0.0
    steps: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)


class PoolTotals:
    """Confined to the thread that takes the statuses."""

    def __init__(self) -> None:
        self._totals: dict[JobRank, RankTotals] = {}
        self._last: dict[str, TrainerView] = {}

    def add(self, view: PoolView) -> None:
        """A trainer that is seen for the first time counts from its own beginning on."""
        for trainer in view.trainers:
            last = self._last.get(trainer.id)
            totals = self._totals.setdefault(self.key(trainer), RankTotals())
            before = 0 if last is None else last.delivered_batches
            new_batches = max(0, trainer.delivered_batches - before)
            totals.batches += new_batches
            totals.bytes += new_batches * (trainer.batch_bytes or 0)
            waited_before = 0.0 if last is None else last.waited_s
            totals.waited_s += max(0.0, trainer.waited_s - waited_before)
            hedged_before = 0 if last is None else last.hedged_batches
            totals.hedged += max(0, trainer.hedged_batches - hedged_before)
            if trainer.ledger is not None:
                new = trainer.ledger.since(None if last is None else last.ledger)
                totals.steps += new.steps
                for part in STEP_PARTS:
                    known = totals.parts_s.get(part.name, 0.0)
                    totals.parts_s[part.name] = known + new.seconds.get(part.name, 0.0)
        self._last = {trainer.id: trainer for trainer in view.trainers}

    def key(self, trainer: TrainerView) -> JobRank:
        """The labels under which this trainer is counted."""
        key = (trainer.job, str(trainer.rank))
        is_new = key not in self._totals
        return (OTHER, OTHER) if is_new and len(self._totals) >= SERIES_MAX else key

    def totals(self) -> Mapping[JobRank, RankTotals]:
        """Is changed by the next add()."""
        return self._totals
