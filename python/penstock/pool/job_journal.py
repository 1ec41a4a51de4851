# SPDX-License-Identifier: Apache-2.0
"""The lines about jobs in the log of a pool's worker: which it serves, refuses and has finished. A
line is left when something changes, and none for each batch. The server writes the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.pool.pool_log import short_id

_NAME_CHARACTERS_MAX = 200  # of a job, which its trainer names


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
        """Before a batch of this job is made for this trainer."""
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
        """No batch of the job that was served last follows."""
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
