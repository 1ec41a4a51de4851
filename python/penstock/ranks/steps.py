# SPDX-License-Identifier: Apache-2.0
"""The steps that all ranks of a job take together, if no rank knows its number of steps.

With ``ranks`` and an iterable dataset an epoch ends, on all ranks, before the first step
that some rank has no batch for (``remainder="drop"``). Each rank announces how many batches it is
sure of, and their total once it has met its end. A step is agreed once every rank is sure of its
batch (:func:`agree`).

The ranks agree through the job's store, ahead of time. A thread writes its rank's announcement to
the store when it has changed, and looks there for the agreement. The thread of rank 0 reads all
announcements with one request, and writes the agreement under one key, which the threads of the
other ranks read. So a step costs no collective, and a rank's trainer waits only for a step that
another rank is not sure of yet.

The thread's connection to the store is not the trainer's: a client of torch's store does one
request at a time, and the trainer, or a collective, may be in a long wait with the first. The
thread connects by itself, since that may take a while.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import RankError, UnsupportedError
from penstock.program_line import warn
from penstock.ranks import job_store
from penstock.ranks.sharding import JobRank

_WARN_AFTER_S = 30.0
_POLL_READY_S = 0.05  # one wait for a batch of this rank, until it checks whether others have ended
_REQUESTS_PER_S_MAX = 20_000  # of all ranks together, while all of them wait
_POLL_S_MIN = 0.001
_SLOWEST_POLL = 50  # times the fastest one
_CLOSE_S_MAX = 5.0
_SURVEY_S_MAX = 10.0
_UNKNOWN = -1


class Ready(NamedTuple):
    """Batches of an epoch that are here and not delivered yet."""

    batch_count: int
    is_all: bool  # none follows them
    raises: bool = False  # next() raises in place of the first


# Waits for a batch for the first number of seconds; next() has waited the second number for it.
PollReady = Callable[[float, float], Ready]


class CommonSteps:
    """Common steps of one iterator. Confined to the trainer's thread."""

    def __init__(self, agreement: StepAgreement) -> None:
        self._agreement = agreement
        self._epoch: int | None = None  # its number, once it is read
        self._given_count = 0
        self._is_over = False

    def take_step(self, poll_ready: PollReady) -> bool:
        """Return whether all ranks take the next step; False at the end of the epoch, and
        afterwards.

        Returns immediately if that is known. Waits otherwise, for ``job_store.WAIT_S_MAX`` at most,
        and raises RankError then.
        """
        if self._is_over:
            return False
        if self._epoch is None:  # not by iter(): an iterator may be dropped before it is read
            self._epoch = self._agreement.begin()
        elif self._epoch != self._agreement.epoch:
            raise UnsupportedError(
                "next() was called on an iterator after a newer iterator of the same loader had "
                "started, but the ranks agree on the steps of one iterator at a time; create "
                "another loader for it"
            )
        step = self._given_count
        ready = poll_ready(0.0, 0.0)
        is_taken = self._is_taken(step, ready)
        if is_taken is None:
            is_taken, ready = self._wait(step, ready, poll_ready)
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

    def _wait(self, step: int, ready: Ready, poll_ready: PollReady) -> tuple[bool, Ready]:
        began_at = time.monotonic()
        has_warned = False
        while True:
            waited_s = time.monotonic() - began_at
            if ready.batch_count == 0 and not ready.is_all:
                ready = poll_ready(_POLL_READY_S, waited_s)
            else:
                self._agreement.wait(step, min(1.0, job_store.WAIT_S_MAX))
            is_taken = self._is_taken(step, ready)
            if is_taken is not None:
                return is_taken, ready
            waited_s = time.monotonic() - began_at
            if waited_s > job_store.WAIT_S_MAX and ready != Ready(0, False):
                raise RankError(
                    f"{self._format(step)}, for {waited_s:.0f} s; every rank must read its "
                    f"loader: check whether these ranks are alive, and where they are blocked"
                )
            if waited_s > _WARN_AFTER_S and not has_warned and ready != Ready(0, False):
                has_warned = True
                warn(f"{self._format(step)}, for at most {job_store.WAIT_S_MAX:.0f} s")

    def _format(self, step: int) -> str:
        """Return in words which rank waits for which."""
        late = self._agreement.late_ranks(step)
        late.pop(self._agreement.job.rank, None)
        listed = ", ".join(
            _format_rank(rank, announcement) for rank, announcement in list(late.items())[:8]
        )
        rank, world_size = self._agreement.job
        return (
            f"rank {rank} of {world_size} waits for {listed or 'the agreement of rank 0'} to "
            f"announce a batch for step {step} of the epoch, or its last batch"
        )

    def _note_end(self, step: int, ready: Ready) -> None:
        agreed = self._agreement.end()
        self._agreement.epoch_end = EpochEnd(
            step, agreed.ended_rank, ready.batch_count, not ready.is_all
        )


def _format_rank(rank: int, announcement: Announcement | None) -> str:
    if announcement is None:
        return f"rank {rank}, which has announced no batch,"
    return f"rank {rank}, which is at batch {announcement.ready_count},"


class StepAgreement:
    """Agreement of a loader's ranks, epoch after epoch. For the trainer's thread.

    ``connect`` makes the thread's connection to the store. ``prefix`` precedes all keys; it is the
    same on all ranks, and belongs to this loader alone. The n-th epoch of one rank is the n-th of
    the others. Construction starts the thread: workers should be forked before.
    """

    epoch_end: EpochEnd | None = None  # of the last epoch that reached its end

    def __init__(self, connect: Callable[[], Any], job: JobRank, prefix: str) -> None:
        self.job = job
        self._exchange = _Exchange(connect, job, prefix)
        # Also at the end of the program: a thread in native code must not outlive the interpreter.
        weakref.finalize(self, self._exchange.close)

    def begin(self) -> int:
        """Start the next epoch, and return its number. The others learn if this rank has left an
        epoch before its end."""
        self._exchange.begin()
        return self.epoch

    @property
    def epoch(self) -> int:
        """Return the number of the latest epoch, from 0."""
        return self._exchange.epoch_number

    def announce(self, ready_count: int, total: int | None) -> None:
        """Announce the batches of this rank to the others. Does not wait."""
        self._exchange.announce(Announcement(ready_count, total))

    def is_taken(self, step: int) -> bool | None:
        """Return whether all ranks take the step; None while that is not known. Does not wait.

        Raises RankError if a rank has left, or if the store does not answer.
        """
        agreed = self._exchange.agreed
        found = agreed.is_taken(step)
        if found is not None:
            return found
        if self._exchange.error is not None:
            raise RankError(
                f"rank {self.job.rank} cannot agree with the other ranks on step {step}: the "
                f"job's store does not answer ({self._exchange.error}); check whether the "
                f"process that serves the store is alive: rank 0, or torchrun's agent"
            ) from self._exchange.error
        if agreed.left_rank is not None:
            raise RankError(
                f"rank {agreed.left_rank} has left the epoch before step {step}, which rank "
                f"{self.job.rank} takes; all ranks must take the same steps of an epoch: break "
                f"after the same step on all ranks, or find out why that rank stopped"
            )
        return None

    def wait(self, step: int, wait_s: float) -> None:
        """Wait for the agreement on a step, for ``wait_s`` at most."""
        self._exchange.wait(step, wait_s)

    def end(self) -> AgreedSteps:
        """Call when the epoch has ended; returns the last agreement."""
        return self._exchange.end()

    def late_ranks(self, step: int) -> dict[int, Announcement | None]:
        """Return the ranks not known to have a batch for a step, with their announcements; None for
        a rank without one. Waits for the store."""
        by_rank = self._exchange.survey(_SURVEY_S_MAX)
        late = {
            rank: announcement
            for rank, announcement in by_rank.items()
            if announcement is None or announcement.ready_count <= step
        }
        return late

    def close(self) -> None:
        """Ends the thread. Others learn that this rank has left an epoch that did not end."""
        self._exchange.close()


class _Epoch:
    """Epoch of the exchange. Guarded by its lock; only the thread uses ``sent`` and later
    fields."""

    folder_before: str | None  # of the epoch before
    are_all_here: bool  # whether every rank has made an announcement

    def __init__(self, number: int, folder: str, before: _Epoch | None) -> None:
        self.number = number
        self.folder = folder
        # All ranks were in the epoch before this one, so none is in the one before that.
        self.folder_of_none = before.folder_before if before and before.are_all_here else None
        self.folder_before = None if before is None else before.folder
        self.mine = Announcement()
        self.agreed = AgreedSteps()
        self.has_ended = False
        self.sent: Announcement | None = None
        self.are_all_here = False


class _Exchange:
    """The thread's part, which is everything from `_run` on. Thread-safe."""

    _store: Any  # once the thread is connected to it
    _has_multi_get: bool

    def __init__(self, connect: Callable[[], Any], job: JobRank, prefix: str) -> None:
        self._connect = connect
        self._job = job
        self._prefix = prefix
        self._poll_s_min = max(_POLL_S_MIN, job.world_size / _REQUESTS_PER_S_MAX)
        self._condition = threading.Condition()
        self._epoch: _Epoch | None = None
        self._left: list[_Epoch] = []  # whose ends are still to be announced
        self._is_awaited = False
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._announcements: (
            dict[int, Announcement | None] | None
        ) = {}  # None while they are requested
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="penstock steps", daemon=True)
        self._thread.start()

    @property
    def agreed(self) -> AgreedSteps:
        epoch = self._epoch
        return AgreedSteps() if epoch is None else epoch.agreed

    @property
    def epoch_number(self) -> int:
        return -1 if self._epoch is None else self._epoch.number

    def begin(self) -> None:
        with self._condition:
            self._leave()
            number = self.epoch_number + 1
            self._epoch = _Epoch(number, f"{self._prefix}/{number}", self._epoch)
            self._condition.notify_all()

    def announce(self, announcement: Announcement) -> None:
        epoch = self._epoch
        assert epoch is not None
        if announcement == epoch.mine:
            return
        with self._condition:
            epoch.mine = announcement
            self._condition.notify_all()

    def wait(self, step: int, wait_s: float) -> None:
        with self._condition:
            self._is_awaited = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_decided(step), wait_s)
            self._is_awaited = False

    def _is_decided(self, step: int) -> bool:
        agreed = self.agreed
        is_known = agreed.is_taken(step) is not None or agreed.left_rank is not None
        return is_known or self.error is not None

    def end(self) -> AgreedSteps:
        with self._condition:
            assert self._epoch is not None
            self._epoch.has_ended = True
            return self._epoch.agreed

    def survey(self, wait_s: float) -> dict[int, Announcement | None]:
        with self._condition:
            self._announcements = None
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._announcements is not None, wait_s)
            return self._announcements or {}

    def close(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # a forked child has no such thread, and possibly a lock that it held
        with self._condition:
            self._leave()
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S_MAX)

    def _leave(self) -> None:
        epoch = self._epoch
        if epoch is not None and not epoch.has_ended:
            epoch.has_ended = True
            epoch.mine = epoch.mine._replace(has_left=True)
            epoch.agreed = epoch.agreed._replace(left_rank=self._job.rank)
            self._left.append(epoch)

    def _run(self) -> None:
        try:
            self._store = self._connect()
            self._has_multi_get = self._store.has_extended_api()
            self._serve()
        except Exception as error:  # from torch's store, which raises several types
            with self._condition:
                self.error = error
                self._announcements = self._announcements or {}
                self._condition.notify_all()

    def _serve(self) -> None:
        pause_s = self._poll_s_min
        while True:
            with self._condition:
                self._pause(pause_s)
                left, self._left = self._left, []
                epoch, is_awaited, is_closed = self._epoch, self._is_awaited, self._is_closed
                wants_words = self._announcements is None
            for one in left:
                self._publish_leaving(one)
            if is_closed:
                return
            has_published = epoch is not None and not epoch.has_ended and self._publish(epoch)
            if wants_words and epoch is not None:
                self._answer_survey(epoch)
            is_news = epoch is not None and not epoch.has_ended and self._look(epoch)
            slowest_s = _SLOWEST_POLL * self._poll_s_min
            if is_awaited or epoch is None:
                pause_s = self._poll_s_min
            elif epoch.agreed.step_count == epoch.mine.ready_count:
                pause_s = slowest_s  # no further step can be agreed before this rank has more
            else:
                pause_s = (
                    self._poll_s_min if has_published or is_news else min(2 * pause_s, slowest_s)
                )

    def _pause(self, pause_s: float) -> None:
        epoch = self._epoch
        if self._is_closed or self._left or self._announcements is None:
            return
        if epoch is None or epoch.has_ended:
            self._condition.wait()
        elif epoch.sent == epoch.mine:
            self._condition.wait(min(pause_s, self._poll_s_min) if self._is_awaited else pause_s)

    def _publish(self, epoch: _Epoch) -> bool:
        announcement = epoch.mine
        if announcement == epoch.sent:
            return False
        if epoch.sent is None and epoch.folder_of_none is not None:
            self._forget(epoch.folder_of_none)
        self._store.set(self._key(epoch, self._job.rank), announcement.to_text())
        epoch.sent = announcement
        return True

    def _forget(self, folder: str) -> None:
        """Delete this rank's entries about an epoch."""
        for name in [str(self._job.rank), *(["agreed"] if self._job.rank == 0 else [])]:
            self._store.delete_key(f"{folder}/{name}")

    def _look(self, epoch: _Epoch) -> bool:
        """Make the agreement, at rank 0, or read it. Return whether it is a new one."""
        agreed = self._agree(epoch) if self._job.rank == 0 else self._read(epoch)
        if agreed is None or agreed == epoch.agreed:
            return False
        with self._condition:
            if not epoch.has_ended:
                epoch.agreed = agreed
            self._condition.notify_all()
        return True

    def _agree(self, epoch: _Epoch) -> AgreedSteps | None:
        keys = [self._key(epoch, rank) for rank in range(1, self._job.world_size)]
        if not epoch.are_all_here:
            epoch.are_all_here = self._store.check(keys)
            if not epoch.are_all_here:
                return None
        if self._has_multi_get:
            texts = self._store.multi_get(keys)
        else:
            texts = [self._store.get(key) for key in keys]
        agreed = agree([epoch.mine, *map(Announcement.from_text, texts)])
        if agreed != epoch.agreed:
            # Before the local trainer sees it, which may then end, and with it this thread.
            self._store.set(f"{epoch.folder}/agreed", agreed.to_text())
        return agreed

    def _read(self, epoch: _Epoch) -> AgreedSteps | None:
        key = f"{epoch.folder}/agreed"
        if not epoch.are_all_here:
            epoch.are_all_here = self._store.check([key])
        return AgreedSteps.from_text(self._store.get(key)) if epoch.are_all_here else None

    def _publish_leaving(self, epoch: _Epoch) -> None:
        self._store.set(self._key(epoch, self._job.rank), epoch.mine.to_text())
        if self._job.rank == 0:
            self._store.set(f"{epoch.folder}/agreed", epoch.agreed.to_text())

    def _answer_survey(self, epoch: _Epoch) -> None:
        by_rank: dict[int, Announcement | None] = {}
        for rank in range(self._job.world_size):
            key = self._key(epoch, rank)
            is_there = self._store.check([key])
            by_rank[rank] = Announcement.from_text(self._store.get(key)) if is_there else None
        with self._condition:
            self._announcements = by_rank
            self._condition.notify_all()

    @staticmethod
    def _key(epoch: _Epoch, rank: int) -> str:
        return f"{epoch.folder}/{rank}"


class Announcement(NamedTuple):
    """Announcement of one rank about its epoch. Its numbers never decrease."""

    ready_count: int = 0  # batches delivered or ready, from the start of the epoch
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
    """Conclusion from the announcements of all ranks."""

    step_count: int = 0  # of steps for which every rank is sure of its batch
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
        """Return whether all ranks take step number ``step``; None while that is not known."""
        if step < self.step_count:
            return True
        return False if self.end is not None and step >= self.end else None


def agree(announcements: Sequence[Announcement]) -> AgreedSteps:
    """Return the agreement of the ranks that made these announcements, in the order of ranks."""
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
    """End of an epoch that all ranks end together, as seen by one rank.

    Attributes:
        step_count (int): Steps taken since this ``iter()``.
        ended_rank (int | None): Rank that had no batch for another step.
        dropped_batches (int): Batches of this rank that were ready and not delivered.
        has_more (bool): Whether this rank's workers had not reached the end of its shards; the
            samples that were never read are not counted.
    """

    step_count: int
    ended_rank: int | None
    dropped_batches: int
    has_more: bool

    def __str__(self) -> str:
        more = ", and more were not read" if self.has_more else ""
        return (
            f"the epoch ended after {self.step_count} steps, as rank {self.ended_rank} had no "
            f"more batches; {self.dropped_batches} ready batches of this rank were dropped{more}"
        )
