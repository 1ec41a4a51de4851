# SPDX-License-Identifier: Apache-2.0
"""The limits of lookahead: errors, deaths and timeouts, memory, and unknowable futures."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lookahead_streams import Augmented, DrawingSampler, Failing, Stateful, make
from stream_oracle import next_error
from torch.utils.data import Dataset
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.errors import UnsupportedError


def test_lookahead_stops_before_an_error_raised_in_its_place() -> None:
    loader = DataLoader(Failing(24), batch_size=2, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    assert [len(loader.lookahead(8, lambda batch: batch)) for _ in range(2)] == [1, 1]
    next(iterator)
    assert loader.lookahead(8, lambda batch: batch) == []
    assert loader.lookahead(2) == [[2, 3], [4, 5]]
    assert "sample 3 is bad" in str(next_error(iterator))
    assert len(loader.lookahead(8, lambda batch: batch)) == 3
    assert [batch[0].tolist() for batch in itertools.islice(iterator, 3)] == [
        [4, 5],
        [6, 7],
        [8, 9],
    ]


class Dying(Dataset[int]):
    """The worker that is asked for sample 3 waits for a byte, and exits with an exit code."""

    def __init__(self, reader: int) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            os.read(self.reader, 1)
            os._exit(9)
        return index


@contextlib.contextmanager
def without_sigchld_handler() -> Iterator[None]:
    """Torch's handler raises wherever the program is, which may be in the test."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.slow
def test_worker_death_is_reported_once_in_its_place() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(Dying(reader), batch_size=None, num_workers=1, prefetch_factor=6)
        iterator = iter(loader)
        with without_sigchld_handler():
            assert loader.lookahead(3, int) == [0, 1, 2]
            os.write(writer, b".")
            assert loader.lookahead(6, int) == loader.lookahead(6, int) == [0, 1, 2]
            assert [next(iterator) for _ in range(3)] == [0, 1, 2]
            assert loader.lookahead(6, int) == []
            error = next_error(iterator)
        assert type(error) is RuntimeError and "exited unexpectedly" in str(error)
        del iterator


@pytest.mark.slow
def test_kept_error_does_not_keep_the_iterator_alive() -> None:
    gone: list[int] = []
    with pipe() as (reader, writer):
        os.write(writer, b".")
        loader = DataLoader(Dying(reader), batch_size=None, num_workers=1, prefetch_factor=6)
        iterator = iter(loader)
        weakref.finalize(iterator, gone.append, 1)
        gc.disable()
        try:
            with without_sigchld_handler():
                assert len(loader.lookahead(6, int)) <= 3
            del iterator
            assert gone == [1]
        finally:
            gc.enable()


class Gated(Dataset[int]):
    """From sample 3 on each waits for a byte."""

    def __init__(self, reader: int) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index >= 3:
            os.read(self.reader, 1)
        return index


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
def test_timeout_in_lookahead_raises_and_loses_nothing() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(
            Gated(reader), batch_size=None, num_workers=1, prefetch_factor=8, timeout=1
        )
        iterator = iter(loader)
        with pytest.raises(RuntimeError, match=r"timed out after 1 seconds\nWorker 0 .*batch 3"):
            loader.lookahead(5, int)
        assert loader.lookahead(3, int) == [0, 1, 2]
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        assert "timed out after 1 seconds" in str(next_error(iterator))
        os.write(writer, b"." * 5)
        assert loader.lookahead(5, int) == [3, 4, 5, 6, 7]
        assert [*iterator] == [3, 4, 5, 6, 7]
        del iterator


def test_lookahead_waits_only_for_the_requested_batches() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(Gated(reader), batch_size=None, num_workers=1, prefetch_factor=8)
        iterator = iter(loader)
        assert loader.lookahead(3, int) == [0, 1, 2]  # the fourth would never arrive
        os.write(writer, b"." * 5)
        assert [*iterator] == [*range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefetch_bytes": 1 << 19}], ids=["", "prefetch_bytes"])
def test_batches_held_beyond_the_arena_neither_stall_nor_change(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ARENA_BYTES", str(1 << 20))
    dataset = TensorDatasetLike(120)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, prefetch_factor=16, **options)
    kept, told = [], []
    for step, batch in enumerate(loader):
        ahead = loader.lookahead(32, lambda batch: batch)
        assert len(ahead) == min(32, 59 - step)
        told.append(ahead)
        kept.append(batch)
    assert len(kept) == 60
    for step, batch in enumerate(kept):
        assert batch[:, 0].tolist() == [2.0 * step, 2.0 * step + 1]
        assert [one[0, 0].item() for one in told[step]] == [
            2.0 * later for later in range(step + 1, min(step + 33, 60))
        ]


class TensorDatasetLike(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16384,), float(index))


def test_stats_count_only_delivered_batches() -> None:
    loader = make("persistent", overlap_epochs=False)
    for given_count, _ in enumerate(loader, start=1):
        loader.lookahead(4, len)
        stats = loader.stats()
        assert stats.batches == given_count
        assert stats.ready + stats.outstanding == min(4, 12 - given_count)
        if given_count == 10:
            break
    assert len([*loader]) == 12
    assert (loader.stats().batches, loader.stats().stale_batches) == (22, 2)


def test_lookahead_requests_no_extra_batches() -> None:
    with pipe() as (reader, writer):
        loader = DataLoader(Gated(reader), batch_size=None, num_workers=1, prefetch_factor=3)
        iterator = iter(loader)
        assert loader.lookahead(3, int) == [0, 1, 2]
        assert loader.stats().outstanding == 0
        next(iterator)
        assert loader.stats().outstanding == 1
        os.write(writer, b"." * 5)
        assert [*iterator] == [*range(1, 8)]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((0,), ValueError, "the number of batches of lookahead() must be >= 1, got 0"),
        ((-2, len), ValueError, "the number of batches of lookahead() must be >= 1, got -2"),
        ((1.0,), TypeError, "batches of lookahead() must be an int >= 1, got 1.0"),
        ((True,), TypeError, "batches of lookahead() must be an int >= 1, got True"),
        (
            (1, "ids"),
            TypeError,
            "select must be a function of a batch, or None for the indices, got 'ids'",
        ),
        (
            (5, len),
            ValueError,
            "lookahead(5) must not exceed the 4 batches that are certain to be requested "
            "(prefetch_factor=2 and num_workers=2); raise prefetch_factor to 3, or look fewer",
        ),
    ],
)
def test_invalid_arguments_are_rejected(arguments: Any, kind: type, words: str) -> None:
    loader = make("in sequence")
    iterator: Any = iter(loader)
    for call in (loader.lookahead, iterator.lookahead):
        with pytest.raises(kind, match=re.escape(words)):
            call(*arguments)
    assert len([*iterator]) == 12


@pytest.mark.parametrize(
    ("options", "arguments", "kind", "words"),
    [
        (
            {"dataset": Augmented()},
            (1, len),
            UnsupportedError,
            "cannot return values with num_workers=0: a batch is made when next() is called",
        ),
        (
            {"dataset": Augmented(), "batch_sampler": DrawingSampler()},
            (1,),
            UnsupportedError,
            "with num_workers=0 requires batches of torch's RandomSampler or SequentialSampler",
        ),
        (
            {"dataset": Stateful()},
            (1,),
            UnsupportedError,
            "cannot return the indices of an IterableDataset, which has none; use num_workers=1",
        ),
        (
            {"dataset": Stateful(), "num_workers": 1},
            (1,),
            UnsupportedError,
            "cannot return the indices of an IterableDataset, which has none; pass select=",
        ),
        (
            {"dataset": Augmented(), "num_workers": 2, "in_order": False},
            (1, len),
            UnsupportedError,
            "requires in_order=True, got in_order=False, with which the next batch cannot be known",
        ),
        (
            {"dataset": Augmented(), "batch_sampler": DrawingSampler(), "num_workers": 2},
            (5,),
            ValueError,
            "raise prefetch_factor to 3",
        ),
        (
            {"dataset": Augmented(), "num_workers": "auto", "seeding": "batch"},
            (3, len),
            ValueError,
            "must not exceed the 2 batches that are certain to be requested (prefetch_factor=2 "
            'and num_workers="auto", which may choose 1); raise prefetch_factor to 3',
        ),
        (
            {"dataset": IterableWrapper(range(4))},
            (1,),
            UnsupportedError,
            "does not support torch's iterator, which is used here: the dataset is a datapipe",
        ),
    ],
)
def test_unpredictable_batches_are_rejected(
    options: dict[str, Any], arguments: Any, kind: type, words: str
) -> None:
    loader: Any = DataLoader(**options)
    iterator = iter(loader)
    with pytest.raises(kind, match=re.escape(words)):
        loader.lookahead(*arguments)
    assert len([*iterator]) == len([*DataLoader(**options)])
