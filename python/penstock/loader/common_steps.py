# SPDX-License-Identifier: Apache-2.0
"""The steps of an iterator that all ranks take together, where none knows how many it will have.

With ``shard_by_rank`` and an iterable dataset an epoch ends, on all ranks, before the first step
that some rank has no batch for (``remainder="drop"``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.errors import RankError, UnsupportedError
from penstock.loader import job_store
from penstock.loader.agreed_steps import Announcement, EpochEnd
from penstock.loader.lookahead import Ready
from penstock.loader.step_agreement import StepAgreement
from penstock.program_line import warn

_WARN_AFTER_S = 30.0
_LOOK_S = 0.05  # one wait for a batch of this rank, until it looks whether others have ended


# Waits for a batch for so many seconds. The second number is how long next() has waited for it.
Look = Callable[[float, float], Ready]


class CommonSteps:
    """Of one iterator. Confined to the trainer's thread."""

    def __init__(self, agreement: StepAgreement) -> None:
        self._agreement = agreement
        self._epoch: int | None = None  # its number, once it is read
        self._given_count = 0
        self._is_over = False

    def take_turn(self, look: Look) -> bool:
        """Whether the next step is one that all ranks take; False at the end of the epoch, and ever
        after.

        Returns at once where that is known. Waits otherwise, for ``job_store.WAIT_S_MAX`` at most,
        and raises RankError then.
        """
        if self._is_over:
            return False
        if self._epoch is None:  # not by iter(): an iterator may be dropped before it is read
            self._epoch = self._agreement.begin()
        elif self._epoch != self._agreement.epoch:
            raise UnsupportedError(
                "next() was called on an iterator after another one of the same loader was begun, "
                "and the ranks agree on the steps of one at a time; make another loader for it"
            )
        step = self._given_count
        ready = look(0.0, 0.0)
        is_taken = self._is_taken(step, ready)
        if is_taken is None:
            is_taken, ready = self._wait(step, ready, look)
        if is_taken:
            self._given_count += 1
        else:
            self._is_over = True
            self._note_end(step, ready)
        return is_taken

    def _is_taken(self, step: int, ready: Ready) -> bool | None:
        sure_count = step + ready.batch_count
        self._agreement.announce(sure_count, sure_count if ready.is_all else None)
        return True if ready.raises else self._agreement.is_taken(step)

    def _wait(self, step: int, ready: Ready, look: Look) -> tuple[bool, Ready]:
        began_at = time.monotonic()
        is_told = False
        while True:
            waited_s = time.monotonic() - began_at
            if ready.batch_count == 0 and not ready.is_all:
                ready = look(_LOOK_S, waited_s)
            else:
                self._agreement.wait(step, min(1.0, job_store.WAIT_S_MAX))
            is_taken = self._is_taken(step, ready)
            if is_taken is not None:
                return is_taken, ready
            waited_s = time.monotonic() - began_at
            if waited_s > job_store.WAIT_S_MAX and ready != Ready(0, False):
                raise RankError(
                    f"{self._spoken(step)}, for {waited_s:.0f} s; every rank has to read its "
                    f"loader: see whether these ranks live, and what they do"
                )
            if waited_s > _WARN_AFTER_S and not is_told and ready != Ready(0, False):
                is_told = True
                warn(f"{self._spoken(step)}, for {job_store.WAIT_S_MAX:.0f} s at most")

    def _spoken(self, step: int) -> str:
        """Who waits for whom, in words."""
        late = self._agreement.late_ranks(step)
        late.pop(self._agreement.job.rank, None)
        spoken = ", ".join(_spoken_rank(rank, word) for rank, word in list(late.items())[:8])
        rank, world_size = self._agreement.job
        return (
            f"rank {rank} of {world_size} waits for {spoken or 'the agreement of rank 0'} to have "
            f"a batch for step {step} of the epoch, or no more"
        )

    def _note_end(self, step: int, ready: Ready) -> None:
        agreed = self._agreement.end()
        self._agreement.epoch_end = EpochEnd(
            step, agreed.ended_rank, ready.batch_count, not ready.is_all
        )


def _spoken_rank(rank: int, word: Announcement | None) -> str:
    if word is None:
        return f"rank {rank}, which has announced nothing,"
    return f"rank {rank}, which is at batch {word.ready_count},"
