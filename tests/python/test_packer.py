# SPDX-License-Identifier: Apache-2.0
"""Packed rows: equality with a plain packing, states, ranks, loaders, and invalid input."""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import GlooRanks
from packing_job import LENGTH, packer_of
from pool_processes import PoolProcesses
from torch.utils.data import Dataset

from penstock import DataLoader, Packer, Pool

PACKING_JOB = Path(__file__).with_name("packing_job.py")
Rows = list[list[list[int]]]


def documents_of(seed: int, count: int, length_max: int) -> list[list[int]]:
    """Documents whose tokens are all different, some of them empty."""
    rng = random.Random(seed)
    lengths = [rng.randrange(length_max + 1) for _ in range(count)]
    starts = np.cumsum([1, *lengths]).tolist()
    return [list(range(at, at + length)) for at, length in zip(starts, lengths, strict=False)]


def plain_rows(documents: list[list[int]], row_length: int, open_bins: int, too_long: str) -> Rows:
    """The stated rule, with lists: rows of the parts that are in them."""
    bins: Rows = []
    rows: Rows = []

    def room(row: list[list[int]]) -> int:
        return row_length - sum(map(len, row))

    for document in documents:
        if len(document) > row_length and too_long == "drop":
            continue
        while len(document) > row_length:
            rows.append([document[:row_length]])
            document = document[row_length:]
        if not document:
            continue
        fits = [one for one in bins if room(one) >= len(document)]
        if fits:
            best = min(fits, key=room)  # the oldest of equal ones
            best.append(document)
        else:
            if len(bins) == open_bins and len(document) < row_length:
                rows.append(bins.pop(bins.index(min(bins, key=room))))
            best = [document]
            bins.append(best)
        if room(best) == 0:
            rows.append(bins.pop(bins.index(best)))
    return rows + sorted(bins, key=room)


def rows_of(batch: dict[str, Any], name: str = "tokens") -> Rows:
    """The documents of each row of a batch, by its segment ids."""
    found: Rows = []
    for tokens, ids in zip(
        torch.atleast_2d(batch[name]), torch.atleast_2d(batch["segment_ids"]), strict=True
    ):
        found.append([tokens[ids == one].tolist() for one in range(1, int(ids.max()) + 1)])
    return found


def same(left: Any, right: Any) -> bool:
    """Whether batches are equal to the bit, with their types."""
    return bool(
        len(left) == len(right)
        and all(
            list(a) == list(b)
            and all(
                (type(a[key]) is int and a[key] == b[key])
                if key == "max_seqlen"
                else a[key].dtype == b[key].dtype and torch.equal(a[key], b[key])
                for key in a
            )
            for a, b in zip(left, right, strict=True)
        )
    )


def saved(state: Any) -> Any:
    """A state as another process reads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Documents(Dataset[Any]):
    """Documents of a loader, as records of two streams."""

    def __init__(self, count: int = 90, length_max: int = 40) -> None:
        self.tokens = documents_of(5, count, length_max)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor(self.tokens[index], dtype=torch.int64)
        return {"input_ids": tokens, "loss_mask": (tokens % 3 == 0)}


@pytest.mark.parametrize("too_long", ["split", "drop"])
@pytest.mark.parametrize("open_bins", [1, 2, 7])
def test_rows_are_those_of_the_stated_rule(open_bins: int, too_long: Any) -> None:
    for seed in range(10):
        documents = documents_of(seed, 80, 45)
        policy: Any = "next_fit" if open_bins == 1 else "best_fit"
        packer = Packer(documents, 30, policy=policy, open_bins=open_bins, too_long=too_long)
        expected = plain_rows(documents, 30, open_bins, too_long)
        assert [row for batch in packer for row in rows_of(batch)] == expected
        stats = packer.stats()
        assert stats.rows == stats.steps == len(expected)
        assert stats.tokens == sum(len(part) for row in expected for part in row)
        assert stats.tokens + stats.padding_tokens == 30 * len(expected)
        assert stats.documents == 80
        assert stats.empty_documents == sum(not one for one in documents)
        longer = [len(one) for one in documents if len(one) > 30]
        assert stats.split_documents == (len(longer) if too_long == "split" else 0)
        assert stats.dropped_documents == (len(longer) if too_long == "drop" else 0)
        assert stats.dropped_tokens == (sum(longer) if too_long == "drop" else 0)
        assert packer.plan([len(one) for one in documents]) == stats


def test_batch_describes_its_segments() -> None:
    packer = Packer([[7, 8, 9], [5, 6], [4] * 6, [3]], 6, padding=-1, batch_size=2)
    (batch,) = packer
    assert batch["tokens"].tolist() == [[4, 4, 4, 4, 4, 4], [7, 8, 9, 5, 6, 3]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]]
    assert batch["segment_ids"].tolist() == [[1] * 6, [1, 1, 1, 2, 2, 3]]
    assert batch["cu_seqlens"].tolist() == [0, 6, 9, 11, 12]
    assert batch["cu_seqlens"].dtype == batch["segment_ids"].dtype == torch.int32
    assert batch["max_seqlen"] == 6
    (row,) = Packer([[7, 8, 9]], 5, padding=-1)
    assert row["tokens"].tolist() == [7, 8, 9, -1, -1]
    assert row["positions"].tolist() == [0, 1, 2, 0, 1]
    assert row["segment_ids"].tolist() == [1, 1, 1, 0, 0]
    assert row["cu_seqlens"].tolist() == [0, 3, 5]
    assert row["max_seqlen"] == 3


def test_attention_by_cu_seqlens_is_attention_of_each_document() -> None:
    documents = [torch.randn(length, dtype=torch.float64) for length in (3, 6, 2, 5, 4)]
    for batch in Packer(documents, 8, batch_size=2):
        flat, edges = batch["tokens"].flatten(), batch["cu_seqlens"].tolist()
        ids = batch["segment_ids"].flatten().tolist()
        segments = [flat[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        assert max(map(len, segments)) == batch["max_seqlen"]
        for start, segment in zip(edges, segments, strict=False):
            if ids[start]:
                assert any(torch.equal(segment, one) for one in documents)


def test_streams_are_packed_alike_with_their_padding_and_types() -> None:
    records = [
        {
            "input_ids": np.arange(length, dtype=np.int32),
            "weights": torch.full((length,), 0.5, dtype=torch.bfloat16),
            "labels": list(range(length)),
            "name": "left out",
        }
        for length in (3, 4, 2)
    ]
    padding = {"input_ids": 9, "labels": -100, "weights": 0.0}
    first, second = Packer(records, 6, padding=padding)
    assert list(first) == [*padding, "positions", "segment_ids", "cu_seqlens", "max_seqlen"]
    assert second["input_ids"].tolist() == [0, 1, 2, 9, 9, 9]
    assert second["labels"].tolist() == [0, 1, 2, -100, -100, -100]
    assert second["weights"].tolist() == [0.5, 0.5, 0.5, 0, 0, 0]
    types = [second[name].dtype for name in padding]
    assert types == [torch.int32, torch.int64, torch.bfloat16]
    assert first["labels"].tolist() == [0, 1, 2, 3, 0, 1]


def test_documents_in_memory_that_is_used_again_are_copied() -> None:
    def reusing() -> Iterator[torch.Tensor]:
        memory = torch.empty(3, dtype=torch.int64)
        for value in range(4):
            yield memory.fill_(value)

    rows = list(Packer(reusing(), 6))
    assert [row["tokens"].tolist() for row in rows] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


@pytest.mark.parametrize("too_long", ["split", "drop"])
def test_resume_at_every_step_gives_the_remaining_batches(too_long: Any) -> None:
    documents = documents_of(2, 60, 100)
    # Lists of documents, so that a state has some that were not placed.
    elements = [documents[at : at + 7] for at in range(0, 60, 7)]

    def packer() -> Packer:
        return Packer(elements, 32, open_bins=3, too_long=too_long, batch_size=2)

    one = packer()
    whole, states = [], [saved(one.state_dict())]
    for batch in one:
        whole.append(batch)
        states.append(saved(one.state_dict()))
    for step, state in enumerate(states):
        resumed = packer()
        resumed.load_state_dict(state)
        assert_equal_states(resumed.state_dict(), state)
        assert same(list(resumed), whole[step:]), step
        assert resumed.stats() == one.stats()


def assert_equal_states(left: Any, right: Any) -> None:
    assert repr(left) == repr(right)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_resumes_with_the_packer_in_any_epoch(num_workers: int) -> None:
    def packer(workers: int) -> Packer:
        loader = DataLoader(
            Documents(),
            batch_size=8,
            collate_fn=list,
            shuffle=True,
            num_workers=workers,
            seeding="batch",
            generator=torch.Generator().manual_seed(3),
        )
        padding = {"input_ids": 0, "loss_mask": False}
        return Packer(loader, 64, padding=padding, open_bins=4, batch_size=2)

    one = packer(num_workers)
    whole, states, ends = [], [], []
    for _ in range(2):
        for batch in one:
            whole.append(batch)
            states.append(saved(one.state_dict()))
        ends.append(len(whole))
    assert not same(whole[: ends[0]], whole[ends[0] :])
    for step in (0, 3, ends[0] - 2, ends[0] - 1, ends[0], ends[0] + 4):
        resumed = packer(2 - num_workers)
        resumed.load_state_dict(states[step])
        rest = list(resumed)
        if step < ends[0]:
            rest += list(resumed)
        assert same(rest, whole[step + 1 :]), step


def test_pool_gives_the_rows_of_no_workers(steady_pool: PoolProcesses) -> None:
    records = Documents()
    dataset: Any = [records[index] for index in range(len(records))]

    def rows(**options: Any) -> list[dict[str, Any]]:
        with DataLoader(
            dataset, batch_size=8, collate_fn=list, seeding="batch", **options
        ) as loader:
            return list(Packer(loader, 64, open_bins=4))

    expected = rows()
    pool = Pool(steady_pool.endpoint, code_paths=None)
    assert same(rows(pool=pool, timeout=60), expected)


@pytest.mark.parametrize("remainder", ["pad", "drop"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_ranks_share_the_rows_in_equal_steps(world_size: int, remainder: Any) -> None:
    documents = documents_of(8, 60, 20)
    single = [batch["tokens"] for batch in Packer(documents, 32)]
    ranks = [
        list(
            Packer(
                documents, 32, batch_size=2, remainder=remainder, rank=rank, world_size=world_size
            )
        )
        for rank in range(world_size)
    ]
    step_rows = 2 * world_size
    steps = len(single) // step_rows + (remainder == "pad" and len(single) % step_rows > 0)
    assert {len(one) for one in ranks} == {steps}
    dealt = [
        ranks[at % world_size][step]["tokens"][at // world_size]
        for step in range(steps)
        for at in range(step_rows)
    ]
    count = min(len(dealt), len(single))
    assert all(map(torch.equal, dealt[:count], single[:count]))
    assert not any(row.any() for row in dealt[count:])
    plan = Packer(
        documents, 32, batch_size=2, remainder=remainder, rank=0, world_size=world_size
    ).plan([len(one) for one in documents])
    assert (plan.steps, plan.padding_rows) == (steps, max(0, len(dealt) - len(single)))
    assert plan.dropped_rows == max(0, len(single) - len(dealt))


def test_state_resumes_with_another_number_of_ranks() -> None:
    documents = documents_of(9, 120, 70)  # some documents have several full rows
    single = [batch["tokens"] for batch in Packer(documents, 32, too_long="split")]

    def packers(world_size: int, batch_size: int) -> list[Packer]:
        return [
            Packer(
                documents,
                32,
                too_long="split",
                batch_size=batch_size,
                rank=rank,
                world_size=world_size,
            )
            for rank in range(world_size)
        ]

    given: list[torch.Tensor] = []
    state = None
    for world_size, batch_size in ((2, 2), (4, 1), (1, 3), (3, 1)):
        ranks = packers(world_size, batch_size)
        if state is not None:
            for one in ranks:
                one.load_state_dict(state)
        iterators = [iter(one) for one in ranks]
        for _ in range(3):
            batches = [next(one) for one in iterators]
            given += [
                batches[at % world_size]["tokens"][at // world_size]
                for at in range(world_size * batch_size)
            ]
        states = [saved(one.state_dict()) for one in ranks]
        for one in states[1:]:
            assert_equal_states(one, states[0])
        state = states[-1]
    last = packers(1, 1)[0]
    last.load_state_dict(state)  # type: ignore[arg-type]
    given += [batch["tokens"][0] for batch in last]
    assert len(given) == len(single)
    assert all(map(torch.equal, given, single))


@pytest.mark.slow
def test_documents_are_made_once_for_ranks_that_share_batches(tmp_path: Path) -> None:
    def rows(folder: Path, world_size: int, **given: Any) -> list[list[int]]:
        """Run a job, and return the rows of its ranks in the order of the job."""
        folder.mkdir()
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        job = GlooRanks(PACKING_JOB, folder, world_size, given, environment)
        job.finish_all()
        steps = list(zip(*(job.lines(rank) for rank in range(world_size)), strict=True))
        return [row for step in steps for rows in zip(*step, strict=True) for row in rows]

    (tmp_path / "alone").mkdir()
    alone = packer_of(tmp_path / "alone", None, rank=0, world_size=1)
    expected = [row for batch in alone for row in batch["tokens"].tolist()]
    expected += [[0] * 64] * (-len(expected) % 4)
    assert rows(tmp_path / "whole", 2) == expected
    made = (tmp_path / "whole" / "made").read_text().split()
    assert sorted(map(int, made)) == list(range(LENGTH))
    first = rows(tmp_path / "first", 2, leave_after=3)
    assert first == expected[: 4 * 2 * 2]
    # Three ranks resume from the state of one of two.
    rest = rows(tmp_path / "rest", 3, state=str(tmp_path / "first" / "state-1.pt"))
    assert rest[: len(expected) - 16] == expected[16:]
    assert not any(map(any, rest[len(expected) - 16 :]))


def test_state_is_bounded_by_the_open_bins() -> None:
    packer = Packer(documents_of(1, 4000, 60), 64, open_bins=8)
    most = 0
    for _ in packer:
        streams = packer.state_dict()["pass"]["streams"]
        most = max(most, len(streams["tokens"]))
    assert 64 < most <= 64 * 8 + 64


def test_rest_of_a_long_document_does_not_keep_all_of_it() -> None:
    packer = Packer([torch.arange(10_000), torch.arange(60)], 64, too_long="split")
    rows = iter(packer)
    for _ in range(10_000 // 64):
        next(rows)
    (held,) = packer._pass.held.values()  # type: ignore[union-attr]
    assert held.streams[0].untyped_storage().nbytes() == 8 * (10_000 % 64)


def test_pass_can_be_repeated_and_an_old_iterator_is_refused() -> None:
    packer = Packer(documents_of(1, 30, 20), 32)
    whole = list(packer)
    assert same(list(packer), whole)
    old = iter(packer)
    next(old)
    assert same(list(packer), whole)
    with pytest.raises(RuntimeError, match="use the latest iter"):
        next(old)


def test_best_fit_pads_less_than_next_fit() -> None:
    lengths = np.random.default_rng(1).integers(1, 200, 5000)
    padding = [
        Packer([], 256, policy=policy, open_bins=bins).plan(lengths).padding_fraction
        for policy, bins in (("next_fit", 1), ("best_fit", 4), ("best_fit", 64))
    ]
    assert padding[0] > 2 * padding[1] > 4 * padding[2]


def packed(documents: Any, **options: Any) -> None:
    list(Packer(documents, 8, **options))


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[1] * 9], {}, "at most row_length=8 tokens, got 9 in document 0; pass too_long='split'"),
        ([[1] * 9], {"too_long": "drop"}, "got 1 documents, of which 1 were longer"),
        ([[], []], {}, "2 were empty"),
        ([torch.ones(2, 2)], {}, r"one dimension, got shape \(2, 2\)"),
        (["text"], {}, "'tokens' of a document must be a sequence of numbers.*got str"),
        ([{"a": [[1], [2]]}], {}, r"'a' .*got shape \(2, 1\); give documents one by one"),
        ([{"a": [1], "b": [1, 2]}], {}, "the same length, got 'a' 1, 'b' 2"),
        ([{"a": [1]}, {"b": [1]}], {}, "must have the streams 'a', got one with 'b'"),
        ([{"a": [1]}, [1]], {}, None),
        ([{"a": [1]}], {"padding": {"b": 0}}, "must have the streams 'b', got one with 'a'"),
        ([[1]], {"padding": {"b": 0}}, "must be a mapping with the streams 'b', got list"),
        ([{"positions": [1]}], {}, "must not be named .*got 'positions'"),
        ([{}], {}, "at least one stream"),
        ([[1], [0.5]], {}, "one dtype in all documents, got torch.float32 after torch.int64"),
        ([[1]], {"batch_size": 0}, "batch_size must be an int >= 1, got 0"),
        ([[1]], {"open_bins": 2.5}, "open_bins must be an int >= 1, got 2.5"),
        ([[1]], {"policy": "first_fit"}, "'best_fit', 'next_fit', got 'first_fit'"),
        ([[1]], {"too_long": None}, "'error', 'split', 'drop', got None"),
        ([[1]], {"remainder": "uneven"}, "'pad', 'drop', got 'uneven'"),
        ([[1]], {"padding": "0"}, "padding must be a number or a mapping"),
        ([[1]], {"padding": {}}, "at least one stream"),
        (7, {}, "documents must be iterable, got int"),
    ],
)
def test_invalid_input_is_refused(documents: Any, options: Any, message: str | None) -> None:
    if message is None:
        packed(documents, **options)  # one stream, with or without its name
        return
    with pytest.raises(ValueError, match=message):
        packed(documents, **options)


def test_long_document_leaves_the_rows_before_it() -> None:
    packer = Packer([[1] * 8, [2] * 3, [3] * 9], 8)
    rows = iter(packer)
    assert next(rows)["tokens"].tolist() == [1] * 8
    with pytest.raises(ValueError, match="got 9 in document 2"):
        next(rows)


def test_states_of_other_streams_are_refused() -> None:
    documents = documents_of(1, 40, 20)
    packer = Packer(documents, 32)
    for _, _ in zip(range(4), packer, strict=False):
        pass
    state = saved(packer.state_dict())
    with pytest.raises(ValueError, match="row_length must be the state's, 32, got 31"):
        Packer(documents, 31).load_state_dict(state)
    with pytest.raises(ValueError, match="policy must be the state's, 'best_fit', got 'next_fit'"):
        Packer(documents, 32, policy="next_fit").load_state_dict(state)
    with pytest.raises(ValueError, match="version 1, got version None"):
        Packer(documents, 32).load_state_dict({})
    other = Packer(documents[::-1], 32)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="must be as before the state, which has read"):
        iter(other)
    short = Packer(iter(documents[:2]), 32)
    short.load_state_dict(state)
    with pytest.raises(ValueError, match="got 2; pass an iterable that starts at the beginning"):
        iter(short)
    with pytest.raises(ValueError, match="must contain a state of the documents"):
        Packer(DataLoader(Documents(), batch_size=None), 32).load_state_dict(state)
    for broken in (
        {"streams": {}},
        {"held": []},
        {"bins": [[[0, 0, 32]]]},
        {"ready": 5},
        {"ready": [[[0, 0, 33]]]},
    ):
        with pytest.raises(ValueError, match="the state must"):
            Packer(documents, 32).load_state_dict({**state, "pass": {**state["pass"], **broken}})


def test_lengths_of_a_plan_are_checked() -> None:
    packer = Packer([], 8)
    assert packer.plan([]).steps == 0
    with pytest.raises(ValueError, match="0 or more, in one dimension"):
        packer.plan([3, -1])
    with pytest.raises(ValueError, match="got 9 in document 1"):
        packer.plan([3, 9])


def test_repr_shows_options_that_differ() -> None:
    assert repr(Packer([], 8)) == "Packer(<list>, 8)"
    packer = Packer([], 8, policy="next_fit", too_long="split", batch_size=4, rank=1, world_size=2)
    assert (
        repr(packer)
        == "Packer(<list>, 8, policy='next_fit', too_long='split', batch_size=4, rank=1, "
        "world_size=2)"
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.bool])
def test_state_as_json_resumes_with_the_same_bits(dtype: torch.dtype) -> None:
    documents = [
        {"ids": torch.arange(length), "extra": torch.arange(length).to(dtype)}
        for length in (5, 9, 0, 7, 3, 12, 8, 2, 11, 6)
    ]
    options: dict[str, Any] = {"padding": {"ids": -1, "extra": 1}, "open_bins": 3}
    whole = list(Packer(documents, 14, **options))
    for stop in range(len(whole) + 1):
        packer = Packer(documents, 14, **options)
        iterator = iter(packer)
        for _ in range(stop):
            next(iterator)
        resumed = Packer(documents, 14, **options)
        resumed.load_state_dict(json.loads(packer.state_json()))
        assert same(list(resumed), whole[stop:])

    state = json.loads(packer.state_json())
    state["pass"]["streams"]["ids"]["dtype"] = "load"
    with pytest.raises(ValueError, match="complete result of Packer.state_dict"):
        Packer(documents, 14, **options).load_state_dict(state)


def test_state_that_json_cannot_hold_is_reported() -> None:
    class Source:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[1, 2]])

        def state_dict(self) -> dict[str, Any]:
            return {"place": complex(1, 2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match="got complex; use torch.save"):
        Packer(Source(), 4).state_json()
