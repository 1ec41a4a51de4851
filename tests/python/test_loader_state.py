# SPDX-License-Identifier: Apache-2.0
"""state_dict() and load_state_dict(): the rest of the stream equals the uninterrupted run's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resumed_streams import (
    COUNT,
    SAMPLERS,
    Augmented,
    Backwards,
    Counted,
    Counting,
    Remembering,
    Shards,
    StatefulSampler,
    WithCursor,
    WithFaults,
    as_is,
    jittered,
    rest_of,
    seed_all,
    state_after,
    take,
    through_json,
    whole,
)
from stream_oracle import describe, error_of
from torch.utils.data import TensorDataset

from penstock import DataLoader


@pytest.mark.sampled(4)
@pytest.mark.parametrize("workers", [(0, 0), (2, 2), (0, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
def test_map_dataset_resumes_at_its_position(
    options: Callable[[], dict[str, Any]], workers: tuple[int, int]
) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(Counted(), num_workers=num_workers, **options())

    expected = whole(make(workers[0]))
    for count in (0, 3, len(expected)):
        state = state_after(make(workers[0]), count)
        assert state["_num_yielded"] == state["_sampler_iter_yielded"] == count
        assert state["_iterator_finished"] is False
        assert rest_of(make(workers[1]), state) == expected[count:]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 5, "collate_fn": jittered, "sampler": Backwards()},
        {"batch_size": None},
    ],
    ids=["shuffled", "random collate", "single samples"],
)
def test_seeded_batches_resume_identically_with_any_worker_count(
    options: dict[str, Any],
) -> None:
    def make(num_workers: int) -> Any:
        dataset = Augmented(failing=9)
        return lambda: DataLoader(dataset, seeding="batch", num_workers=num_workers, **options)

    expected = whole(make(0))
    assert sum("sample 9" in str(seen) for seen in expected) == 1
    for before, after, count in [(0, 3, 1), (3, 0, 2), (1, 2, 4), (2, 3, 3), (2, 0, 0)]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_iterable_shards_resume_with_any_worker_count(shards: int) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(
            Shards(),
            batch_size=3,
            seeding="batch",
            shards=shards,
            num_workers=num_workers,
            collate_fn=jittered,
        )

    expected = whole(make(0))
    for before, after, count in [(0, 2, 1), (2, 0, 5), (1, 3, 8), (3, 1, len(expected))]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


def test_shard_unread_since_a_resume_keeps_its_position() -> None:
    """A state taken right after a resume restarted such shards: batches were repeated."""

    def make() -> Any:
        return DataLoader(Remembering(), batch_size=3, seeding="batch", shards=3)

    expected = whole(make)
    state = state_after(make, 4)
    for _ in range(2):  # taken before any batch of the second shard
        loader = make()
        loader.load_state_dict(state)
        iterator = iter(loader)
        state = through_json(loader.state_dict())
        del iterator
    assert rest_of(make, state) == expected[4:]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Shards, Remembering, WithCursor])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, None])
def test_iterable_dataset_resumes_with_torch_seeds(
    dataset: type, workers: int, batch_size: int | None
) -> None:
    def make() -> Any:
        return DataLoader(dataset(), batch_size=batch_size, num_workers=workers)

    expected = whole(make)
    for count in (0, 4, len(expected) - 1, len(expected)):
        state = state_after(make, count)
        rest = rest_of(make, state)
        if workers == 0 and dataset is Shards:  # draws from the trainer's generators
            rest, tail = [one[1][0] for one in rest], [one[1][0] for one in expected[count:]]
            assert rest == tail
        else:
            assert rest == expected[count:]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_repeated_resumes_work_at_every_position(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Augmented(), 4, shuffle=True, seeding="batch", num_workers=workers)

    expected = whole(make)
    state = state_after(make, 1)
    for count in range(1, len(expected)):
        seed_all(count)
        loader = make()
        loader.load_state_dict(state)
        assert through_json(loader.state_dict()) == state, "nothing was taken yet"
        assert take(iter(loader), 1) == [expected[count]]
        state = through_json(loader.state_dict())
    assert rest_of(make, state) == []


@pytest.mark.long("batch-False-2", "worker-False-2")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_resumed_later_epoch_is_followed_by_the_next(
    workers: int, persistent: bool, seeding: Any
) -> None:
    dataset = Augmented() if seeding == "batch" else Counted()

    def make() -> Any:
        return DataLoader(
            dataset,
            4,
            shuffle=True,
            seeding=seeding,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            generator=torch.Generator().manual_seed(8),
        )

    loader = make()
    expected = [take(iter(loader), 99) for _ in range(3)]
    loader = make()
    take(iter(loader), 99)
    take(iter(loader), 2)
    state = through_json(loader.state_dict())
    loader = make()
    loader.load_state_dict(state)
    assert take(iter(loader), 99) == expected[1][2:]
    assert take(iter(loader), 99) == expected[2]


@pytest.mark.long("False-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_shuffle_of_a_later_epoch_is_redrawn_on_resume(workers: int, persistent: bool) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, shuffle=True, num_workers=2, persistent_workers=persistent)

    seed_all(7)
    loader = make()
    take(iter(loader), 99)
    second = take(iter(loader), 99)
    seed_all(7)
    loader = make()
    take(iter(loader), 99)
    between = through_json(loader.state_dict())
    take(iter(loader), 2)
    state = through_json(loader.state_dict())
    after = lambda: DataLoader(Counted(), 4, shuffle=True, num_workers=workers)  # noqa: E731
    assert rest_of(after, between) == second
    assert rest_of(after, state) == second[2:]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_state_between_epochs_resumes_with_the_next_epoch(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Augmented(), 4, shuffle=True, seeding="batch", num_workers=workers)

    seed_all(7)
    loader = make()
    expected = [take(iter(loader), 99) for _ in range(2)]
    seed_all(7)
    loader = make()
    before = through_json(loader.state_dict())
    assert before["_num_yielded"] == 0
    assert not before["_iterator_finished"]
    assert take(iter(loader), 99) == expected[0], "asking for the state changes nothing"
    after = through_json(loader.state_dict())
    assert after["_iterator_finished"]
    assert after["_num_yielded"] == len(expected[0])
    assert take(iter(loader), 99) == expected[1]
    assert rest_of(make, before) == expected[0]
    assert rest_of(make, after) == expected[1]


def test_loading_the_current_state_does_not_change_the_stream() -> None:
    def drive(load: bool) -> Any:
        seed_all(3)
        loader = DataLoader(Counted(), 4, shuffle=True)
        if load:
            loader.load_state_dict(through_json(loader.state_dict()))
        seen = [take(iter(loader), 99) for _ in range(2)]
        return seen, describe(torch.get_rng_state())

    assert drive(True) == drive(False)


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_sampler_is_not_pulled_again(workers: int) -> None:
    def make() -> Any:
        return DataLoader(Counted(), 4, sampler=StatefulSampler(), num_workers=workers)

    expected = whole(make)
    state = state_after(make, 3, asks_before=True)
    assert state["_index_sampler_state"] == {"samples_yielded": 12, "sampler": {"yielded": 12}}
    loader = make()
    loader.load_state_dict(state)
    assert take(iter(loader), 99) == expected[3:]
    assert loader.sampler.pulls == COUNT - 12


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_stateful_map_dataset_gets_its_state_back(workers: int, seeding: Any) -> None:
    def make() -> Any:
        return DataLoader(Counting(), batch_size=4, num_workers=workers, seeding=seeding)

    expected = whole(make)
    state = state_after(make, 3)
    assert rest_of(make, state) == expected[3:]
    error = error_of(
        lambda: DataLoader(
            Counting(), batch_size=4, num_workers=3, seeding=seeding
        ).load_state_dict(state)
    )
    assert type(error) is ValueError
    assert f"resume with num_workers={max(workers, 1)}" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dataset", [Remembering, WithCursor])
def test_stateful_shards_resume_with_other_worker_counts(dataset: type, shards: int) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(
            dataset(), batch_size=3, seeding="batch", shards=shards, num_workers=num_workers
        )

    expected = whole(make(0))
    for before, after, count in [(0, 2, 4), (2, 0, 5), (1, 3, 2)]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


@pytest.mark.slow
@pytest.mark.parametrize("is_stateful", [False, True])
def test_failed_batches_keep_their_positions_on_resume(is_stateful: bool) -> None:
    def make(num_workers: int) -> Any:
        return lambda: DataLoader(
            WithFaults(is_stateful),
            batch_size=2,
            seeding="batch",
            shards=2,
            num_workers=num_workers,
            collate_fn=as_is,
        )

    expected = whole(make(0))
    assert "at 7" in expected
    for before, after, count in [(0, 2, 5), (2, 0, 8), (1, 2, len(expected))]:
        assert rest_of(make(after), state_after(make(before), count)) == expected[count:]


@pytest.mark.long
def test_tensor_dataset_resumes_at_its_position() -> None:
    dataset = TensorDataset(torch.arange(100), torch.randn(100, 3))

    def make() -> Any:
        return DataLoader(dataset, 7, shuffle=True, num_workers=2)

    expected = whole(make)
    for count in (1, 8, len(expected)):
        assert rest_of(make, state_after(make, count)) == expected[count:]


def test_persistent_workers_end_when_a_state_is_loaded() -> None:
    loader = DataLoader(Counted(), 4, num_workers=2, persistent_workers=True)
    iterator: Any = iter(loader)
    expected = take(iterator, 99)
    workers = iterator._workers
    state = state_after(lambda: DataLoader(Counted(), 4), 2)
    loader.load_state_dict(state)
    assert not any(worker.is_alive() for worker in workers)
    assert take(iter(loader), 99) == expected[2:]
    assert take(iter(loader), 99) == expected
    with pytest.warns(UserWarning, match="empty dictionary"):
        loader.load_state_dict({})
    assert take(iter(loader), 99) == expected


def test_state_is_available_after_a_break() -> None:
    for workers in (0, 2):
        loader = DataLoader(Counted(), 4, num_workers=workers)
        for _ in loader:
            break
        assert loader.state_dict()["_num_yielded"] == 1


@pytest.mark.slow
def test_another_process_can_resume() -> None:
    program = (
        "import json, sys, torch\n"
        "from penstock import DataLoader\n"
        "loader = DataLoader(range(20), 3, shuffle=True, num_workers=int(sys.argv[1]))\n"
        "loader.load_state_dict(json.load(sys.stdin))\n"
        "print([batch.tolist() for batch in loader])\n"
    )
    seed_all(5)
    loader = DataLoader(range(20), 3, shuffle=True, num_workers=2)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    state = json.dumps(loader.state_dict())
    rest = repr([batch.tolist() for batch in iterator])
    for workers in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", program, workers],
            input=state,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == rest


def test_positions_corrected_by_accelerate_take_effect() -> None:
    """Its dispatcher returns the batches that it holds for other ranks."""
    for dataset in (Counted(), Shards()):
        make = lambda dataset=dataset: DataLoader(dataset, 4, seeding="batch")  # noqa: E731
        expected = whole(make)
        state = state_after(make, 3)
        state["_sampler_iter_yielded"] -= 1
        state["_num_yielded"] -= 1
        assert rest_of(make, state) == expected[2:]


def test_interrupted_batch_is_delivered_after_the_resume() -> None:
    class Interrupted(Counted):
        is_armed = True

        def __getitem__(self, index: int) -> Any:
            if index == 9 and self.is_armed:
                Interrupted.is_armed = False
                raise KeyboardInterrupt
            return index

    def make() -> Any:
        return DataLoader(Interrupted(), 4)

    loader = make()
    iterator = iter(loader)
    take(iterator, 2)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = through_json(loader.state_dict())
    assert state["_num_yielded"] == 2
    expected = whole(make)
    assert rest_of(make, state) == expected[2:]
    assert take(iterator, 1) == expected[3:4], "as torch's iterator goes on"
    assert rest_of(make, through_json(loader.state_dict())) == expected[4:]


@pytest.mark.long
@pytest.mark.slow
def test_spawned_workers_can_resume() -> None:
    def make() -> Any:
        return DataLoader(
            Shards(), 3, num_workers=2, seeding="batch", multiprocessing_context="spawn"
        )

    expected = whole(lambda: DataLoader(Shards(), 3, num_workers=2, seeding="batch"))
    state = state_after(
        lambda: DataLoader(Shards(), 3, num_workers=1, shards=2, seeding="batch"), 4
    )
    assert rest_of(make, state) == expected[4:]


def test_copied_loader_starts_over_or_from_the_loaded_state() -> None:
    import pickle

    loader = DataLoader(Counted(), 4, num_workers=2)
    expected = take(iter(loader), 99)
    state = state_after(lambda: DataLoader(Counted(), 4), 2)
    assert take(iter(pickle.loads(pickle.dumps(loader))), 99) == expected
    loader.load_state_dict(state)
    assert take(iter(pickle.loads(pickle.dumps(loader))), 99) == expected[2:]
