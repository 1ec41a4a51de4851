# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job in C++ and in Python read one order, and each resumes from the other's state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpp_loader import Draws, as_numbers, run_cpp
from torch.utils.data import Sampler

import penstock

SIZE = 22
REMAINDERS = ["pad", "drop", "uneven"]


class Backwards(Sampler[int]):
    """As the dataset of loader_main.cpp, whose name the state has."""

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(range(SIZE)))

    def __len__(self) -> int:
        return SIZE


def python_rank(rank: int, world_size: int, **options: Any) -> Any:
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    if options.pop("is_backwards", False):
        options["sampler"] = Backwards()
    of_ranks = {
        name: options.pop(name) for name in ("global_batch_size", "remainder") if name in options
    }
    ranks = penstock.Ranks(rank, world_size, **of_ranks)
    return penstock.DataLoader(Draws(SIZE), ranks=ranks, **options)


def cpp_rank(rank: int, world_size: int, remainder: str = "pad", **given: Any) -> list[Any]:
    options = {**given.pop("options"), "job": [rank, world_size, REMAINDERS.index(remainder)]}
    return run_cpp(size=SIZE, options=options, **{"seed": 3 + rank, **given})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"global_batch_size": 6, "shuffle": True},
        {"batch_size": 3, "shuffle": True, "generator": 9},
        {"global_batch_size": 6},
        {"global_batch_size": 6, "is_backwards": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_cpp_rank_yields_the_batches_of_a_python_rank(
    options: dict[str, Any], remainder: str
) -> None:
    loader = python_rank(1, 3, remainder=remainder, **options)
    expected = [as_numbers(batch) for _ in range(2) for batch in loader]
    for workers in (0, 3):
        given = {**options, "num_workers": workers}
        assert cpp_rank(1, 3, remainder, options=given, epochs=2) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", [{"shuffle": True}, {"is_backwards": True}], ids=str)
def test_job_resumes_across_cpp_and_python_with_other_rank_counts(
    order: dict[str, Any],
) -> None:
    options = {"global_batch_size": 6, **order}
    whole = [as_numbers(batch) for batch in python_rank(0, 1, **options)]

    def part(step: Any, rank: int, world_size: int) -> Any:
        first, end = rank * 6 // world_size, (rank + 1) * 6 // world_size
        columns = [(column, len(column) // 6) for column in step]
        return [column[first * width : end * width] for column, width in columns]

    first = python_rank(2, 3, **options)
    iterator = iter(first)
    assert as_numbers(next(iterator)) == part(whole[0], 2, 3)
    state = json.loads(json.dumps(first.state_dict()))
    *middle, state = cpp_rank(1, 2, options=options, state=state, stop=1)
    assert middle == [part(whole[1], 1, 2)]
    last = python_rank(0, 3, **options)
    last.load_state_dict(state)
    assert as_numbers(next(iter(last))) == part(whole[2], 0, 3)
    assert cpp_rank(0, 1, options=options, state=last.state_dict()) == whole[3:]


def joined(parts: list[Any]) -> list[Any]:
    """Return the columns of a step, from the columns of each rank's part."""
    return [sum(columns, []) for columns in zip(*parts, strict=True)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("order", [{"shuffle": True}, {"is_backwards": True}], ids=str)
def test_uncommitted_steps_move_between_cpp_and_python_ranks(order: dict[str, Any]) -> None:
    """They are of two epochs, and each job has another number of ranks."""
    options = {"global_batch_size": 6, **order}
    loader = python_rank(0, 1, **options, remainder="uneven")
    whole = [as_numbers(batch) for _ in range(2) for batch in loader]  # 4 steps an epoch
    in_cpp = {"options": {**options, "commit": True, "num_workers": 2}}

    states = []
    for rank in range(3):
        loader = python_rank(rank, 3, commit="manual", **options, remainder="uneven")
        ids = []
        for _ in range(2):
            for _ in loader:
                ids.append(loader.batch_id())
                if len(ids) == 7:
                    break
        for number, one in enumerate(ids):
            if number not in (1, 2, 4, 5):
                loader.commit(one)
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert states[1:] == states[:-1]

    # C++ ranks are given the steps that are left, in the middle of the epoch and to its end.
    of_cpp = [
        cpp_rank(rank, 2, "uneven", state=states[0], stop=3, keep=[0], **in_cpp)
        for rank in range(2)
    ]
    parts = [[joined([*step]) for step in zip(*(one[:-2] for one in of_cpp), strict=True)]]
    assert of_cpp[0][-2:] == of_cpp[1][-2:]
    state = of_cpp[0][-1]
    assert state["version"] == 6 and state["sampler"][1]["left"]["runs"] == [[1, 6, 6]]
    of_cpp = [cpp_rank(rank, 3, "uneven", state=state, keep=[0, 1], **in_cpp) for rank in range(3)]
    parts += [[joined([*step]) for step in zip(*(one[:-2] for one in of_cpp), strict=True)]]
    assert of_cpp[0][-2:] == of_cpp[1][-2:] == of_cpp[2][-2:]
    assert parts == [[whole[at] for at in (1, 2, 4)], [whole[at] for at in (1, 5, 7)]]
    assert of_cpp[0][-2] == [[0, 1], [1, 1]]

    last = [
        python_rank(rank, 2, commit="manual", **options, remainder="uneven") for rank in range(2)
    ]
    rows = []
    for loader in last:
        loader.load_state_dict(of_cpp[0][-1])
        rows.append([as_numbers(batch) for batch in loader.redeliver()])
        assert loader.outstanding == ((0, 1), (1, 1))
    assert [joined([*step]) for step in zip(*rows, strict=True)] == [whole[1], whole[5]]


@pytest.mark.parametrize("order", [{"shuffle": True}, {}], ids=str)
def test_states_after_reshard_resume_across_cpp_and_python(order: dict[str, Any]) -> None:
    options = {"global_batch_size": 4, "remainder": "uneven", **order}
    of_cpp = {**order, "global_batch_size": 4, "num_workers": 2}
    whole = [batch[0].tolist() for batch in python_rank(0, 1, **options)]
    assert len(whole) == 6
    python = python_rank(0, 2, **options)
    iterator = iter(python)
    assert next(iterator)[0].tolist() == whole[0][:2]
    python.reshard(0, 1)
    assert next(iterator)[0].tolist() == whole[1]
    state = json.loads(json.dumps(python.state_dict()))
    python.reshard(1, 4)
    assert python.state_dict() == state
    # The state of one rank, and two changes of a loader in C++: to 4 ranks and to 2.
    *batches, after = cpp_rank(
        0, 1, "uneven", options=of_cpp, state=state, reshards=[[1, 1, 4], [2, 1, 2]], stop=3
    )
    assert [batch[0] for batch in batches] == [whole[2], whole[3][1:2], whole[4][2:]]
    last = python_rank(0, 3, **options)
    last.load_state_dict(after)
    last.reshard(0, 1)
    given = [batch[0].tolist() for batch in last]
    assert given == whole[5:]
    for _ in range(3):
        next(iterator)  # as the fourth of four ranks
    # Only Python has the states of samplers and datasets, which there are none of here.
    of_python = {name: value for name, value in python.state_dict().items() if name in after}
    assert {**of_python, "dataset": None} == after
    assert after["_sampler_iter_yielded"] == 5


def test_cpp_rank_reshards_as_a_python_rank() -> None:
    options = {"batch_size": 3, "shuffle": True, "generator": 9}
    for remainder in REMAINDERS:
        loader = python_rank(1, 2, remainder=remainder, **options)
        expected = []
        for _ in range(2):
            for batch in loader:
                expected.append(as_numbers(batch))
                if len(expected) == 2:
                    loader.reshard(0, 3)
        given = {**options, "num_workers": 2}
        *batches, _ = cpp_rank(1, 2, remainder, options=given, epochs=2, reshards=[[2, 0, 3]])
        assert batches == expected


def test_offloaded_part_is_used_after_reshard() -> None:
    source = """
def forward(self, index, own, batch):
    x = torch.sin(own.remainder(1000).float()) * torch.exp(-batch.remainder(7).float())
    return torch.cos(x) + torch.sqrt(index.float() + 1).sum()
"""
    options = {"batch_size": 4, "shuffle": True, "job": [0, 1, 2]}
    reshards = [[12, 1, 2], [20, 0, 3]]
    given: dict[str, Any] = {"size": 200, "seed": 3, "offload": source, "reshards": reshards}
    *expected, used_count = run_cpp(options=options, **given)
    assert used_count == 0
    *results, used_count = run_cpp(options={**options, "num_workers": 2}, **given)
    assert results == expected
    assert used_count > 15  # of about 28 batches, from the fifth one on


@pytest.mark.parametrize("numbers", [[2, 2], [-1, 2], [0, 0]])
def test_impossible_numbers_are_refused_by_reshard(numbers: list[int]) -> None:
    options = {"global_batch_size": 6}
    rank, world_size = numbers
    message = f"0 <= rank < world_size, got rank={rank} and world_size={world_size}"
    with pytest.raises(AssertionError, match=message):
        cpp_rank(0, 2, options=options, reshards=[[1, rank, world_size]])
    with pytest.raises(ValueError, match=message):
        python_rank(0, 2, **options).reshard(rank, world_size)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 7}, "is 7 and there are 2 ranks, so their batches cannot have"),
        ({"global_batch_size": 1}, "is 1 and there are 2 ranks, but must be at least 2"),
        ({"batch_size": 3, "global_batch_size": 6}, "batch_size is 3 and global_batch_size is 6"),
        ({"batch_size": None}, "shard_by_rank requires a batch size"),
        ({"rank": 1}, "a DistributedSampler, which already shards the samples"),
    ],
)
def test_batches_that_ranks_cannot_share_are_rejected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        cpp_rank(1, 2, options=options)


@pytest.mark.long
def test_unknown_rank_is_rejected() -> None:
    with pytest.raises(AssertionError, match="0 <= rank < world_size, got rank=2 and world_size=2"):
        cpp_rank(2, 2, options={"batch_size": 2})


def test_iterable_dataset_is_rejected_with_ranks() -> None:
    with pytest.raises(AssertionError, match="an IterableDataset, which has no order that ranks"):
        cpp_rank(1, 2, options={"batch_size": 2}, iterable=True)


@pytest.mark.long
def test_rank_options_require_shard_by_rank() -> None:
    with pytest.raises(AssertionError, match="global_batch_size=6 requires shard_by_rank"):
        run_cpp(size=SIZE, options={"global_batch_size": 6}, seed=3)
