# SPDX-License-Identifier: Apache-2.0
"""An order by chunks: each read once, states, ranks, workers, its randomness, and the dataset."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, RandomSampler, TensorDataset

from penstock import ChunkedDataset, ChunkSampler, DataLoader, Ranks
from penstock.worker import chunked_dataset

LENGTHS = [5, 0, 17, 8, 30, 1, 12]
COUNT = sum(LENGTHS)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_yields_each_sample_once(shuffle: bool) -> None:
    rng = random.Random(1)
    for _ in range(60):
        lengths = [rng.randrange(25) for _ in range(rng.randrange(1, 30))]
        sampler = ChunkSampler(
            lengths,
            rng.randrange(1, 20),
            readers=rng.randrange(1, 9),
            batch_size=rng.randrange(1, 20),
            shuffle=shuffle,
            seed=rng.randrange(9),
        )
        assert len(sampler) == sum(lengths)
        epochs = [list(sampler) for _ in range(2)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(sum(lengths)))
        if not shuffle:
            assert epochs[0] == epochs[1]


def test_epochs_differ_and_set_epoch_selects_one() -> None:
    sampler = ChunkSampler(LENGTHS)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(ChunkSampler(LENGTHS, seed=1)) not in (first, second)


def test_order_without_shuffling_is_in_sequence() -> None:
    assert list(ChunkSampler(LENGTHS, shuffle=False)) == list(range(COUNT))


def test_order_with_one_reader_does_not_depend_on_batch_size() -> None:
    assert list(ChunkSampler(LENGTHS, batch_size=8)) == list(ChunkSampler(LENGTHS))


@pytest.mark.parametrize("readers", [1, 3])
def test_state_resumes_at_every_sample(readers: int) -> None:
    def make() -> ChunkSampler:
        return ChunkSampler(LENGTHS, 3, readers=readers, batch_size=4, seed=5)

    whole = make()
    whole.set_epoch(2)
    expected = list(whole)
    following = list(whole)
    for count in range(COUNT):
        sampler = make()
        sampler.set_epoch(2)
        iterator = iter(sampler)
        given = [next(iterator) for _ in range(count)]
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert given + list(resumed) == expected
        assert list(resumed) == following


def test_state_of_ten_million_samples_is_small_and_exact() -> None:
    lengths = np.full(10_000, 1000)
    sampler = ChunkSampler(lengths, 16)
    sampler.load_state_dict({**sampler.state_dict(), "given": 9_999_000})
    rest = list(sampler)
    assert len(json.dumps(sampler.state_dict())) < 400
    order = sampler._order(0)
    order.skip(5_000_000)
    assert order.next(5_000_000)[-1000:].tolist() == rest


def test_copies_continue_the_epoch() -> None:
    sampler = ChunkSampler(LENGTHS, 2)
    expected = list(sampler)
    sampler.set_epoch(0)
    iterator = iter(sampler)
    given = [next(iterator) for _ in range(9)]
    for copied in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        resumed = ChunkSampler(LENGTHS, 2)
        resumed.load_state_dict(copied.state_dict())
        assert given + list(resumed) == expected


def chunk_reads(sampler: ChunkSampler, batch_size: int, process_count: int) -> int:
    """Number of pairs of a chunk and a process that reads it, with batches in turn."""
    ends = np.cumsum(sampler.chunk_lengths)
    chunks = np.searchsorted(ends, list(sampler), side="right")
    processes = np.arange(len(chunks)) // batch_size % process_count
    return len(set(zip(chunks.tolist(), processes.tolist(), strict=True)))


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_processes_read_each_chunk_once(processes: int) -> None:
    rng = random.Random(4)
    lengths = [rng.randrange(20, 80) for _ in range(400)]
    sampler = ChunkSampler(lengths, 8, readers=8, batch_size=32)
    assert 400 <= chunk_reads(sampler, 32, processes) <= 407
    if processes > 1:
        # A job of fewer ranks, whose batches are larger: a batch consists of several runs.
        assert chunk_reads(sampler, 64, processes // 2) <= 407
        alone = ChunkSampler(lengths, 8)
        assert chunk_reads(alone, 32, processes) > 380 * processes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
def test_ranks_together_read_the_order_of_one(remainder: Any) -> None:
    """Also across a resume with another number of ranks."""
    lengths = [20] * 31

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        sampler = ChunkSampler(lengths, 4, readers=4, batch_size=8)
        ranks = Ranks(rank=rank, world_size=world_size, global_batch_size=32, remainder=remainder)
        return DataLoader(TensorDataset(torch.arange(620)), sampler=sampler, ranks=ranks)

    def steps(loaders: list[Any], count: int | None = None) -> list[list[int]]:
        zipped = zip(*loaders, strict=True)
        found = []
        for step in zipped:
            found.append([index for (batch,) in step for index in batch.tolist()])
            if len(found) == count:
                break
        return found

    expected = steps([make(0, 1)])
    assert [index for step in expected for index in step][: 19 * 32] == list(
        ChunkSampler(lengths, 4, readers=4, batch_size=8)
    )[: 19 * 32]
    for world_size in (2, 4):
        found = steps([make(rank, world_size) for rank in range(world_size)])
        assert found[:19] == expected[:19]
        assert [set(step) for step in found] == [set(step) for step in expected]
    ranks = [make(rank, 2) for rank in range(2)]
    iterators = [iter(loader) for loader in ranks]
    first = steps(iterators, 7)
    resumed = [make(rank, 4) for rank in range(4)]
    for loader in resumed:
        loader.load_state_dict(ranks[1].state_dict())
    assert first + steps(resumed)[: 19 - 7] == expected[:19]


def test_each_rank_and_worker_reads_its_chunks_only() -> None:
    sampler = ChunkSampler([20] * 320, 4, readers=8, batch_size=8)
    pairs: set[tuple[int, int, int]] = set()
    for rank in range(2):
        ranks = Ranks(rank=rank, world_size=2, global_batch_size=16)
        loader = DataLoader(
            WhoReads([20] * 320), sampler=copy.deepcopy(sampler), ranks=ranks, num_workers=4
        )
        for chunks, workers in loader:
            pairs |= {
                (int(chunk), rank, int(worker))
                for chunk, worker in zip(chunks, workers, strict=True)
            }
    assert len(pairs) == 320


class WhoReads(Dataset[Any]):
    def __init__(self, lengths: list[int]) -> None:
        self.ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        chunk = np.searchsorted(self.ends, index, side="right")
        return int(chunk), -1 if info is None else info.id


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (
            {},
            {"num_workers": 2},
            "one of the 2 processes .*, got readers=1 and batch_size=None; pass readers=2, b",
        ),
        (
            {"readers": 3, "batch_size": 8},
            {"num_workers": 2},
            "readers of the ChunkSampler must be 2 or",
        ),
        (
            {"readers": 2, "batch_size": 4},
            {"num_workers": 2},
            "its batch_size 8, .* and batch_size=4",
        ),
        ({"readers": 4, "batch_size": 8}, {"num_workers": "auto"}, "got num_workers='auto', with"),
        ({"readers": 4, "batch_size": 8}, {"pool": "tcp://host:1"}, "got a pool, with which any"),
        (
            {"readers": 2, "batch_size": 8},
            {"num_workers": 2, "ranks": Ranks(rank=0, world_size=2)},
            r"one of the 4 processes \(world size 2, 2 workers each\)",
        ),
    ],
)
def test_chunks_read_by_several_processes_are_warned_of(
    sampling: Any, options: Any, message: str
) -> None:
    if options.get("num_workers") == "auto":
        options = {**options, "seeding": "batch"}
    with pytest.warns(UserWarning, match=message):
        DataLoader(
            TensorDataset(torch.arange(COUNT)),
            batch_size=8,
            sampler=ChunkSampler(LENGTHS, **sampling),
            **options,
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_chunks_read_once_are_not_warned_of(workers: int) -> None:
    sampler = ChunkSampler(LENGTHS, readers=2, batch_size=8)
    DataLoader(TensorDataset(torch.arange(COUNT)), 8, sampler=sampler, num_workers=workers)
    one = ChunkSampler(LENGTHS)
    DataLoader(TensorDataset(torch.arange(COUNT)), 8, sampler=one, num_workers=min(workers, 1))


def test_randomness_of_an_open_window_of_all_chunks_is_that_of_a_shuffle() -> None:
    lengths = [100] * 64
    whole = ChunkSampler(lengths, 64).randomness(256)
    assert whole.distance == pytest.approx(1, abs=0.03)
    assert whole.chunks_per_batch == pytest.approx(whole.chunks_per_batch_of_shuffle, rel=0.02)
    window = ChunkSampler(lengths, 8).randomness(256)
    assert 8 <= window.chunks_per_batch <= 14 < window.chunks_per_batch_of_shuffle
    assert 0.75 <= window.distance <= 0.95
    sequence = ChunkSampler(lengths, shuffle=False).randomness(256)
    assert sequence.distance == pytest.approx(3 / 6401)
    assert sequence.chunks_per_batch == pytest.approx(256 / 100 + 1, abs=0.5)
    assert window.chunks_per_batch_of_shuffle == whole.chunks_per_batch_of_shuffle


def test_expected_chunks_of_a_shuffle_are_those_that_torch_draws() -> None:
    lengths = [3, 0, 50, 7, 40, 9, 1]
    ends = np.cumsum(lengths)
    counts = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(400):
        order = list(RandomSampler(range(110), generator=generator))
        counts.append(len(set(np.searchsorted(ends, order[:12], side="right").tolist())))
    expected = ChunkSampler(lengths).randomness(12).chunks_per_batch_of_shuffle
    assert np.mean(counts) == pytest.approx(expected, abs=0.15)
    assert ChunkSampler(lengths).randomness(110).chunks_per_batch_of_shuffle == 6


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, r"chunk_lengths must be one integer per chunk, at least one, got .* \(0,\)"),
        ([[1]], {}, r"chunk_lengths must be one integer per chunk.* shape \(1, 1\)"),
        ([1.5], {}, "chunk_lengths must be one integer per chunk.* type float64"),
        ([4, -1], {}, "chunk_lengths must be >= 0, got -1 for chunk 1"),
        ([1 << 60, 1], {}, "chunk_lengths must add up to at most"),
        ([1], {"chunks_in_memory": 0}, "chunks_in_memory must be >= 1 and at most .*, got 0"),
        ([1], {"chunks_in_memory": "1GB"}, "chunks_in_memory must be an int >= 1, got '1GB'"),
        ([1], {"readers": 0}, "readers must be >= 1 and at most .*, got 0"),
        ([1], {"readers": 2}, "batch_size must be the size of a batch, since readers is 2, got No"),
        ([1], {"readers": 2, "batch_size": -4}, "batch_size must be >= 1 and at most .*, got -4"),
        ([1], {"seed": -3}, "seed must be >= 0, got -3"),
    ],
)
def test_invalid_arguments_are_rejected(lengths: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkSampler(lengths, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks_in_memory": 3}, "with chunks_in_memory 2, but this one has chunks_in_memory 3"),
        ({"seed": 1}, "with seed 0, but this one has seed 1"),
        ({"shuffle": False}, "with shuffle True, but this one has shuffle False"),
        ({"readers": 4, "batch_size": 2}, "with readers 1, but this one has readers 4"),
    ],
)
def test_state_of_another_order_is_rejected(options: Any, message: str) -> None:
    state = ChunkSampler(LENGTHS, 2).state_dict()
    with pytest.raises(ValueError, match=message):
        ChunkSampler(LENGTHS, **{"chunks_in_memory": 2, **options}).load_state_dict(state)


def test_state_of_other_chunks_is_rejected() -> None:
    state = ChunkSampler(LENGTHS).state_dict()
    with pytest.raises(ValueError, match="with chunk_count 7, but this one has chunk_count 1"):
        ChunkSampler([COUNT]).load_state_dict(state)
    with pytest.raises(ValueError, match="with chunks_sha256 '"):
        ChunkSampler(LENGTHS[::-1]).load_state_dict(state)
    for wrong in ({"given": COUNT + 1}, {"given": -1}, {"epoch": -1}, {"given": "7"}):
        with pytest.raises(ValueError, match=f"must have an epoch >= 0 and 0 to {COUNT} samples"):
            ChunkSampler(LENGTHS).load_state_dict({**state, **wrong})


class ChunkLog:
    """Reads a chunk of numbers, and notes which process has read which."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, number: int) -> list[int]:
        with self.path.open("a") as log:
            log.write(f"{os.getpid()} {number}\n")
        first = sum(LENGTHS[:number])
        return list(range(first, first + LENGTHS[number]))

    def reads(self) -> Counter[int]:
        return Counter(int(line.split()[1]) for line in self.path.read_text().splitlines())


def test_dataset_is_the_samples_of_its_chunks(tmp_path: Path) -> None:
    dataset = ChunkedDataset(LENGTHS, ChunkLog(tmp_path / "log"))
    assert len(dataset) == COUNT
    assert [dataset[index] for index in range(COUNT)] == list(range(COUNT))
    assert dataset[-1] == COUNT - 1
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"index must be from -{COUNT} to {COUNT - 1}"):
            dataset[index]
    doubled = ChunkedDataset([2, 2], lambda number: [number], row=lambda chunk, row: (chunk, row))
    assert doubled[3] == ([1], 1)
    with pytest.raises(ValueError, match="chunks_in_memory must be >= 1"):
        ChunkedDataset([1], lambda number: [number], chunks_in_memory=0)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_dataset_reads_each_chunk_once_in_the_sampler_order(tmp_path: Path, chunks: int) -> None:
    log = ChunkLog(tmp_path / "log")
    dataset = ChunkedDataset(LENGTHS, log, chunks_in_memory=chunks)
    sampler = ChunkSampler(LENGTHS, chunks)
    for epoch in (1, 2, 3):
        assert sorted(dataset[index] for index in sampler) == list(range(COUNT))
        assert log.reads() == {chunk: epoch for chunk in range(7) if LENGTHS[chunk]}


def test_dataset_keeps_a_bounded_number_of_chunks(tmp_path: Path) -> None:
    log = ChunkLog(tmp_path / "log")
    dataset = ChunkedDataset(LENGTHS, log, chunks_in_memory=1)
    firsts = [0, 5, 22, 30]
    for first in firsts:
        dataset[first]
    dataset[22]
    assert log.reads() == {0: 1, 2: 1, 3: 1, 4: 1}
    dataset[1]  # the oldest of more than 1 + 2
    assert log.reads()[0] == 2


class Rows:
    """Reads a chunk of 80 bytes for each sample, and notes it."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()

    def __call__(self, number: int) -> Any:
        self.reads[number] += 1
        first = sum(LENGTHS[:number])
        return torch.arange(first, first + LENGTHS[number]).repeat(10, 1).T.contiguous()


def test_budget_that_holds_the_open_chunks_changes_nothing() -> None:
    rows = Rows()
    dataset = ChunkedDataset(LENGTHS, rows, chunks_in_memory=3, memory="8kB")
    seen = sorted(int(dataset[index][0]) for index in ChunkSampler(LENGTHS, 3))
    assert seen == list(range(COUNT))
    assert set(rows.reads.values()) == {1}


def test_chunk_above_the_budget_is_warned_of_and_read_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    rows = Rows()
    dataset = ChunkedDataset(LENGTHS, rows, chunks_in_memory=1, memory=100)
    seen = [int(dataset[index][0]) for index in ChunkSampler(LENGTHS, 1, shuffle=False)]
    assert seen == list(range(COUNT))
    assert set(rows.reads.values()) == {1}
    (warning,) = recwarn
    assert "bytes, more than memory=100, and is kept alone" in str(warning.message)


def test_budget_below_the_open_chunks_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    rows = Rows()
    largest = 80 * max(LENGTHS)
    dataset = ChunkedDataset(LENGTHS, rows, chunks_in_memory=7, memory=largest)
    seen = sorted(int(dataset[index][0]) for index in ChunkSampler(LENGTHS, 7))
    assert seen == list(range(COUNT))
    assert max(rows.reads.values()) > 1
    (warning,) = recwarn
    assert "are dropped and read again; raise memory, or pass chunks_in_memory=" in str(
        warning.message
    )


def test_bytes_of_chunks_are_those_of_their_parts() -> None:
    held = {"a": torch.zeros(10), "b": [b"1234", np.zeros(3)], "c": (bytearray(5),)}
    assert chunked_dataset._bytes_of(held) == 40 + 4 + 24 + 5
    for wrong in (0, -1, "many", True, 1.5):
        with pytest.raises(ValueError, match="memory must be a number of bytes > 0 or a text"):
            ChunkedDataset([1], lambda number: [number], memory=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("loader_class", [DataLoader, torch.utils.data.DataLoader])
def test_workers_read_each_chunk_once(tmp_path: Path, workers: int, loader_class: Any) -> None:
    lengths = LENGTHS * 8
    path = tmp_path / "log"

    def read_chunk(number: int) -> list[int]:
        with path.open("a") as log:
            log.write(f"{number}\n")
        first = sum(lengths[:number])
        return list(range(first, first + lengths[number]))

    dataset = ChunkedDataset(lengths, read_chunk, chunks_in_memory=4 * 4 // max(1, workers))
    sampler = ChunkSampler(lengths, 4, readers=4, batch_size=8)
    loader = loader_class(
        dataset, batch_size=8, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    chunk_count = sum(length > 0 for length in lengths)
    for epoch in (1, 2):
        given = [index for batch in loader for index in batch.tolist()]
        sampler.set_epoch(epoch - 1)
        assert given == list(sampler)
        assert len(path.read_text().splitlines()) <= epoch * (chunk_count + 3)


def test_chunks_are_not_part_of_the_dataset(tmp_path: Path) -> None:
    dataset = ChunkedDataset(LENGTHS, ChunkLog(tmp_path / "log"))
    before = pickle.dumps(dataset)
    dataset[0]
    assert pickle.dumps(dataset) == before
    assert pickle.loads(before)[3] == 3
