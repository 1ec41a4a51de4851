# SPDX-License-Identifier: Apache-2.0
"""States that a loader cannot resume from: it reports why, and which of the two to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resumed_streams import COUNT, Backwards, Counted, Remembering, Shards, state_after
from stream_oracle import error_of
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader, Ranks
from penstock.errors import UnsupportedError


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"batch_size": 5}, "batch_size 4 and this one has batch_size 5"),
        ({"drop_last": True}, "drop_last False and this one has drop_last True"),
        ({"dataset": Counted(9)}, f"dataset length {COUNT} and this one has dataset length 9"),
        ({"dataset": Shards()}, "kind 'map' and this one has kind 'iterable'"),
        ({"seeding": "batch"}, "seeding 'worker' and this one has seeding 'batch'"),
        ({"shuffle": True}, "sampler 'SequentialSampler' and this one has sampler 'RandomS"),
        ({"sampler": Backwards()}, "this one has sampler 'Backwards'"),
    ],
)
def test_state_of_differently_built_loader_is_rejected(others: dict[str, Any], words: str) -> None:
    state = state_after(lambda: DataLoader(Counted(), batch_size=4), 2)
    loader: Any = DataLoader(**{"dataset": Counted(), "batch_size": 4, **others})
    error = error_of(lambda: loader.load_state_dict(state))
    assert type(error) is ValueError
    assert words in str(error)


def test_state_of_other_batch_sampler_is_rejected() -> None:
    def make(size: int) -> Any:
        return DataLoader(Counted(), batch_sampler=BatchSampler(Backwards(), size, False))

    state = make(3).state_dict()
    error = error_of(lambda: make(4).load_state_dict(state))
    assert type(error) is ValueError
    assert "BatchSampler of 3 over Backwards" in str(error)


def test_state_of_one_generator_is_rejected_by_two() -> None:
    """A state has a generator once that the loader and its sampler share."""

    def make(*generators: torch.Generator) -> Any:
        data = Counted()
        sampler = RandomSampler(data, generator=generators[-1])
        return DataLoader(data, 4, sampler=sampler, generator=generators[0])

    shared = make(torch.Generator()).state_dict()
    assert [*shared["generators"]["own"]] == ["loader"]
    make(torch.Generator()).load_state_dict(shared)
    apart = make(torch.Generator(), torch.Generator())
    assert [*apart.state_dict()["generators"]["own"]] == ["loader", "sampler"]
    with pytest.raises(ValueError, match="a dictionary with 'sampler', whose generator is another"):
        apart.load_state_dict(shared)


def test_state_of_other_shard_count_is_rejected() -> None:
    state = state_after(lambda: DataLoader(Shards(), batch_size=3, num_workers=2), 2)
    error = error_of(lambda: DataLoader(Shards(), batch_size=3).load_state_dict(state))
    assert type(error) is ValueError
    assert "shards 2 and this one has shards 1" in str(error)


def test_foreign_or_newer_state_is_rejected() -> None:
    loader = DataLoader(Counted(), batch_size=4)
    error = error_of(lambda: loader.load_state_dict({"_snapshot": {}}))
    assert type(error) is ValueError
    assert "of penstock's DataLoader, got the keys ['_snapshot']" in str(error)
    state = {**loader.state_dict(), "version": 99}
    error = error_of(lambda: loader.load_state_dict(state))
    assert type(error) is ValueError
    assert "version 99, but this penstock supports versions 1 to 6" in str(error)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (
            DataLoader(Counted(), num_workers=2, in_order=False, ranks=Ranks(rank=0, world_size=1)),
            "set in_order=True",
        ),
        (DataLoader(IterableWrapper(range(3))), "does not support datapipes"),
    ],
    ids=["ranks in free order", "datapipe"],
)
def test_loader_without_states_has_no_state_dict(loader: Any, words: str) -> None:
    error = error_of(lambda: loader.state_dict())
    assert isinstance(error, UnsupportedError)
    assert words in str(error)
    assert not hasattr(loader, "state_dict"), "accelerate calls it where it is"
    error = error_of(lambda: loader.load_state_dict({}))
    assert isinstance(error, UnsupportedError)


@pytest.mark.parametrize("workers", [0, 2])
def test_error_in_dataset_load_state_dict_is_raised_by_next(
    workers: int,
) -> None:
    class Refusing(Remembering):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise LookupError("no such place")

    def make() -> Any:
        return DataLoader(Refusing(), 3, num_workers=workers)

    loader = make()
    loader.load_state_dict(state_after(make, 2, asks_before=True))
    error = error_of(lambda: next(iter(loader)))
    assert type(error) is LookupError
    assert "no such place" in str(error)


@pytest.mark.parametrize("state", [None, [], "loader.pt", 3])
def test_non_dict_state_raises_type_error(state: Any) -> None:
    """`load_state_dict(checkpoint.get("lodaer"))` silently restarted at the first batch."""
    loader = DataLoader(Counted(), batch_size=4)
    with pytest.raises(TypeError) as raised:
        loader.load_state_dict(state)
    assert repr(state) in str(raised.value) and "state_dict()" in str(raised.value)


def test_empty_state_warns_and_starts_a_new_epoch() -> None:
    loader = DataLoader(Counted(), batch_size=4)
    with pytest.warns(
        UserWarning, match="empty dictionary, so the loader starts a new epoch"
    ) as said:
        loader.load_state_dict({})
    assert said[0].filename == __file__
    assert len([*loader]) == len(loader)
