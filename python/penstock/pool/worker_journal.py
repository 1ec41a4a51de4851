# SPDX-License-Identifier: Apache-2.0
"""The log of a pool's worker: the jobs that it serves, refuses and finishes, and why
it leaves. A line is left when something changes, and none for each batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.pool.pool_log import short_id

if TYPE_CHECKING:
    from penstock import _C

_NAME_CHARACTERS_MAX = 200  # of a job, which its trainer names


class _Service(NamedTuple):
    trainer_id: int
    job: str


class WorkerJournal:
    """Confined to the thread that makes batches."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._service: _Service | None = None
        self._batch_count = 0
        self._is_draining = False

    def note_batch(self, trainer_id: int, job: str) -> None:
        """Before a batch of this job is made for this trainer."""
        service = _Service(trainer_id, job)
        if service != self._service:
            self._finish()
            self._service, self._batch_count = service, 0
            self._say(f"serves {_spoken(service)}")
        self._batch_count += 1

    def note_refusal(self, trainer_id: int, reason: str) -> None:
        self._finish()
        self._say(f"refuses trainer {short_id(trainer_id)}: {reason}")

    def note_standing(self, standing: _C.PoolStanding) -> None:
        """To be called now and then."""
        if standing.drain_cause is not None and not self._is_draining:
            self._is_draining = True
            left = _batches(standing.left_count)
            self._say(f"draining after {standing.drain_cause}; {left} left")
        if self._service is not None and standing.trainer_id != self._service.trainer_id:
            self._finish()

    def note_end(self, reason: str) -> None:
        self._finish()
        self._say(f"ends: {reason}")

    def _finish(self) -> None:
        if self._service is None:
            return
        self._say(f"has finished {_spoken(self._service)}: {_batches(self._batch_count)}")
        self._service = None


def _spoken(service: _Service) -> str:
    name = service.job
    if len(name) > _NAME_CHARACTERS_MAX:
        name = f"{name[:_NAME_CHARACTERS_MAX]}..."
    return f"{name} of trainer {short_id(service.trainer_id)}"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count:,} batches"
