# SPDX-License-Identifier: Apache-2.0
"""The progress of an epoch: the content of ``state_dict()``, and the start of a resumed epoch.

*Samplers.* The states of a program's sampler are recorded once the first one is requested. Batches
are requested ahead, so a sampler has been pulled further than the batches that the program has
received. Its state is therefore of one of two kinds. A snapshot from before the place: a resume
repeats the pulls since then. Or, at the first call in an epoch, the current state: the indices that
were pulled and whose batches have not been delivered are then a part of the loader's state. Without
workers no batch is requested ahead, so a snapshot is taken when a state is requested, and a
snapshot that is not too old serves it as well.

*Places.* The place of a batch is its number in the order of the sampler. With ``in_order=False`` a
batch is delivered before one with a lower place that its worker still makes. A resumed epoch
requests the skipped places first, from the lowest on, and then all that follow. So a request's
number is its place again as soon as the skipped ones have been requested.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from penstock import _C
from penstock.stream.batch_seeds import GeneratorsKept, generator_states, restore
from penstock.stream.commits import OpenEpoch, PulledBatch
from penstock.stream.places import DeliveredPlaces, PlacesLeft
from penstock.stream.shard_state import (
    ShardStarts,
    StateFailure,
    copied_state,
    dated,
    is_stateful,
    undated,
)

SAMPLERS = ("batch_sampler", "sampler")  # the loader's names for them
_KEPT_ON = 8  # indices are dropped by as many, or more


class GeneratorHolder(Protocol):
    """Loader, or its options, as far as they hold generators from the user."""

    @property
    def generator(self) -> Any: ...

    @property
    def sampler(self) -> Any: ...

    @property
    def batch_sampler(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class GeneratorSnapshot:
    """States of the global generators and of the generators that the user gave to the loader."""

    of_globals: tuple[Any, ...]  # from generator_states()
    of_own: dict[str, torch.Tensor]

    @staticmethod
    def take(loader: GeneratorHolder) -> GeneratorSnapshot:
        own = own_generators(loader)
        return GeneratorSnapshot(generator_states(), {name: own[name].get_state() for name in own})

    def restore_globals(self) -> None:
        restore(self.of_globals)

    def restore_own(self, loader: GeneratorHolder) -> None:
        for name, generator in own_generators(loader).items():
            if name in self.of_own:
                generator.set_state(self.of_own[name])


class GeneratorsReplayed(GeneratorsKept):
    """Sets the global generators to a snapshot, for the time of the context."""

    def __init__(self, snapshot: GeneratorSnapshot) -> None:
        self._snapshot = snapshot

    def __enter__(self) -> None:
        super().__enter__()
        self._snapshot.restore_globals()


class PullsReplayed(GeneratorsReplayed):
    """Sets the global generators and the loader's to a snapshot, for the time of the context: pulls
    draw the same numbers again.
    """

    def __init__(self, snapshot: GeneratorSnapshot, loader: GeneratorHolder) -> None:
        super().__init__(snapshot)
        self._loader = loader

    def __enter__(self) -> None:
        self._now = GeneratorSnapshot.take(self._loader)
        super().__enter__()
        self._snapshot.restore_own(self._loader)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._now.restore_own(self._loader)


def own_generators(loader: GeneratorHolder) -> dict[str, torch.Generator]:
    """Return the generators that the user gave to the loader and its samplers, by their holders."""
    holders = {
        "loader": loader,
        "sampler": loader.sampler,
        "batch_sampler": loader.batch_sampler,
        "batch_sampler.sampler": getattr(loader.batch_sampler, "sampler", None),
    }
    found = {name: getattr(holder, "generator", None) for name, holder in holders.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Generator)}


def sampler_states(loader: GeneratorHolder) -> dict[str, Any] | None:
    """Return the states between epochs of the user's samplers, by the loader's name for them.

    A StateFailure replaces the state of a sampler that does not return it.
    """
    samplers = {name: getattr(loader, name) for name in SAMPLERS}
    states = {
        name: _state_or_failure(sampler)
        for name, sampler in samplers.items()
        if is_stateful(sampler)
    }
    return states or None


def _state_or_failure(thing: Any) -> Any:
    try:
        return copied_state(thing.state_dict())
    except Exception as error:
        return StateFailure.of(thing, error)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Place where a resumed epoch continues."""

    base_seed: int
    left: PlacesLeft
    yielded_count: int
    last_shard_id: int | None
    starts: ShardStarts
    sampler: SamplerPlace
    # Of a map-style dataset with states: the batches that each process makes again, since its state
    # is older than the place.
    repeated: dict[int, int]  # by their number in the epoch, the process
    # The batches that are left, if the sampler has moved on to another epoch.
    pulled: tuple[PulledBatch, ...] | None = None


class Progress:
    """Account of one epoch, kept by its iterator and read by the loader.

    The native stream, if any, counts batches. This class has the parts that only Python knows: the
    generators, the sampler's states, and the states of datasets as objects.

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
        self.epoch = epoch  # input of the random numbers; 0 if seeded by worker
        self.number = 0  # number of the loader's epochs that started before this one
        self.start = start  # before any draws of iter()
        self.start_as_json: dict[str, Any] | None = None  # made on demand
        self.unused_globals: tuple[str, ...] = ()  # global generators without draws
        self.is_replayed = is_replayed  # the global generators are restored after iter()
        self.draws_seed = draws_seed  # a base seed, which persistent workers keep from their first
        self.point = point
        self.base_seed: int | None = None  # until the iterator exists
        self.samplers_before: dict[str, Any] | None = None  # their states before the epoch
        self.counts = _C.EpochProgress(shard_count)
        self.share: _C.RankShare | None = None  # of the rank, if ranks share an order
        self.skips: Any = None  # the account of left-out samples, with on_error="skip"
        # In the trainer process, states are taken when they are requested: the program may have
        # changed the dataset, or drawn, since the last answer.
        self.shard_states_now: Callable[[], list[Any]] | None = None
        # A state is bytes while it is one that a worker of this process sent, in the native
        # account. Checkpointed states are never decoded in this way.
        self.decode_state: Callable[[bytes], Any] = pickle.loads
        # Until workers send others.
        self._resumed_states: list[dict[str, Any] | None] = [None] * shard_count
        # The states of the shards after the epoch before, if persistent workers have them.
        self.states_before: list[Any] = [None] * shard_count
        # The workers have made an epoch before, and the states in which it left their datasets were
        # never requested.
        self.begins_in_unknown_state = False
        self.state_interval: int | None = None  # steps between snapshots; None: none are wanted
        # The last step of resuming, with the generators as they are then.
        self.finish_resuming: Callable[[], None] | None = None
        self.first_step = 0  # steps of the epoch before it was resumed, if ranks share shards
        self.pulled_count = 0
        if point is not None:
            self.pulled_count = point.left.delivered_count
            self.counts.resume(self.pulled_count, point.yielded_count, point.last_shard_id)
            for shard_id, shard in point.starts.items():
                self.counts.set_shard_answers(shard_id, shard.batch_count)
                if shard.state is not None:
                    self._resumed_states[shard_id] = dated(shard.state, shard.batch_count)
        self._resumed_left = PlacesLeft(0) if point is None else point.left
        self.sampler = SamplerNotes(
            self._resumed_left.first, None if point is None else point.sampler
        )
        self._delivered: DeliveredPlaces | None = None  # if batches may be delivered out of order
        self.commits: OpenEpoch | None = None  # if the program commits batches
        self.visits: Any = None  # the record of the epoch's visits, if there is one

    @property
    def answered_count(self) -> int:
        """Return the number of requests whose batch or error the user has received."""
        return self.counts.answered_count

    @property
    def step(self) -> int:
        """Return the number of steps that a rank with separate shards has taken in the epoch."""
        resumed_count = 0 if self.point is None else self.point.left.delivered_count
        return self.first_step + self.answered_count - resumed_count

    @property
    def yielded_count(self) -> int:
        """Return the number of batches that the user has received."""
        return self.counts.yielded_count

    @property
    def shard_counts(self) -> list[int]:
        """Return the number of answers by shard; for map-style datasets, by process."""
        return self.counts.shard_counts

    @property
    def last_shard_id(self) -> int | None:
        return self.counts.last_shard_id

    @property
    def is_finished(self) -> bool:
        return self.counts.is_finished

    @property
    def shard_states(self) -> list[Any]:
        """Return the newest known state of each shard, for a state of the loader. One that is older
        than the last answer has under "batches" the count after which it was taken. A StateFailure
        replaces one that could not be taken."""
        if self.shard_states_now is not None:
            return copied_state(self.shard_states_now())
        return [*map(self._shard_state, range(len(self._resumed_states)))]

    def _shard_state(self, shard_id: int) -> Any:
        answer_count = self.shard_counts[shard_id]
        sent = self.counts.shard_state(shard_id)
        if sent is None:
            resumed = copied_state(self._resumed_states[shard_id])
            return None if resumed is None else undated(resumed, answer_count)
        state = self.decode_state(sent)
        if isinstance(state, StateFailure):
            return state
        return undated(dated(state, self.counts.shard_state_count(shard_id)), answer_count)

    def want_states(self, every: int) -> None:
        """Keep snapshots from now on, about every ``every`` steps."""
        self.state_interval = self.sampler.every = every

    def sampler_place(self) -> SamplerPlace:
        """See :meth:`.SamplerNotes.place`."""
        return self.sampler.place(self.left.first)

    @property
    def left(self) -> PlacesLeft:
        """Return the batches not yet delivered, or not yet committed if the program commits them;
        for iterable datasets, without their shards."""
        if self.commits is not None:
            return self.commits.left()
        if self._delivered is not None:
            return self._delivered.left()
        return self._resumed_left.after(self.answered_count)

    def repeated_places(self) -> dict[int, int]:
        """Return the batches that are made again and dropped, and the process that makes each."""
        return {} if self.point is None else self.point.repeated

    def place_of(self, number: int) -> int:
        """Return the place in the epoch of the batch that request ``number`` asks for."""
        return self._resumed_left.place_of(number)

    def deliver_in_any_order(self) -> None:
        """Call before the first batch if each delivery will be noted by its number."""
        self._delivered = DeliveredPlaces(self._resumed_left)

    def note_delivery(self, number: int) -> None:
        """Note that the batch of request ``number`` is delivered to the program, in any order."""
        if self._delivered is not None:
            self._delivered.note(number)

    @property
    def starts(self) -> ShardStarts:
        return self.point.starts if self.point is not None else {}

    @property
    def first_shard_id(self) -> int:
        """Return the shard whose turn is first, if shards are read in turn."""
        last_shard_id = -1 if self.last_shard_id is None else self.last_shard_id
        return (last_shard_id + 1) % len(self._resumed_states)

    def begin(self, base_seed: int) -> None:
        self.base_seed = base_seed
        if self.commits is not None:
            self.commits.seed_epoch, self.commits.base_seed = self.epoch, base_seed

    def pull(self) -> None:
        """Note that the indices of the next request are available."""
        self.pulled_count += 1

    def note_sampler(self, index: Any, taken_count: int | None) -> None:
        """Note that the sampler gave ``index``. ``taken_count`` is the number of samples of the
        order that were taken, if ranks share it."""
        self.sampler.note(index, self._first_left, taken_count)

    def _first_left(self) -> int:
        return self.left.first

    def answer(self, shard_id: int, is_error: bool) -> None:
        """Note the answer to the next request, in the trainer process."""
        self.counts.answer(shard_id, is_error)

    def answer_pulled(self, shard_id: int, is_error: bool) -> None:
        """Note the answer to the request that was pulled last, if requests are not made ahead. An
        interrupt may have taken pulls before it."""
        missed_count = self.pulled_count - self.counts.answered_count
        if missed_count == 0:
            return  # the sampler itself failed
        for _ in range(missed_count - 1):
            self.counts.skip_answer()
        self.counts.answer(shard_id, is_error)

    def share_out(self, process_count: int) -> None:
        """Have ``process_count`` processes make the rest of a map-style dataset's epoch."""
        self.counts.share_out(process_count)
        self._resumed_states = [None] * process_count

    def end_iterator(self, has_state: bool) -> None:
        """End the iterator, and keep its shards' current states. If none was requested before,
        objects with a state stay alive until the next epoch, for a first request."""
        if has_state and self.state_interval is None:
            return
        if has_state and self.shard_states_now is not None:
            try:
                states = self.shard_states
            except Exception:
                return  # raised again when a state is requested
            self._resumed_states = [
                None if state is None else dated(state, count)
                for state, count in zip(states, self.shard_counts, strict=False)
            ]
        self.shard_states_now = None

    def finish(self) -> None:
        self.counts.finish()
        if self.visits is not None:
            self.visits.end()
        if self.skips is not None:
            self.skips.end()


Take = Callable[[], dict[str, Any]]


class SamplerPlace(NamedTuple):
    """Sampler state, and the steps from there to the first batch that is left."""

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
    """Confined to the trainer's thread. Keeps no data unless the sampler has a state, and then the
    indices not yet delivered and the snapshots that they need.
    """

    def __init__(self, first: int, place: SamplerPlace | None = None) -> None:
        """Take ``first``, the place in the epoch of the first batch that is left, and ``place``,
        the place of a state to continue from."""
        self.every: int | None = None  # pulls between snapshots; None while no states are wanted
        self.is_over = False
        self.is_ahead = True  # the sampler may be pulled further than the delivered batches
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
        """Note a new iterator of the sampler. ``take`` returns the state of both; None if they have
        none."""
        self._take = take

    def note(
        self, index: Any, first_left: Callable[[], int], taken_count: int | None = None
    ) -> None:
        """Note that the sampler gave ``index``; ``first_left()`` is the place of the first batch
        left. ``taken_count``: see :meth:`Progress.note_sampler`."""
        self.pull_count += 1
        self.sample_count += len(index) if isinstance(index, (list, tuple)) else 1
        if taken_count is not None:
            self.sample_count = taken_count
        if self._take is None:
            return
        # The sampler may fill the same list again.
        self._kept.append(index.copy() if type(index) is list else index)
        if len(self._kept) % _KEPT_ON == 0:
            self._forget_before(first_left())
        if self.is_ahead and self.every is not None and self.pull_count % self.every == 0:
            self._notes.append(self._note_now())

    def place(self, first_left: int) -> SamplerPlace:
        """Return the sampler's place, for a state whose first batch left is ``first_left``.

        Raises RuntimeError if the sampler does not return its state.
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
                f"{type(note.state).__name__}: {note.state}; make it return a state at any time, "
                f"or do not call state_dict()"
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
