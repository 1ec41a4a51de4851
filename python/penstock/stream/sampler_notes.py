# SPDX-License-Identifier: Apache-2.0
"""The states of a program's sampler in an epoch, taken from when the first one is asked for.

Batches are asked for ahead, so a sampler has been pulled further than the batches that the program
was given. Its state is therefore one of two kinds. A snapshot from before the place: the pulls
since then are repeated at a resume. Or, at the first call in an epoch, the state of now: the
indices that were pulled and whose batches are still to come are then a part of the loader's state.
Without workers nothing is asked for ahead, so a snapshot is taken when a state is asked for, and
one that is not too old serves it as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

Take = Callable[[], dict[str, Any]]

_KEPT_ON = 8  # indices are forgotten by as many, or more


class SamplerPlace(NamedTuple):
    """A sampler's state, and what to do from there to be at the first batch that is left."""

    state: dict[str, Any] | None
    pull_count: int  # of the epoch, after which it was taken
    asked: tuple[Any, ...] = ()  # indices of the batches that are left and were pulled before
    is_over: bool = False  # the sampler has no more in this epoch


class _Note(NamedTuple):
    pull_count: int
    sample_count: int
    state: dict[str, Any] | Exception
    is_over: bool = False  # it was taken after the sampler's end


class SamplerNotes:
    """Confined to the trainer's thread. Keeps nothing unless the sampler has a state, and then the
    indices that are still to be delivered and the snapshots that they need.
    """

    def __init__(self, first: int, place: SamplerPlace | None = None) -> None:
        """``first`` is the place in the epoch of the first batch that is left, and ``place`` that
        of a state to go on from."""
        self.every: int | None = None  # pulls between snapshots; None while nobody wants states
        self.is_over = False
        self.is_ahead = True  # the sampler may be pulled further than the batches that were given
        self._take: Take | None = None
        self._notes: deque[_Note] = deque()
        self._kept: deque[Any] = deque()  # indices of the batches from _kept_first on
        self._kept_first = first
        self.pull_count = first
        self.sample_count = 0
        if place is None or place.state is None:
            return
        self.pull_count = place.pull_count
        self.sample_count = place.state["samples_yielded"]
        self.is_over = place.is_over
        self._kept.extend(place.asked)
        if not place.asked:
            self._kept_first = place.pull_count
        self._notes.append(_Note(place.pull_count, self.sample_count, place.state, place.is_over))

    def begin(self, take: Take | None) -> None:
        """The sampler's iterator is new. ``take`` gives the state of both; None where they have
        none."""
        self._take = take

    def note(self, index: Any, first_left: Callable[[], int]) -> None:
        """The sampler gave ``index``; ``first_left()`` is the place of the first batch left."""
        self.pull_count += 1
        self.sample_count += len(index) if isinstance(index, (list, tuple)) else 1
        if self._take is None:
            return
        # The sampler may fill the same list again.
        self._kept.append(index.copy() if type(index) is list else index)
        if len(self._kept) % _KEPT_ON == 0:
            self._forget_before(first_left())
        if self.is_ahead and self.every is not None and self.pull_count % self.every == 0:
            self._notes.append(self._note_now())

    def place(self, first_left: int) -> SamplerPlace:
        """Where the sampler is, for a state of which ``first_left`` is the first batch left.

        Raises RuntimeError where the sampler does not give its state.
        """
        if self._take is None or self.pull_count == 0:
            return SamplerPlace(None, first_left)
        self._forget_before(first_left)
        if not self.is_ahead and self._notes and self.every is not None:
            if self.pull_count >= self._notes[-1].pull_count + self.every:
                self._notes.clear()
        if not self._notes:
            self._notes.append(self._note_now())
        note = self._notes[0]
        if isinstance(note.state, Exception):
            self._notes.popleft()  # it may be ready the next time
            raise RuntimeError(
                f"state_dict() needs the state of the loader's sampler, whose state_dict() raised "
                f"{type(note.state).__name__}: {note.state}; have it give a state at any time, or "
                f"take none of the loader"
            ) from note.state
        state = {"samples_yielded": note.sample_count, **note.state}
        count = max(0, note.pull_count - first_left)
        asked = tuple(self._kept[place] for place in range(count))
        return SamplerPlace(state, note.pull_count, asked, note.is_over)

    def _note_now(self) -> _Note:
        assert self._take is not None
        try:
            state: dict[str, Any] | Exception = self._take()
        except Exception as error:
            state = error
        return _Note(self.pull_count, self.sample_count, state, self.is_over)

    def _forget_before(self, first_left: int) -> None:
        while self._kept and self._kept_first < first_left:
            self._kept.popleft()
            self._kept_first += 1
        while len(self._notes) > 1 and self._notes[1].pull_count <= first_left:
            self._notes.popleft()
