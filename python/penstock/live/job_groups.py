# SPDX-License-Identifier: Apache-2.0
"""The jobs of a pool with their ranks: a job of several ranks is as many trainers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.live.pool_view import PoolView, TrainerView


@dataclass(frozen=True, slots=True)
class JobGroup:
    """``id`` is that of the group, or of the one trainer. Ranks are in order."""

    id: str
    ranks: tuple[TrainerView, ...]

    @property
    def has_ranks(self) -> bool:
        return self.ranks[0].world_size > 1

    @property
    def title(self) -> str:
        first = self.ranks[0]
        if not self.has_ranks:
            return first.job
        seen = len(self.ranks)
        count = f"{first.world_size} ranks"
        return f"{first.job}, {count if seen == first.world_size else f'{seen} of {count}'}"

    def total(self, name: str) -> float | None:
        """The sum over the ranks that know it; None where none does."""
        known = [getattr(rank, name) for rank in self.ranks]
        known = [value for value in known if value is not None]
        return sum(known) if known else None

    def waited_share(self) -> float | None:
        """Of the rank that waits most: the others wait for it in their turn."""
        return max((r.waited_share for r in self.ranks if r.waited_share is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        first = self.ranks[0]
        return {
            "id": self.id,
            "job": first.job,
            "user": first.user,
            "world_size": first.world_size,
            "ranks": [rank.id for rank in self.ranks],
            "workers": self.total("workers"),
            "batches_per_s": self.total("batches_per_s"),
            "bytes_per_s": self.total("bytes_per_s"),
            "waited_share_max": self.waited_share(),
            "delivered_batches": self.total("delivered_batches"),
        }


def job_groups(view: PoolView) -> Sequence[JobGroup]:
    """In the order in which the controller names their first ranks."""
    by_id: dict[str, list[TrainerView]] = {}
    for trainer in view.trainers:
        by_id.setdefault(trainer.group or trainer.id, []).append(trainer)
    return [
        JobGroup(identity, tuple(sorted(ranks, key=lambda rank: rank.rank)))
        for identity, ranks in by_id.items()
    ]
