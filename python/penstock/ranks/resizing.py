# SPDX-License-Identifier: Apache-2.0
"""Agreement of a job's ranks on another number of ranks, while the job runs.

Every rank of the new size announces its number, the size and its place in the stream in the job's
store, and waits for the other ranks of that size. Either all of them change their size, or none: a
rank that has seen every announcement, or a difference, proposes a verdict, and the first verdict in
the store holds for all ranks. So a rank that raises an error has not left the others at a size
without it, unless they had agreed before it arrived.

The resizes of a job are numbered. A rank takes part in the first one without a verdict. If ranks of
its loader have failed in one before that, it raises their error first, once: it is late for them.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from penstock.errors import RankError
from penstock.program_line import warn
from penstock.ranks import job_store
from penstock.ranks.job_store import differing_fact, format_ranks, restart_prefix, stores_of_ranks
from penstock.ranks.sharding import JobRank

_POLL_S_MIN, _POLL_S_MAX = 0.001, 0.05


@dataclass
class ResizePast:
    """Resizes of a loader so far, as known by this rank."""

    # Where the ranks of the present size have compared their loaders, or have agreed on that size;
    # None if they have not, as on a rank that joins.
    folder: str | None = None
    failed: set[str] = field(default_factory=set)  # whose errors were raised here


def agree_on_resize(
    before: JobRank, after: JobRank, facts: Mapping[str, Any], past: ResizePast
) -> str | None:
    """Wait until all ranks of the new size have announced it; return the folder of their resize.

    Returns None without a store that all of them share, where ranks agree on nothing.

    before, after: the numbers of this rank.
    facts: have to be the same on all ranks.

    Raises RankError on all ranks that wait, if they have other sizes or facts, or if a rank does
    not arrive within ``job_store.WAIT_S_MAX``; and on a rank that arrives too late.
    """
    if before.world_size == after.world_size == 1:
        return None
    stores = stores_of_ranks(after.world_size)
    return _Resize(stores[0], before, after, facts, past).agree() if stores else None


class _Resize:
    """One resize, for one rank."""

    def __init__(
        self,
        store: Any,
        before: JobRank,
        after: JobRank,
        facts: Mapping[str, Any],
        past: ResizePast,
    ) -> None:
        self._store = store
        self._before, self._after = before, after
        self._facts = dict(facts)
        self._past = past
        self._folders = {past.folder} - {None}  # of the loaders that take part
        self._moved_key = None if past.folder is None else f"{past.folder}/resized"
        self._who = f"rank {before.rank} of {before.world_size}"
        self._folder = self._first_open()

    def agree(self) -> str:
        try:
            self._announce()
            self._wait()
        except RankError:
            self._past.failed.add(self._folder)
            raise
        except BaseException as error:
            self._decide(f"{self._who} was interrupted in reshard() by {type(error).__name__}")
            raise
        return self._folder

    def _first_open(self) -> str:
        for number in itertools.count():
            folder = f"{restart_prefix()}/resizes/{number}"
            if not self._store.check([f"{folder}/verdict"]):
                return folder
            verdict = _Verdict.from_text(self._store.get(f"{folder}/verdict"))
            is_of_mine = self._past.folder in verdict.folders
            if verdict.error is not None and is_of_mine and folder not in self._past.failed:
                self._past.failed.add(folder)
                raise RankError(verdict.error)
        raise AssertionError("count() ended")

    def _announce(self) -> None:
        mine = json.dumps(
            {
                "was": list(self._before),
                "world_size": self._after.world_size,
                "facts": self._facts,
                "folder": self._past.folder,
                "id": secrets.token_hex(8),
            }
        )
        key = self._key(self._after.rank)
        there = self._store.compare_set(key, "", mine).decode()
        if there != mine:
            other = json.loads(there)
            rank, world_size = other["was"]
            self._folders |= {other["folder"]} - {None}
            self._refuse(
                f"{self._who} and rank {rank} of {world_size} both call reshard() with rank="
                f"{self._after.rank}; give each rank another number"
            )

    def _wait(self) -> None:
        """Wait for the verdict, and propose it when all announcements are here."""
        missing = [rank for rank in range(self._after.world_size) if rank != self._after.rank]
        began, pause_s, has_warned = time.monotonic(), _POLL_S_MIN, False
        while missing:
            is_decided = self._has_verdict()  # then all announcements that it follows from are here
            for rank in [rank for rank in missing if self._store.check([self._key(rank)])]:
                missing.remove(rank)
                pause_s = _POLL_S_MIN
                self._compare(rank, json.loads(self._store.get(self._key(rank))))
            if not missing or is_decided:
                break
            self._check_moved()
            waited_s = time.monotonic() - began
            listed = format_ranks(missing)
            if waited_s > job_store.WAIT_S_MAX:
                self._refuse(
                    f"{self._who} has waited {waited_s:.0f} s in reshard() for rank {listed} of "
                    f"the new {self._after.world_size}; every rank of the new size must call "
                    f"reshard() after the same step, so check whether these ranks are alive"
                )
            if waited_s > job_store.WARN_AFTER_S and not has_warned:
                has_warned = True
                warn(
                    f"{self._who} waits in reshard() for rank {listed} of the new "
                    f"{self._after.world_size}, for at most {job_store.WAIT_S_MAX:.0f} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S_MAX)
        self._check_moved()
        verdict = self._decide(None)
        if verdict.error is not None:
            raise RankError(verdict.error)
        if missing:
            self._raise_late()
        if self._moved_key is not None:
            self._store.set(self._moved_key, str(self._after.world_size))

    def _compare(self, rank: int, other: Mapping[str, Any]) -> None:
        whose = "rank {} of {}".format(*other["was"])
        self._folders |= {other["folder"]} - {None}
        if other["world_size"] != self._after.world_size:
            self._refuse(
                f"the ranks reshard to different sizes: {self._who} to {self._after.world_size} "
                f"ranks and {whose} to {other['world_size']}; call reshard() with the same "
                f"world_size on all ranks"
            )
        name = differing_fact(self._facts, other["facts"])
        if name is not None:
            self._refuse(
                f"{self._who} and {whose} cannot reshard together: the first has {name} "
                f"{self._facts[name]!r} and the other {other['facts'].get(name)!r}; call reshard() "
                f"after the same step on all ranks, with loaders of the same arguments, and load "
                f"the state of that step on a rank that joins"
            )

    def _check_moved(self) -> None:
        if self._moved_key is not None and self._store.check([self._moved_key]):
            if not self._has_verdict():
                self._raise_late()

    def _has_verdict(self) -> bool:
        return bool(self._store.check([f"{self._folder}/verdict"]))

    def _raise_late(self) -> NoReturn:
        raise RankError(
            f"the other ranks have resharded without {self._who}; close this loader, or load the "
            f"state of one of them and call reshard() again together with them"
        )

    def _refuse(self, reason: str) -> NoReturn:
        """Raise RankError, on all ranks of this resize."""
        verdict = self._decide(reason)
        if verdict.error is None:
            self._raise_late()
        raise RankError(verdict.error)

    def _decide(self, error: str | None) -> _Verdict:
        """Return the verdict: the first that a rank proposes. None: the ranks agree."""
        proposed = json.dumps([error, sorted(self._folders)])
        return _Verdict.from_text(self._store.compare_set(f"{self._folder}/verdict", "", proposed))

    def _key(self, rank: int) -> str:
        return f"{self._folder}/{rank}"


class _Verdict(NamedTuple):
    """The end of a resize."""

    error: str | None  # None: the ranks have agreed
    folders: list[str]  # as `ResizePast.folder` of ranks that took part

    @staticmethod
    def from_text(text: str | bytes) -> _Verdict:
        return _Verdict(*json.loads(text))
