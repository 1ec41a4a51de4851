# SPDX-License-Identifier: Apache-2.0
"""How many steps all ranks can take together, decided from what each rank has announced.

A rank whose dataset is a stream does not know how many batches it will have. It announces how many
it is sure of, and their total once it has met its end. A step is taken by all ranks or by none: it
is agreed once every rank is sure of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_UNKNOWN = -1


class Announcement(NamedTuple):
    """The word of one rank about its epoch. Its numbers never become less."""

    ready_count: int = 0  # batches that were given or are ready, from the beginning of the epoch
    total: int | None = None  # of its batches, once their end is known
    has_left: bool = False  # it stopped reading the epoch before its end

    def to_text(self) -> str:
        total = _UNKNOWN if self.total is None else self.total
        return f"{self.ready_count} {total} {int(self.has_left)}"

    @staticmethod
    def from_text(text: str | bytes) -> Announcement:
        ready_count, total, has_left = map(int, text.split())
        return Announcement(ready_count, None if total == _UNKNOWN else total, bool(has_left))


class AgreedSteps(NamedTuple):
    """What follows from the words of all ranks."""

    step_count: int = 0  # every rank is sure of its batch in so many steps
    end: int | None = None  # no rank takes more steps, once that is known
    ended_rank: int | None = None  # the rank whose batches end there
    left_rank: int | None = None  # a rank that stopped before the end

    def to_text(self) -> str:
        return " ".join(str(_UNKNOWN if value is None else value) for value in self)

    @staticmethod
    def from_text(text: str | bytes) -> AgreedSteps:
        step_count, *rest = map(int, text.split())
        return AgreedSteps(step_count, *(None if value == _UNKNOWN else value for value in rest))

    def is_taken(self, step: int) -> bool | None:
        """Whether all ranks take step number ``step``; None while that is not known."""
        if step < self.step_count:
            return True
        return False if self.end is not None and step >= self.end else None


def agree(announcements: Sequence[Announcement]) -> AgreedSteps:
    """The agreement of the ranks that have announced this, by rank."""
    totals = {rank: one.total for rank, one in enumerate(announcements) if one.total is not None}
    ended_rank = min(totals, key=lambda rank: totals[rank], default=None)
    left = [rank for rank, one in enumerate(announcements) if one.has_left]
    return AgreedSteps(
        step_count=min(one.ready_count for one in announcements),
        end=None if ended_rank is None else totals[ended_rank],
        ended_rank=ended_rank,
        left_rank=left[0] if left else None,
    )


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """How an epoch ended that all ranks end together, as one rank sees it.

    ``step_count`` steps were taken since this ``iter()``, and ``ended_rank`` had no batch for
    another. Of this rank, ``dropped_batches`` were ready then and were not given. If ``has_more``,
    its workers had not come to the end of its shards, so further samples were never read, and
    nobody has counted them.
    """

    step_count: int
    ended_rank: int | None
    dropped_batches: int
    has_more: bool

    def __str__(self) -> str:
        more = " and more was not read" if self.has_more else ""
        return (
            f"the epoch ended after {self.step_count} steps, with the batches of rank "
            f"{self.ended_rank}; {self.dropped_batches} batches of this rank were ready and are "
            f"dropped{more}"
        )
