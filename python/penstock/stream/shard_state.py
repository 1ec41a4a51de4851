# SPDX-License-Identifier: Apache-2.0
"""The states of datasets and of their iterators, and how a shard goes on from where it was left.

An object with ``state_dict()`` and ``load_state_dict()`` is asked for its state after each batch
and given it back at a resume. Any other iterable dataset is read again up to the place. A map-style
dataset is one shard for each process that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, Sampler, default_collate, default_convert

from penstock.stream.batch_seeds import GeneratorsKept

_NOTHING = object()


class ShardStart(NamedTuple):
    """Where a shard goes on. Picklable when the state is."""

    batch_count: int  # made of it before, those that raised included
    state: dict[str, Any] | None  # from shard_state()


ShardStarts = dict[int, ShardStart]  # by shard; those that begin at their beginning are left out


def is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def shard_state(fetcher: Any, dataset: Any) -> dict[str, Any] | None:
    """The state of ``dataset`` and of the iterator that torch's ``fetcher`` has of it.

    None when neither has one.
    """
    iterator = getattr(fetcher, "dataset_iter", None)
    state = {}
    if iterator is not dataset and is_stateful(dataset):
        state["dataset"] = dataset.state_dict()
    if iterator is not None and is_stateful(iterator):
        state["iterator"] = iterator.state_dict()
    if state and iterator is not None:
        state["ended"] = fetcher.ended
    return state or None


def load_dataset_state(dataset: Any, start: ShardStart | None) -> None:
    """Gives a dataset its state back; to be called before it is iterated."""
    if start is not None and start.state is not None and "dataset" in start.state:
        dataset.load_state_dict(start.state["dataset"])


def load_between_epochs(iterated: Any, state: Any) -> None:
    """Gives a dataset or a sampler the state that it had after an epoch, or before its first.

    What keeps its place says with such a state that it is at its end, and goes on there: its next
    pass has nothing. That pass belongs to the epoch before, so it is made here. Where the next pass
    has something, the state is given once more, since the first of it was taken. Not so for a
    map-style dataset.
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
    """Gives a dataset the state that its shard had after an epoch, from :func:`shard_state`.

    Its iterator of that epoch may have kept what the next one goes on with: the global generators,
    say.
    """
    if "iterator" in state:
        iter(dataset).load_state_dict(state["iterator"])
    if "dataset" in state:
        load_between_epochs(dataset, state["dataset"])


def draws_nothing(collate_fn: Callable[[Any], Any]) -> bool:
    """Whether it is torch's own or one of penstock's, which draw no random numbers."""
    is_ours = getattr(collate_fn, "draws_nothing", False)
    return is_ours or collate_fn in (default_collate, default_convert)


def continue_iteration(
    fetcher: Any, start: ShardStart, indices: Any, before_batch: Callable[[int], None]
) -> None:
    """Moves torch's fetcher of an iterable dataset, just made, to where its shard was left.

    With a state that is given back. Without one the batches are made again and dropped, each after
    ``before_batch(place)``, from place 1; one that raises takes its place as it did before.
    """
    if start.state is not None:
        if "iterator" in start.state:
            fetcher.dataset_iter.load_state_dict(start.state["iterator"])
        fetcher.ended = start.state.get("ended", False)
        return
    collate_fn = fetcher.collate_fn
    if draws_nothing(collate_fn):
        fetcher.collate_fn = _drop  # one of the user's may draw numbers that change later samples
    try:
        for place in range(1, start.batch_count + 1):
            before_batch(place)
            try:
                fetcher.fetch(indices)
            except StopIteration:
                break
            except Exception:
                pass  # it was raised before the state was taken
    finally:
        fetcher.collate_fn = collate_fn


def _drop(samples: Any) -> None:
    return None
