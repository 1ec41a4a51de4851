# SPDX-License-Identifier: Apache-2.0
"""How far an epoch has come: the content of ``state_dict()``, and the start of a resumed epoch."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from penstock import _C
from penstock.sampling.rank_batch_sampler import RankBatchSampler
from penstock.stream.batch_seeds import GeneratorsKept, generator_states, put_back
from penstock.stream.places_left import DeliveredPlaces, PlacesLeft
from penstock.stream.shard_state import ShardStarts, is_stateful


class GeneratorHolder(Protocol):
    """A loader, as far as it and its samplers hold generators of the user's."""

    generator: Any
    sampler: Any
    batch_sampler: Any


@dataclass(frozen=True, slots=True)
class GeneratorSnapshot:
    """The states of the global generators and of those that the user gave to the loader."""

    of_globals: tuple[Any, ...]  # from generator_states()
    of_own: dict[str, torch.Tensor]

    @staticmethod
    def take(loader: GeneratorHolder) -> GeneratorSnapshot:
        own = own_generators(loader)
        return GeneratorSnapshot(generator_states(), {name: own[name].get_state() for name in own})

    def put_back_globals(self) -> None:
        put_back(self.of_globals)

    def put_back_own(self, loader: GeneratorHolder) -> None:
        for name, generator in own_generators(loader).items():
            if name in self.of_own:
                generator.set_state(self.of_own[name])


class GeneratorsReplayed(GeneratorsKept):
    """The global generators as a snapshot has them, for the time of the context."""

    def __init__(self, snapshot: GeneratorSnapshot) -> None:
        self._snapshot = snapshot

    def __enter__(self) -> None:
        super().__enter__()
        self._snapshot.put_back_globals()


class PullsReplayed(GeneratorsReplayed):
    """The global generators and the loader's own as a snapshot has them, for the time of the
    context: pulls draw the same numbers again.
    """

    def __init__(self, snapshot: GeneratorSnapshot, loader: GeneratorHolder) -> None:
        super().__init__(snapshot)
        self._loader = loader

    def __enter__(self) -> None:
        self._now = GeneratorSnapshot.take(self._loader)
        super().__enter__()
        self._snapshot.put_back_own(self._loader)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._now.put_back_own(self._loader)


def own_generators(loader: GeneratorHolder) -> dict[str, torch.Generator]:
    """The generators that the user gave to the loader and its samplers, by where they are."""
    holders = {
        "loader": loader,
        "sampler": loader.sampler,
        "batch_sampler": loader.batch_sampler,
        "batch_sampler.sampler": getattr(loader.batch_sampler, "sampler", None),
    }
    found = {name: getattr(holder, "generator", None) for name, holder in holders.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Generator)}


def sampler_states(loader: GeneratorHolder) -> dict[str, Any] | None:
    """The states between epochs of samplers of the user's own, by the loader's name for them."""
    samplers = {name: getattr(loader, name) for name in ("batch_sampler", "sampler")}
    states = {
        name: copy.deepcopy(sampler.state_dict())
        for name, sampler in samplers.items()
        if is_stateful(sampler)
    }
    return states or None


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a resumed epoch goes on."""

    base_seed: int
    left: PlacesLeft
    yielded_count: int
    last_shard_id: int | None
    starts: ShardStarts
    sampler_state: dict[str, Any] | None


class Progress:
    """The account of one epoch, kept by its iterator and read by the loader.

    The native stream counts batches where there is one. This class has the parts that only Python
    knows: the generators, the sampler's states, and the states of datasets as objects.

    Confined to the trainer's thread.
    """

    def __init__(
        self,
        epoch: int,
        start: GeneratorSnapshot,
        shard_count: int,
        *,
        is_replayed: bool = False,
        draws_seed: bool = True,
        point: ResumePoint | None = None,
    ) -> None:
        self.epoch = epoch
        self.start = start  # before iter() drew anything
        self.start_as_json: dict[str, Any] | None = None  # made when it is asked for
        self.is_replayed = is_replayed  # the global generators are put back after iter()
        self.draws_seed = draws_seed  # a base seed, which persistent workers keep from their first
        self.point = point
        self.base_seed: int | None = None  # until the iterator is there
        self.samplers_before: dict[str, Any] | None = None  # their states before the epoch
        self.counts = _C.EpochProgress(shard_count)
        self.share: _C.RankShare | None = None  # of the rank, where ranks share an order
        # In the trainer's own process the states are those of the moment in which they are asked
        # for: the program may have changed the dataset, or drawn, since the last answer.
        self.shard_states_now: Callable[[], list[Any]] | None = None
        self._resumed_states: list[Any] = [None] * shard_count  # until workers send others
        # The states of the shards after the epoch before, where workers that stay have them.
        self.states_before: list[Any] = [None] * shard_count
        # The last thing that resuming does, with the generators as they are then.
        self.finish_resuming: Callable[[], None] | None = None
        self.first_step = 0  # steps of the epoch before it was resumed, where ranks share shards
        self.pulled_count = 0
        self._sampled_count = 0
        # By the number of pulls after which the sampler had them, of batches not delivered yet.
        self._sampler_states: deque[tuple[int, dict[str, Any]]] = deque()
        self._sampler_state: dict[str, Any] | None = None
        if point is not None:
            self.pulled_count = point.left.delivered_count
            self.counts.resume(self.pulled_count, point.yielded_count, point.last_shard_id)
            self._sampler_state = point.sampler_state
            if point.sampler_state is not None:
                self._sampled_count = point.sampler_state["samples_yielded"]
            for shard_id, shard in point.starts.items():
                self.counts.set_shard_answers(shard_id, shard.batch_count)
                self._resumed_states[shard_id] = shard.state
        self._resumed_left = PlacesLeft(0) if point is None else point.left
        self._sampler_pull_count = self._resumed_left.first
        self._delivered: DeliveredPlaces | None = None  # where batches may come out of turn

    @property
    def answered_count(self) -> int:
        """Requests whose batch or error the user was given."""
        return self.counts.answered_count

    @property
    def step(self) -> int:
        """The steps that a rank which reads shards of its own has taken in the epoch."""
        resumed_count = 0 if self.point is None else self.point.left.delivered_count
        return self.first_step + self.answered_count - resumed_count

    @property
    def yielded_count(self) -> int:
        """Batches the user was given."""
        return self.counts.yielded_count

    @property
    def shard_counts(self) -> list[int]:
        """Answers by shard; for map-style datasets, by process."""
        return self.counts.shard_counts

    @property
    def last_shard_id(self) -> int | None:
        return self.counts.last_shard_id

    @property
    def is_finished(self) -> bool:
        return self.counts.is_finished

    @property
    def shard_states(self) -> list[Any]:
        """After the last answer of each shard: bytes as its worker sent them, or as resumed."""
        if self.shard_states_now is not None:
            return copy.deepcopy(self.shard_states_now())
        sent = map(self.counts.shard_state, range(len(self._resumed_states)))
        return [
            resumed if state is None else state
            for state, resumed in zip(sent, self._resumed_states, strict=True)
        ]

    @property
    def sampler_state(self) -> dict[str, Any] | None:
        """Before the pull of the first batch that is left."""
        first = self.left.first
        while self._sampler_states and self._sampler_states[0][0] <= first:
            _, self._sampler_state = self._sampler_states.popleft()
        return self._sampler_state

    @property
    def left(self) -> PlacesLeft:
        """The batches that are still to come; for iterable datasets, without their shards."""
        if self._delivered is not None:
            return self._delivered.left()
        return self._resumed_left.after(self.answered_count)

    def place_of(self, number: int) -> int:
        """The place in the epoch of the batch that is asked for by ``number``."""
        return self._resumed_left.place_of(number)

    def deliver_in_any_order(self) -> None:
        """To be called before the first batch where each delivery will be noted by its number."""
        self._delivered = DeliveredPlaces(self._resumed_left)

    def note_delivery(self, number: int) -> None:
        """The batch that was asked for by ``number`` goes to the program, in any order."""
        if self._delivered is not None:
            self._delivered.note(number)

    @property
    def starts(self) -> ShardStarts:
        return self.point.starts if self.point is not None else {}

    @property
    def first_shard_id(self) -> int:
        """The shard whose turn it is first, where shards are read in turn."""
        last_shard_id = -1 if self.last_shard_id is None else self.last_shard_id
        return (last_shard_id + 1) % len(self._resumed_states)

    def begin(self, base_seed: int) -> None:
        self.base_seed = base_seed

    def pull(self) -> None:
        """The indices of the next request are there."""
        self.pulled_count += 1

    def note_sampler(self, index: Any, state: dict[str, Any] | None) -> None:
        """The sampler gave ``index``, after which it has ``state``."""
        self._sampler_pull_count += 1
        if state is not None:
            self._sampled_count += len(index) if isinstance(index, (list, tuple)) else 1
            noted = {"samples_yielded": self._sampled_count, **state}
            self._sampler_states.append((self._sampler_pull_count, noted))

    def answer(self, shard_id: int, is_error: bool) -> None:
        """The next request was answered, in the trainer's own process."""
        self.counts.answer(shard_id, is_error)

    def answer_pulled(self, shard_id: int, is_error: bool) -> None:
        """The request that was pulled last was answered, where nothing is asked for ahead. An
        interrupt may have taken pulls before it."""
        if self.answered_count == self.pulled_count:
            return  # the sampler itself failed
        while self.answered_count + 1 < self.pulled_count:
            self.counts.skip_answer()
        self.answer(shard_id, is_error)

    def share_out(self, process_count: int) -> None:
        """So many processes make the rest of a map-style dataset's epoch."""
        self.counts.share_out(process_count)
        self._resumed_states = [None] * process_count

    def freeze_states(self) -> None:
        """The iterator ends: the shards' states stay as they are now."""
        if self.shard_states_now is not None:
            self._resumed_states = self.shard_states
            self.shard_states_now = None

    def finish(self) -> None:
        self.counts.finish()


class CountedPulls:
    """The work of both iterators with the sampler: counting, noting its states, resuming it."""

    _progress: Progress
    _index_sampler: Any
    _sampler_iter: Any
    _is_sampler_stateful: bool
    _pulled_place = 0  # of the first sample that was pulled last, in the order of the epoch
    _next_place = 0  # of the first sample that is pulled next
    # Batches that a resumed epoch has to make before it goes on: their indices, and the place of
    # the first sample of each.
    _left_out: deque[tuple[Any, int]]

    def _next_index(self) -> Any:
        if self._left_out:
            index, self._pulled_place = self._left_out.popleft()
        else:
            index = self._pull_sampler()
        self._progress.pull()
        return index

    def _pull_sampler(self) -> Any:
        index = next(self._sampler_iter)
        self._note_place(index)
        state = self._take_sampler_state() if self._is_sampler_stateful else None
        self._progress.note_sampler(index, state)
        return index

    def _note_place(self, index: Any) -> None:
        if isinstance(self._index_sampler, RankBatchSampler):
            self._pulled_place = self._index_sampler.first_place
            return
        self._pulled_place = self._next_place
        self._next_place += len(index) if isinstance(index, (list, tuple)) else 1

    def _place_of_pulled(self) -> int:
        """Where the indices that were pulled last begin in the order of the epoch."""
        return self._pulled_place

    def _undo_seed(self, loader: GeneratorHolder) -> None:
        """Takes back the draws of making an iterator in the place of one that was only reset."""
        if not self._progress.draws_seed:
            self._progress.start.put_back_globals()
            self._progress.start.put_back_own(loader)
            self._sampler_iter = iter(self._index_sampler)

    def _note_sampler(self) -> None:
        """To be called with each new ``_sampler_iter``."""
        self._pulled_place = self._next_place = 0
        self._left_out = deque()
        if isinstance(self._index_sampler, RankBatchSampler):
            self._progress.share = self._index_sampler.share(*self._index_sampler.start)
        self._is_sampler_stateful = any(map(is_stateful, self._sampler_parts().values()))

    def _sampler_parts(self) -> dict[str, Any]:
        return {
            "index_sampler": self._index_sampler,
            "sampler": getattr(self._index_sampler, "sampler", None),
            "iterator": self._sampler_iter,
        }

    def _take_sampler_state(self) -> dict[str, Any]:
        return {
            name: copy.deepcopy(part.state_dict())
            for name, part in self._sampler_parts().items()
            if is_stateful(part)
        }

    def _resume_sampler(self) -> None:
        """Moves the sampler to the place where a resumed epoch goes on: by its state, or by
        repeating its pulls. Batches that were delivered out of turn are left out.
        """
        point = self._progress.point
        if point is None:
            return
        self._move_sampler(point)
        for place in range(point.left.first, point.left.through):
            index = self._pull_sampler()
            if place in point.left.missing:  # the sampler may fill the same list again
                kept = index.copy() if type(index) is list else index
                self._left_out.append((kept, self._pulled_place))

    def _move_sampler(self, point: ResumePoint) -> None:
        """To the first batch that is left."""
        state = point.sampler_state
        if state is None:
            if isinstance(self._index_sampler, RankBatchSampler):
                return  # which begins there by itself
            for _ in range(point.left.first):
                index = next(self._sampler_iter, None)
                if index is not None:
                    self._note_place(index)
            return
        self._next_place = state["samples_yielded"]
        for name, part in self._sampler_parts().items():
            if name in state and name != "iterator":
                part.load_state_dict(state[name])
        self._sampler_iter = iter(self._index_sampler)
        if "iterator" in state:
            self._sampler_iter.load_state_dict(state["iterator"])

    def _pull_ahead(self) -> None:
        """Has the sampler make the draws of its first pull, while generators are replayed."""
        if self._progress.is_replayed and not self._is_sampler_stateful:
            self._sampler_iter = itertools.chain(
                [*itertools.islice(self._sampler_iter, 1)], self._sampler_iter
            )
