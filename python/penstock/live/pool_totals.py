# SPDX-License-Identifier: Apache-2.0
"""What the jobs of a pool have had since somebody began to watch, added up by user, job and rank,
so that it never shrinks when a trainer leaves.

There is room for a number of them. Once it is taken, the user with most of them gives up one that
has ended, the one with the fewest batches, so that no user's jobs are lost for another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.live.pool_view import PoolView, TrainerView
from penstock.live.step_parts import STEP_PARTS

SERIES_MAX = 256  # users' jobs by rank; further ones count as OTHER


class SeriesKey(NamedTuple):
    """Whose numbers these are; the user is empty for those with the key of the role."""

    user: str
    job: str
    rank: str


OTHER = "other"
OTHERS = SeriesKey("", OTHER, OTHER)


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
        self._totals: dict[SeriesKey, RankTotals] = {}
        self._last: dict[str, TrainerView] = {}

    def add(self, view: PoolView) -> None:
        """A trainer that is seen for the first time counts from its own beginning on."""
        self._make_room(view)
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

    def key(self, trainer: TrainerView) -> SeriesKey:
        """The labels under which this trainer is counted."""
        key = _own_key(trainer)
        return key if key in self._totals or self._count < SERIES_MAX else OTHERS

    def totals(self) -> Mapping[SeriesKey, RankTotals]:
        """Is changed by the next add()."""
        return self._totals

    @property
    def _count(self) -> int:
        return len(self._totals) - (OTHERS in self._totals)

    def _make_room(self, view: PoolView) -> None:
        """Give those of the view that are new a place, as far as users with more have one to give.

        Of a user who has as many as any other, jobs that have ended make room alone.
        """
        present = dict.fromkeys(_own_key(trainer) for trainer in view.trainers)
        counts = Counter(key.user for key in self._totals if key != OTHERS)
        by_batches = sorted(
            (key for key in self._totals if key != OTHERS),
            key=lambda key: (key in present, self._totals[key].batches),
            reverse=True,
        )
        leaving: dict[str, list[SeriesKey]] = {}  # by user, those that go first last
        for key in by_batches:
            leaving.setdefault(key.user, []).append(key)
        seen: Counter[str] = Counter()
        turns: list[tuple[int, SeriesKey]] = []  # a user's second one after every user's first
        for key in present:
            turns.append((seen[key.user], key))
            seen[key.user] += 1
        for _, key in sorted(turns, key=lambda turn: turn[0]):
            if key in self._totals:
                continue
            if self._count >= SERIES_MAX:
                most, count = counts.most_common(1)[0]
                if counts[key.user] >= count:
                    most = key.user
                victims = leaving.get(most, [])
                if not victims or (most == key.user and victims[-1] in present):
                    continue
                del self._totals[victims.pop()]
                counts[most] -= 1
            self._totals[key] = RankTotals()
            counts[key.user] += 1


def _own_key(trainer: TrainerView) -> SeriesKey:
    return SeriesKey(trainer.user or "", trainer.job, str(trainer.rank))
