# SPDX-License-Identifier: Apache-2.0
"""A state is data, regardless of who wrote it: it yields its stream, or is rejected with the place
of the mistake.

A checkpoint that torch.load(weights_only=True) had read ran code: bytes in place of a dataset's
state were taken for a worker's bytes, and unpickled.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resumed_streams import (
    Counted,
    Remembering,
    Shards,
    StatefulSampler,
    WithCursor,
    rest_of,
    seed_all,
    state_after,
    take,
)
from torch.utils.data import SequentialSampler

from penstock import DataLoader, Ranks

CASES: dict[str, Any] = {
    "map": lambda: DataLoader(Counted(), 4, shuffle=True, seeding="batch"),
    "sampler": lambda: DataLoader(Counted(), 4, sampler=StatefulSampler()),
    "iterable": lambda: DataLoader(Shards(), 4, seeding="batch", shards=2),
    "dataset with a state": lambda: DataLoader(Remembering(), 4),
    "iterator with a state": lambda: DataLoader(WithCursor(), 4, seeding="batch", shards=2),
    "rank": lambda: DataLoader(Counted(), 4, ranks=Ranks(rank=0, world_size=2)),
    "skipped samples": lambda: DataLoader(Counted(failing=5), 4, on_error="skip"),
    "own generator": lambda: DataLoader(
        Counted(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}
# Parts that belong to the program's objects, which have to judge them, and the objects' names.
OF_THE_PROGRAM = {"dataset", "iterator", "index_sampler", "sampler", "batch_sampler"}
HOLDERS = {"dataset", "iterator", "samplers", "shards", "_index_sampler_state"}


class RunsCode:
    """Pickled, a call that leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def hostile_values(path: Path) -> list[Any]:
    return [
        None,
        True,
        -1,
        7,
        1 << 70,
        float("nan"),
        "text",
        "",
        b"\x80bytes",
        pickle.dumps(RunsCode(path)),
        [],
        [1, "two"],
        {},
        {"a": 1},
        (),
        object(),
        Path,
        torch.zeros(3),
    ]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a state, of parts and of leaves; of a long list the first and the last."""
    if path and path[-1] in OF_THE_PROGRAM and path[0] in HOLDERS:
        return
    if path[:1] == ("commits",) and path[5:6] == (2,):
        return  # the indices of a batch, which are the sampler's
    if path:
        yield path
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    elif isinstance(value, (list, tuple)):
        for index in sorted({0, len(value) - 1} & {*range(len(value))}):
            yield from leaves(value[index], (*path, index))


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the state with another value at one place."""
    if not path:
        return value
    copied = list(state) if isinstance(state, tuple) else copy.copy(state)
    copied[path[0]] = replaced(state[path[0]], path[1:], value)
    return copied


def without(state: Any, path: tuple[Any, ...]) -> Any:
    if len(path) == 1:
        if isinstance(state, dict):
            return {name: part for name, part in state.items() if name != path[0]}
        return [part for index, part in enumerate(state) if index != path[0]]
    copied = list(state) if isinstance(state, tuple) else copy.copy(state)
    copied[path[0]] = without(state[path[0]], path[1:])
    return copied


def outcome(make: Any, state: Any) -> Any:
    """The stream of a loader that was given the state, and its state; or the error."""
    seed_all(11)
    loader = make()
    try:
        loader.load_state_dict(state)
        iterator = iter(loader)
        loader.state_dict()
        return take(iterator, 99)
    except (ValueError, TypeError) as error:
        return error


@pytest.mark.slow
@pytest.mark.long(
    *(f"{count}-{case}" for case in CASES if case != "map" for count in (0, 99)),
)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
@pytest.mark.parametrize("count", [0, 3, 99])
def test_altered_state_is_rejected_or_resumes_and_runs_no_code(
    make: Any, count: int, tmp_path: Path
) -> None:
    assert_rejected_or_resumed(make, state_after(make, count), tmp_path / "touched")


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [0, 1])
def test_altered_state_of_commits_is_rejected_or_resumes_and_runs_no_code(
    earlier: int, tmp_path: Path
) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, seeding="batch", commit="manual")

    loader = make()
    for _ in range(earlier):
        for number, batch in enumerate(loader):
            if number != 1:
                loader.commit(batch)
    batches = iter(loader)
    loader.commit([next(batches) for _ in range(3)][-1])
    state = loader.state_dict()
    assert state["left"]["missing"] and bool(state["commits"]["earlier"]) == bool(earlier)
    assert_rejected_or_resumed(make, state, tmp_path / "touched")


def assert_rejected_or_resumed(make: Any, state: Any, touched: Path) -> None:
    is_under_way = not state["_iterator_finished"]
    for path in leaves(state):
        changes = [replaced(state, path, value) for value in hostile_values(touched)]
        for changed in [*changes, without(state, path)]:
            seen = outcome(make, changed)
            if isinstance(seen, Exception):
                assert str(seen), path
            elif is_under_way and path[0] in ("shards", "generators", "built", "left"):
                assert isinstance(seen, list)
    assert not touched.exists(), "nothing of a state is run"


def test_error_names_the_place_of_the_mistake() -> None:
    make = CASES["dataset with a state"]
    state = state_after(make, 3)
    for path, value, words in [
        (("shards", "states", 0), b"\x80\x04", "state['shards']['states'][0] must be a dictionary"),
        (("shards", "counts", 0), "3", "state['shards']['counts'][0] must be an integer from 0"),
        (("generators", "globals", "torch"), "AAAA", "state['generators']['globals']['torch']"),
        (("base_seed",), 1.5, "state['base_seed'] must be an integer"),
        (("epoch",), -1, "state['epoch'] must be an integer from 0"),
        (("built", "kind"), ["map"], "state['built']['kind'] must be a number, a string or None"),
    ]:
        error = outcome(make, replaced(state, path, value))
        assert type(error) is ValueError and words in str(error)


def test_numpy_generator_position_out_of_range_is_rejected() -> None:
    """NumPy accepts it, and reads memory that it does not own."""
    make = CASES["map"]
    state = state_after(make, 1)
    for place in (625, 1 << 20, -1):
        changed = replaced(state, ("generators", "globals", "numpy", "state", "pos"), place)
        error = outcome(make, changed)
        assert type(error) is ValueError and "['pos'] must be an integer from 0 to 624" in str(
            error
        )


@pytest.mark.parametrize("place", [("shards", "states", 0), ("shards", "before")])
@pytest.mark.parametrize("make", [CASES["dataset with a state"], CASES["map"]], ids=("list", "map"))
def test_checkpoint_bytes_are_not_unpickled(
    make: Any, place: tuple[Any, ...], tmp_path: Path
) -> None:
    state = state_after(make, 2)
    touched = tmp_path / "touched"
    evil = pickle.dumps(RunsCode(touched))
    state["shards"]["states"] = [None]
    changed = replaced(state, place, [evil] if place[-1] == "before" else evil)
    torch.save(changed, tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert type(outcome(make, read)) is ValueError
    assert not touched.exists()


@pytest.mark.parametrize("name", ["dataset", "__class__", "_iterator", "generator", "state_dict"])
def test_state_cannot_name_attributes_other_than_samplers(name: str) -> None:
    make = CASES["sampler"]
    state = make().state_dict()
    state["samplers"] = {name: {"yielded": 0}}
    error = outcome(make, state)
    assert type(error) is ValueError and "state['samplers'] must be" in str(error)


def test_state_of_another_order_or_dataset_is_rejected() -> None:
    state = state_after(CASES["map"], 3)
    for make in (
        lambda: DataLoader(Counted(9), 4, shuffle=True, seeding="batch"),
        lambda: DataLoader(Counted(), 4, sampler=SequentialSampler(range(23)), seeding="batch"),
        CASES["iterable"],
        CASES["sampler"],
    ):
        assert type(outcome(make, state)) is ValueError


def test_position_after_the_last_batch_is_rejected() -> None:
    for name in ("map", "iterable"):
        make = CASES[name]
        state = state_after(make, 3)
        for key in ("_sampler_iter_yielded", "_num_yielded"):
            state[key] = 50
        if name == "iterable":
            state["shards"]["counts"] = [25, 25]
        error = outcome(make, state)
        assert type(error) is ValueError, name


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(), parts, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(sorted(CASES)), count=st.sampled_from([0, 2, 99]))
def test_randomly_altered_states_are_rejected_or_resume(
    data: st.DataObject, name: str, count: int
) -> None:
    make = CASES[name]
    state = state_after(make, count)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(leaves(state))))
        if data.draw(st.booleans()):
            state = replaced(state, path, data.draw(_JSON))
        else:
            state = without(state, path)
        if not state:
            return
    seen = outcome(make, state)
    assert isinstance(seen, (list, ValueError, TypeError))


def test_unaltered_state_resumes() -> None:
    """The oracle of the tests above: a state rejected there is rejected for the change."""
    random.seed(1)
    for make in CASES.values():
        state = state_after(make, 1)
        assert len(rest_of(make, state)) > 0
