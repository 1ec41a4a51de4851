# SPDX-License-Identifier: Apache-2.0
"""The iterator's work with the sampler: counting its pulls, its states, and moving a resumed epoch
to its place in the order."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from penstock.ranks.sharding import RankBatchSampler
from penstock.stream.progress import GeneratorHolder, Progress, ResumePoint
from penstock.stream.shard_state import copied_state, is_stateful, load_between_epochs

_NOTHING = object()

# By shard: the indices, the number and the first place of each batch that is made again.
Repeats = dict[int, list[tuple[Any, int, int]]]


def _states_of(parts: dict[str, Any], kept: Any) -> dict[str, Any]:
    """Return the states of a sampler's parts. ``kept`` lives as long as they can be requested."""
    return {name: copied_state(part.state_dict()) for name, part in parts.items()}


class CountedPulls:
    """Part of both iterators, whose progress it keeps."""

    _progress: Progress
    _index_sampler: Any
    _sampler_iter: Any
    _is_sampler_stateful: bool
    _pulled_place = 0  # of the first sample of the last pull, in the order of the epoch
    _next_place = 0  # of the first sample of the next pull
    # Batches that a resumed epoch has to make before it continues: their indices, and the place of
    # the first sample of each.
    _left_out: deque[tuple[Any, int]]
    _repeats: Repeats  # before a process makes its first batch of a resumed epoch

    def _next_index(self) -> Any:
        if self._left_out:
            index, self._pulled_place = self._left_out.popleft()
        else:
            index = self._pull_sampler()
        self._progress.pull()
        return index

    def _pull_sampler(self) -> Any:
        try:
            index = next(self._sampler_iter)
        except StopIteration:
            self._progress.sampler.is_over = True
            raise
        self._note_place(index)
        sampler = self._index_sampler
        taken = sampler.taken_count if isinstance(sampler, RankBatchSampler) else None
        self._progress.note_sampler(index, taken)
        return index

    def _note_place(self, index: Any) -> None:
        if isinstance(self._index_sampler, RankBatchSampler):
            self._pulled_place = self._index_sampler.first_place
            return
        self._pulled_place = self._next_place
        self._next_place += len(index) if isinstance(index, (list, tuple)) else 1

    def _whole_pull(self, index: Any) -> tuple[Any, int]:
        """Return what to keep of the last pull, ``index``, to make its batch again: if ranks share
        the order, the step, since another number of ranks may divide it then."""
        sampler = self._index_sampler
        return (
            sampler.step if isinstance(sampler, RankBatchSampler) else (index, self._pulled_place)
        )

    def _place_of_pulled(self) -> int:
        """Return the place of the last pull's first index in the order of the epoch."""
        return self._pulled_place

    def _undo_seed(self, loader: GeneratorHolder) -> None:
        """Undo the draws of making an iterator in the place of one that was only reset."""
        if not self._progress.draws_seed:
            self._progress.start.restore_globals()
            self._progress.start.restore_own(loader)
            self._sampler_iter = iter(self._index_sampler)

    def _note_sampler(self) -> None:
        """Call with each new ``_sampler_iter``."""
        self._pulled_place = self._next_place = 0
        self._left_out = deque()
        self._repeats = {}
        if isinstance(self._index_sampler, RankBatchSampler):
            self._progress.share = self._index_sampler.share(self._index_sampler.start)
        parts = self._stateful_parts()
        self._is_sampler_stateful = bool(parts)
        # A program may leave the epoch, and ask for the state then.
        kept = {"kept alive": self._sampler_iter, **parts}
        take = functools.partial(_states_of, parts, kept)
        self._progress.sampler.begin(take if parts else None)

    def _stateful_parts(self) -> dict[str, Any]:
        parts = {
            "index_sampler": self._index_sampler,
            "sampler": getattr(self._index_sampler, "sampler", None),
            "iterator": self._sampler_iter,
        }
        return {name: part for name, part in parts.items() if is_stateful(part)}

    def _resume_sampler(self) -> None:
        """Move the sampler to the place where a resumed epoch continues: by its state, or by
        repeating its pulls. Batches that were delivered out of order are skipped.
        """
        point = self._progress.point
        if point is None:
            return
        if point.pulled is not None:
            self._left_out.extend(point.pulled)
            self._sampler_iter = iter(())
            return
        asked = self._move_sampler(point)
        if isinstance(self._index_sampler, RankBatchSampler):
            self._pull_missing(point)
            return
        for place in range(point.left.first, point.left.through):
            index, first_place = next(asked, None) or self._pull_to_keep(place)
            if place in point.left.missing:
                self._left_out.append((index, first_place))
        self._left_out.extend(asked)

    def _pull_missing(self, point: ResumePoint) -> None:
        """Pull the steps that a rank's sampler gives before it continues."""
        progress = self._progress
        for place in point.left.missing:
            progress.sampler.pull_count = place
            self._left_out.append(self._pull_to_keep(place))
            if progress.commits is not None:
                progress.commits.note_pull(place, *self._index_sampler.step)
        progress.sampler.pull_count = point.left.through

    def _pull_to_resume(self, place: int) -> Any:
        try:
            return self._pull_sampler()
        except StopIteration:
            self._refuse_place(place)

    def _refuse_place(self, place: int) -> NoReturn:
        raise ValueError(
            f"the state was taken after {place} batches, but the "
            f"{type(self._index_sampler).__name__} has no batch after these; create the loader "
            f"with the same sampler, or load the state as state_dict() returned it"
        )

    def _pull_to_keep(self, place: int) -> tuple[Any, int]:
        index = self._pull_to_resume(place)
        # The sampler may fill the same list again.
        return (index.copy() if type(index) is list else index), self._pulled_place

    def _move_sampler(self, point: ResumePoint) -> Iterator[tuple[Any, int]]:
        """Move the sampler to the first batch that is left. Returns batches from there on that were
        pulled before the sampler's state was taken, and the place of each in the order."""
        at = point.sampler
        if at.state is None:
            if not isinstance(self._index_sampler, RankBatchSampler):  # it starts there
                self._skip_pulls(range(at.pull_count))
            return iter(())
        self._next_place = at.state["samples_yielded"]
        parts = self._stateful_parts()
        if at.is_over:
            for name in parts.keys() & at.state.keys() - {"iterator"}:
                load_between_epochs(parts[name], at.state[name])
            self._sampler_iter = iter(())
        else:
            for name in parts.keys() & at.state.keys() - {"iterator"}:
                parts[name].load_state_dict(at.state[name])
            self._sampler_iter = iter(self._index_sampler)
            if "iterator" in at.state:
                self._sampler_iter.load_state_dict(at.state["iterator"])
        self._note_sampler()
        if isinstance(self._index_sampler, RankBatchSampler):
            self._progress.sampler.pull_count = point.left.first  # it starts there
            return iter(())
        self._next_place = at.state["samples_yielded"]
        for place in range(at.pull_count, point.left.first):
            self._note_repeated(place, self._pull_to_resume(place))
        sizes = [len(one) if isinstance(one, (list, tuple)) else 1 for one in at.asked]
        first_place = self._next_place - sum(sizes)
        places = itertools.accumulate(sizes, initial=first_place)
        return iter([*zip(at.asked, places, strict=False)])

    def _skip_pulls(self, places: range) -> None:
        for place in places:
            index = next(self._sampler_iter, _NOTHING)
            if index is _NOTHING:
                self._refuse_place(place)
            self._note_place(index)
            self._note_repeated(place, index)

    def _note_repeated(self, place: int, index: Any) -> None:
        shard_id = self._progress.repeated_places().get(place)
        if shard_id is not None:
            index = index.copy() if type(index) is list else index
            self._repeats.setdefault(shard_id, []).append((index, place, self._pulled_place))

    def _pull_ahead(self) -> None:
        """Have the sampler make the draws of its first pull, while generators are replayed."""
        if self._progress.is_replayed and not self._is_sampler_stateful:
            self._sampler_iter = itertools.chain(
                [*itertools.islice(self._sampler_iter, 1)], self._sampler_iter
            )
