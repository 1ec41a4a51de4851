# SPDX-License-Identifier: Apache-2.0
"""The states of datasets and their iterators, and how a shard continues from an earlier place.

An object with ``state_dict()`` and ``load_state_dict()`` is asked for its state once the loader's
is wanted, every so many steps, and gets it back at a resume. Later batches are made again, and so
are the batches of any other iterable dataset, up to the place. A map-style dataset is one shard for
each process that reads it.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import IterableDataset, Sampler, default_collate, default_convert

from penstock import _C
from penstock.stream.batch_seeds import GeneratorsKept, generator_states, restore

_NOTHING = object()
_State = TypeVar("_State")


class ShardStart(NamedTuple):
    """Place where a shard continues. Picklable if the state is."""

    batch_count: int  # batches made before, including failed ones
    # From shard_state(). Its "batches" is the count after which it was taken, if not the last one.
    state: dict[str, Any] | None

    @property
    def state_count(self) -> int:
        """Return the number of batches that need not be made again."""
        return 0 if self.state is None else int(self.state.get("batches", self.batch_count))


ShardStarts = dict[int, ShardStart]  # by shard; without shards that start at their first batch


@dataclass(frozen=True, slots=True)
class StateFailure:
    """Takes the place of a state that could not be taken. Picklable."""

    text: str

    @staticmethod
    def of(thing: Any, error: Exception) -> StateFailure:
        return StateFailure(
            f"{type(thing).__name__}.state_dict() raised {type(error).__name__}: {error}"
        )


def dated(state: Any, batch_count: int) -> Any:
    """Return the state with the number of batches after which it was taken."""
    return state if isinstance(state, StateFailure) else {"batches": batch_count, **state}


def undated(state: Any, batch_count: int) -> Any:
    """Return the state without that number if it is the one after the last of ``batch_count``."""
    if isinstance(state, StateFailure) or state["batches"] != batch_count:
        return state
    return {name: part for name, part in state.items() if name != "batches"} or None


def is_state_due(sequence: int, every: int, lane_count: int) -> bool:
    """Return whether the state after batch ``sequence`` is part of a snapshot, which has the last
    states of all lanes before a multiple of ``every``."""
    return every <= lane_count or sequence % every >= every - lane_count


def copied_state(state: _State) -> _State:
    """Return a copy as :func:`copy.deepcopy`, nearly as quick as ``list.copy()`` for a state with
    long lists of numbers, such as the order of an epoch."""
    copied: _State = _copied(state, {})
    return copied


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy ``value`` with the ``memo`` of :func:`copy.deepcopy`: a list that occurs twice does so
    in the copy, too."""
    kind = type(value)
    if kind not in (list, dict):
        return copy.deepcopy(value, memo)
    known = memo.get(id(value))
    if known is not None:
        return known
    made: Any = memo.setdefault(id(value), kind())
    if kind is dict:
        made.update((_copied(key, memo), _copied(part, memo)) for key, part in value.items())
    elif _C.has_only_atoms(value):
        made.extend(value)
    else:
        made.extend(_copied(part, memo) for part in value)
    return made


def is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def shard_state(fetcher: Any, dataset: Any) -> dict[str, Any] | StateFailure | None:
    """Return the state of ``dataset`` and of its iterator in torch's ``fetcher``.

    None when neither has one.
    """
    iterator = getattr(fetcher, "dataset_iter", None)
    parts = {"dataset": None if iterator is dataset else dataset, "iterator": iterator}
    state: dict[str, Any] = {}
    for name, part in parts.items():
        if part is not None and is_stateful(part):
            try:
                state[name] = part.state_dict()
            except Exception as error:
                return StateFailure.of(part, error)
    if state and iterator is not None:
        state["ended"] = fetcher.ended
    return state or None


def load_dataset_state(dataset: Any, start: ShardStart | None) -> ResumedDataset | None:
    """Load a dataset's state; call before it is iterated. Returns the object that later passes of
    an iterable dataset need if its state was in the middle of a pass."""
    if start is None or start.state is None or "dataset" not in start.state:
        return None
    is_iterable = isinstance(dataset, IterableDataset)
    resumed = ResumedDataset(dataset) if is_iterable and start.batch_count > 0 else None
    dataset.load_state_dict(start.state["dataset"])
    return resumed


class ResumedDataset:
    """Dataset that continues from a state, and then starts its passes at the first batch.

    Some datasets, including Hugging Face's, start each pass at the place that they once got. Their
    state after the first batch of a pass shows it: it is then the one after the first batch of the
    resumed pass. These datasets get the state back that they had before.
    """

    def __init__(self, dataset: Any) -> None:
        """Construct before the dataset gets its state."""
        self._dataset = dataset
        self._before = self._state()
        self._after_first: Any = None  # batch of the resumed pass

    def fetch_first(self, fetch: Callable[[], Any], restart: Callable[[], None]) -> Any:
        """Return the first batch of a pass, or the exception in its place. ``restart`` makes the
        iterator of ``fetch`` again."""
        before = generator_states()
        try:
            batch = fetch()
        except Exception as error:
            if not self._begins_as_resumed(isinstance(error, StopIteration)):
                raise
        else:
            if not self._begins_as_resumed(is_at_end=False):
                return batch
            del batch
        self._dataset.load_state_dict(self._before)
        restore(before)
        restart()
        return fetch()

    def _begins_as_resumed(self, is_at_end: bool) -> bool:
        state = self._state()
        if isinstance(self._before, StateFailure) or isinstance(state, StateFailure):
            return False
        if self._after_first is None:
            self._after_first = (state, is_at_end)
            return False
        after_first, was_at_end = self._after_first
        return was_at_end == is_at_end and _are_equal(after_first, state)

    def _state(self) -> Any:
        try:
            return copied_state(self._dataset.state_dict())
        except Exception as error:
            return StateFailure.of(self._dataset, error)


def _are_equal(state: Any, other: Any) -> bool:
    try:
        return bool(state == other)
    except Exception:  # for example from tensors with several elements
        return pickle.dumps(state) == pickle.dumps(other)


def load_between_epochs(iterated: Any, state: Any) -> None:
    """Give a dataset or a sampler the state that it had after an epoch, or before its first.

    With such a state, an object that keeps its place is at its end, and continues there: its next
    pass is empty. That pass belongs to the epoch before, so it is made here. If the next pass is
    not empty, the state is given once more, since its first item was taken. This does not apply to
    a map-style dataset.
    """
    load = iterated.load_state_dict
    load(state)
    if not isinstance(iterated, (IterableDataset, Sampler)) and hasattr(iterated, "__getitem__"):
        return
    with GeneratorsKept():
        is_at_end = next(iter(iterated), _NOTHING) is _NOTHING
    if not is_at_end:
        load(state)


def load_shard_between_epochs(dataset: Any, state: dict[str, Any]) -> None:
    """Give a dataset the state that its shard had after an epoch, from :func:`shard_state`.

    Its iterator of that epoch may have kept data that the next one continues with, such as the
    global generators.
    """
    if "iterator" in state:
        iterator = iter(dataset)
        _check_takes(iterator)
        iterator.load_state_dict(state["iterator"])
    if "dataset" in state:
        load_between_epochs(dataset, state["dataset"])


def draws_nothing(collate_fn: Callable[[Any], Any]) -> bool:
    """Return whether it is torch's or one of penstock's, which draw no random numbers."""
    is_ours = getattr(collate_fn, "draws_nothing", False)
    return is_ours or collate_fn in (default_collate, default_convert)


def continue_iteration(
    fetcher: Any, start: ShardStart, indices: Any, before_batch: Callable[[int], None]
) -> None:
    """Move torch's newly made fetcher of an iterable dataset to the place where its shard was left.

    A state is loaded. The batches after it, or all batches without a state, are made again and
    dropped, each after ``before_batch(place)``; one that raises takes its place as it did before.
    """
    if start.state is not None:
        if "iterator" in start.state:
            _check_takes(fetcher.dataset_iter)
            fetcher.dataset_iter.load_state_dict(start.state["iterator"])
        fetcher.ended = start.state.get("ended", False)
    collate_fn = fetcher.collate_fn
    if draws_nothing(collate_fn):
        fetcher.collate_fn = _drop  # a user's function may draw numbers that change later samples
    try:
        for place in range(start.state_count + 1, start.batch_count + 1):
            before_batch(place)
            try:
                fetcher.fetch(indices)
            except StopIteration:
                raise ValueError(
                    f"the state was taken after {start.batch_count} batches of a shard, but the "
                    f"dataset has only {place - 1}; resume with the same dataset"
                ) from None
            except Exception:
                pass  # it was raised before the state was taken
    finally:
        fetcher.collate_fn = collate_fn


def _check_takes(iterator: Any) -> None:
    if not is_stateful(iterator):
        raise ValueError(
            f"the state contains the state of a dataset's iterator, but this iterator is a "
            f"{type(iterator).__name__}, which accepts none; resume with the same dataset"
        )


def _drop(samples: Any) -> None:
    return None
