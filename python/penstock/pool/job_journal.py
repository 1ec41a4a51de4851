# SPDX-License-Identifier: Apache-2.0
"""Log lines of a pool worker about its jobs: started, refused and finished ones. Each change is one
line; batches are not logged. The server writes the other lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.pool.pool_log import short_id

_NAME_CHARACTERS_MAX = 200  # of a job's name, which its trainer chooses


class _Service(NamedTuple):
    trainer_id: int
    job: str


class JobJournal:
    """Confined to the thread that makes batches."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._service: _Service | None = None
        self._batch_count = 0

    def note_batch(self, trainer_id: int, job: str) -> None:
        """Call before a batch of this job is made for this trainer."""
        service = _Service(trainer_id, job)
        if service != self._service:
            self.finish()
            self._service, self._batch_count = service, 0
            self._say(f"serves {_spoken(service)}")
        self._batch_count += 1

    def note_refusal(self, trainer_id: int, reason: str) -> None:
        self.finish()
        self._say(f"refuses trainer {short_id(trainer_id)}: {reason}")

    def finish(self) -> None:
        """Call when no further batch of the job served last will follow."""
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
