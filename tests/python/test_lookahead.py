# SPDX-License-Identifier: Apache-2.0
"""Lookahead: the predicted batches are the ones that follow, and looking ahead has no side effects.

The oracle is the same program that does not look.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import pickle
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lookahead_streams import LOADERS, Augmented, Shards, make
from scheduled_workers import Scheduled
from stream_oracle import describe

from penstock import DataLoader
from penstock.tuning.worker_tuner import WorkerTuner

EPOCHS = 2
WITHOUT_INDICES = [name for name in LOADERS if name.startswith("iterable")]


def seed_all() -> None:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def everything(loader: Any) -> dict[str, str]:
    """All that a program can see at one moment, apart from the batches."""
    own = [getattr(holder, "generator", None) for holder in (loader, loader.sampler)]
    parts = {
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "own": [None if one is None else one.get_state().tolist() for one in own],
        "state": json.dumps(loader.state_dict()),
    }
    return {name: hashlib.sha1(repr(parts[name]).encode()).hexdigest()[:8] for name in parts}


def text_of(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


Look = Callable[[Any, int], Any]


def stream(loader: Any, look: Look, epochs: int = EPOCHS) -> list[Any]:
    """Every batch and error in order, and everything before and after each."""
    seen: list[Any] = []
    for _ in range(epochs):
        try:
            iterator = iter(loader)
        except Exception as error:
            return [*seen, text_of(error)]
        for step in itertools.count():
            look(loader, step)
            seen.append(everything(loader))
            try:
                batch = next(iterator)
            except StopIteration:
                look(loader, step)
                break
            except LookupError as error:
                seen.append(text_of(error))
                break
            except Exception as error:
                seen.append(text_of(error))
            else:
                seen.append(describe(batch))
                torch.rand(1), random.random(), np.random.rand()  # as in a trainer
        seen.append(everything(loader))
        del iterator
    return seen


def nothing(loader: Any, step: int) -> None:
    pass


def prefetched_max(loader: Any) -> int:
    workers = 1 if type(loader.num_workers) is not int else loader.num_workers
    return int(loader.prefetch_factor * workers)


def at_most(loader: Any, step: int) -> None:
    loader.lookahead(prefetched_max(loader), lambda batch: batch)


def by_one(loader: Any, step: int) -> None:
    loader.lookahead(1, lambda batch: batch)


def now_and_then(loader: Any, step: int) -> None:
    if step % 4 == 1:
        loader.lookahead(prefetched_max(loader) - step % 2, lambda batch: batch)


def once(loader: Any, step: int) -> None:
    if step == 3:
        at_most(loader, step)


def at_indices(loader: Any, step: int) -> None:
    loader.lookahead(prefetched_max(loader))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_lookahead_does_not_change_the_stream(name: str) -> None:
    seed_all()
    expected = stream(make(name), nothing)
    looks: list[Look] = [at_most, by_one, now_and_then, once]
    if name not in WITHOUT_INDICES:
        looks.append(at_indices)
    for look in looks:
        seed_all()
        found = stream(make(name), look)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one == other, (look.__name__, place)


def expect_predictions_to_match(loader: Any, count: int, select: Any) -> None:
    """Asserts that the batches predicted at each step are the ones that follow, to the end of the
    epoch."""
    told: list[list[Any]] = []
    came: list[Any] = []
    iterator = iter(loader)
    while True:
        told.append(copy.deepcopy(loader.lookahead(count, select)))
        try:
            batch = next(iterator)
        except StopIteration:
            break
        came.append(batch)
    shown = [describe(batch) for batch in came] if select is not None else None
    for step, ahead in enumerate(told):
        assert len(ahead) == min(count, len(came) - step)
        if shown is not None:
            assert [describe(batch) for batch in ahead] == shown[step : step + count]
        else:
            values = [batch[0] for batch in came[step : step + count]]
            assert [np.ravel(one).tolist() for one in ahead] == [
                torch.as_tensor(value).ravel().tolist() for value in values
            ]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOADERS if "failing" not in name])
def test_lookahead_predicts_the_following_batches(name: str) -> None:
    seed_all()
    loader = make(name)
    for count in (1, prefetched_max(loader), max(1, prefetched_max(loader) - 1)):
        expect_predictions_to_match(loader, count, lambda batch: batch)
        if name not in WITHOUT_INDICES:
            expect_predictions_to_match(loader, count, None)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["shuffled", "shuffled, own generator", "drawing sampler", "stateful sampler", "auto",
     "seeded by batch", "iterable, uneven", "iterable, stateful", "single samples",
     "prefetch_bytes"],
)  # fmt: skip
def test_lookahead_does_not_change_a_resumed_epoch(name: str) -> None:
    def run(look: Look) -> list[Any]:
        seed_all()
        first = make(name)
        iterator = iter(first)
        for step in range(3):
            next(iterator)
            look(first, step)
        state = json.loads(json.dumps(first.state_dict()))
        del iterator
        seed_all()
        again = make(name)
        again.load_state_dict(state)
        with pytest.raises(ValueError, match="requires an iterator of this loader"):
            again.lookahead(1)
        return stream(again, look, epochs=2)

    expected = run(nothing)
    assert run(at_most) == expected
    if name not in WITHOUT_INDICES:
        assert run(at_indices) == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_lookahead_indices_of_a_resumed_epoch_are_the_rest(workers: int) -> None:
    for taken_count in (0, 4, 12):
        first = make("shuffled, own generator", num_workers=workers)
        iterator = iter(first)
        for _ in range(taken_count):
            next(iterator)
        again = make("shuffled, own generator", num_workers=workers)
        again.load_state_dict(first.state_dict())
        resumed = iter(again)
        told = again.lookahead(100)
        assert told == [batch[0].tolist() for batch in resumed]
        assert told == [batch[0].tolist() for batch in iterator]
        del iterator, resumed


def test_indices_without_workers_are_known_after_the_first_batch() -> None:
    seed_all()
    loader = make("shuffled", num_workers=0)
    expected = [batch[0].tolist() for batch in loader]
    assert loader.lookahead(1) == []
    seed_all()
    iterator = iter(loader)
    with pytest.raises(
        ValueError, match=r"lookahead\(2\).*the order of the epoch has been drawn.*after next\(\)"
    ):
        loader.lookahead(2)
    told = []
    for _ in iterator:
        told.append(loader.lookahead(5))
    assert told == [expected[step + 1 : step + 6] for step in range(len(expected))]
    in_sequence = iter(DataLoader(range(5), batch_size=2))
    assert in_sequence.lookahead(9) == [[0, 1], [2, 3], [4]]  # type: ignore[attr-defined]
    next(in_sequence)
    assert in_sequence.lookahead(1) == [[2, 3]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_lookahead_without_workers_draws_nothing(seeding: Any) -> None:
    def run(look: Look) -> list[Any]:
        seed_all()
        loader = make("shuffled, own generator", num_workers=0, seeding=seeding)
        return stream(loader, lambda loader, step: look(loader, step) if step else None)

    assert run(lambda loader, step: loader.lookahead(7)) == run(nothing)


def test_torch_samplers_give_all_indices_of_the_epoch() -> None:
    loader = make("shuffled, own generator")
    iterator = iter(loader)
    told = loader.lookahead(10**9)
    assert told == [batch[0].tolist() for batch in iterator]


def test_returned_indices_can_be_modified() -> None:
    loader = make("auto, drawing sampler")
    iterator = iter(loader)
    for index in loader.lookahead(3):
        index.clear()
    assert all(loader.lookahead(3))
    assert len([*iterator]) == 9


def test_exception_in_select_changes_nothing() -> None:
    loader = make("in sequence")
    iterator = iter(loader)
    with pytest.raises(ZeroDivisionError):
        loader.lookahead(3, lambda batch: 1 / 0)
    assert [batch[0].tolist() for batch in iterator] == loader_indices(23)


def loader_indices(count: int) -> list[list[int]]:
    return [[*range(first, min(first + 2, count))] for first in range(0, count, 2)]


def test_select_gets_the_delivered_tensors() -> None:
    loader = make("in sequence")
    iterator = iter(loader)
    told = loader.lookahead(4, lambda batch: batch[1])
    again = loader.lookahead(2, lambda batch: batch[1])
    assert again[0] is told[0] and again[1] is told[1]
    for one in told:
        assert next(iterator)[1] is one
    values = [one.clone() for one in told]
    assert len([*iterator]) == 8
    assert all(torch.equal(one, value) for one, value in zip(told, values, strict=True))


def test_each_iterator_predicts_its_own_batches() -> None:
    loader = make("shuffled", shuffle=True)
    first: Any = iter(loader)
    second: Any = iter(loader)
    told = loader.lookahead(4), first.lookahead(4), second.lookahead(4)
    assert told[0] == told[2] != told[1]
    assert loader.lookahead(4, lambda batch: batch[0].tolist()) == told[2]
    assert [next(first)[0].tolist() for _ in range(4)] == told[1]
    assert [next(second)[0].tolist() for _ in range(4)] == told[2]
    del first, second
    with pytest.raises(ValueError, match="requires an iterator of this loader in use"):
        loader.lookahead(1)


def test_lookahead_before_during_and_after_an_epoch() -> None:
    loader = make("in sequence")
    for select in (None, len):
        with pytest.raises(
            ValueError, match="requires an iterator of this loader in use; call it within"
        ):
            loader.lookahead(1, select)
        for _ in loader:
            pass
        assert loader.lookahead(1, select) == []
        loader = pickle.loads(pickle.dumps(loader))
    persistent = make("persistent")
    assert len([*persistent]) == 12
    assert persistent.lookahead(4) == persistent.lookahead(4, len) == []
    for step, _ in enumerate(persistent):
        assert len(persistent.lookahead(4, len)) == min(4, 11 - step)


def test_loader_can_be_copied_after_lookahead() -> None:
    loader = make("in sequence")
    iterator = iter(loader)
    loader.lookahead(2, len)
    copied = copy.deepcopy(loader)
    with pytest.raises(ValueError, match="requires an iterator of this loader"):
        copied.lookahead(2)
    assert len([*copied]) == len([*iterator]) == 12


def test_leaving_an_epoch_drops_the_batches_looked_at() -> None:
    loader = make("persistent")
    for _ in range(3):
        for _batch in loader:
            assert len(loader.lookahead(4, len)) == 4
            break
    assert sorted(index for batch in loader for index in batch[0].tolist()) == [*range(23)]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "auto, drawing sampler"])
def test_lookahead_with_worker_count_changes_keeps_the_stream(name: str) -> None:
    def run(look: Look) -> list[Any]:
        seed_all()
        loader: Any = make(name)
        loader._run.tuner = Scheduled([3, 1, 2, 4, 1, 3])
        return stream(loader, look)

    expected = run(nothing)
    for look in (at_most, by_one, once, at_indices):
        assert run(look) == expected


class Sleeping(Augmented):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


@pytest.mark.long
@pytest.mark.slow
def test_waiting_in_lookahead_counts_as_waiting() -> None:
    loader: Any = DataLoader(
        Sleeping(400), batch_size=2, num_workers="auto", seeding="batch", prefetch_factor=2
    )
    loader._run.tuner = WorkerTuner(window_s=0.2)
    for _ in loader:
        loader.lookahead(2, len)
    assert loader.worker_choice.workers > 1, str(loader.worker_choice)


def test_length_warning_is_issued_on_delivery_and_not_in_lookahead() -> None:
    class Short(Shards):
        def __len__(self) -> int:
            return 4

    loader = DataLoader(Short(3, 3), batch_size=None, num_workers=2, prefetch_factor=4)
    assert len(loader) == 4
    iterator = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(loader.lookahead(8, lambda batch: batch)) == 6
        for _ in range(4):
            next(iterator)
    with pytest.warns(UserWarning, match="was reported to be 4"):
        next(iterator)
    next(iterator)
    assert next(iterator, None) is None


@pytest.mark.long
@pytest.mark.slow
def test_lookahead_works_with_spawned_workers() -> None:
    loader = make("shuffled, own generator", multiprocessing_context="spawn")
    expect_predictions_to_match(loader, 4, lambda batch: batch)
