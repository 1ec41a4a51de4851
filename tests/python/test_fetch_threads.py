# SPDX-License-Identifier: Apache-2.0
"""fetch_threads=N: torch's batches and errors, with the samples of a batch fetched concurrently."""

from __future__ import annotations

import contextvars
import functools
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from sample_datasets import Batched, Computed, Streamed, as_is, number, where
from stream_oracle import (
    Scenario,
    assert_same_stream,
    describe,
    error_of,
    next_error,
    whole_epochs,
)
from torch.utils.data import MapDataPipe, Subset, TensorDataset, default_collate

from penstock import DataLoader
from penstock.worker.threaded_fetch import FetchPool

WAIT_S = 60.0
FOUR = threading.Barrier(4)
FIVE_FAILED = threading.Event()
NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="nobody")


@pytest.fixture(autouse=True)
def _whole_barrier() -> None:
    FOUR.reset()  # a test that failed may have broken it


def threaded(count: int) -> Any:
    """penstock's class with that many threads, for code that makes a loader from torch's
    arguments."""
    return functools.partial(DataLoader, fetch_threads=count)


def fetch_thread_names() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pk_fetch")]


def nested(index: int) -> dict[str, Any]:
    return {"image": torch.full((3, 5), index / 7), "label": index, "name": f"no. {index}"}


def odd_ones_fail(index: int) -> int:
    if index % 7 == 5:
        raise KeyError(f"no object {index}")
    return index


def needs_four(index: int) -> int:
    FOUR.wait(WAIT_S)
    return index


def fails_at_5_before_2(index: int) -> int:
    if index == 5:
        FIVE_FAILED.set()
        raise ValueError("five")
    if index == 2:
        assert FIVE_FAILED.wait(WAIT_S)
        raise LookupError("two")
    return index


def ambient(index: int) -> tuple[Any, ...]:
    """All thread properties that code can see and that serial fetch keeps equal."""
    return (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")),
        str(torch.empty(1).device),
        NAME.get(),
    )


def change_thread(worker_id: int) -> None:
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_num_threads(2)
    NAME.set(f"worker {worker_id}")


def batched_inside(index: int) -> torch.Tensor:
    """Makes tensors as a collate_fn does, while three other threads do."""
    FOUR.wait(WAIT_S)
    parts = [default_collate([torch.full((999,), index * 10.0 + k)] * 4) for k in range(6)]
    FOUR.wait(WAIT_S)
    return torch.stack(parts)


def raise_it(kind: type[BaseException], index: int) -> int:
    if index == 5:
        raise kind()
    return index


STREAMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "in order": (lambda: Computed(21, number), {"batch_size": 4}),
    "shuffled": (lambda: Computed(21, nested), {"batch_size": 4, "shuffle": True}),
    "drop_last": (lambda: Computed(21, nested), {"batch_size": 4, "drop_last": True}),
    "who fetched it": (lambda: Computed(21, where), {"batch_size": 4, "collate_fn": as_is}),
    "a sampler": (lambda: Computed(21, number), {"batch_size": 3, "sampler": [3, 1, 1, 20, 0]}),
    "batches": (lambda: Computed(21, number), {"batch_sampler": [[1], [], [2, 2, 3]]}),
    "tuples": (lambda: Computed(9, lambda i: number((i,)[0])), {"batch_sampler": [(1, 2), (0,)]}),
    "rows": (lambda: TensorDataset(torch.arange(20.0)), {"batch_size": 3, "shuffle": True}),
    "errors": (lambda: Computed(21, odd_ones_fail), {"batch_size": 4, "shuffle": True}),
    "out of range": (lambda: [1, 2, 3], {"batch_sampler": [[0, 1], [2, 3], [4, 1], [1]]}),
    "a dataset of batches": (lambda: Batched(10), {"batch_size": 4, "collate_fn": as_is}),
    "StopIteration": (
        lambda: Computed(12, functools.partial(raise_it, StopIteration)),
        {"batch_size": 4},
    ),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", STREAMS)
def test_threaded_stream_matches_torch(name: str, workers: int, count: int) -> None:
    make, options = STREAMS[name]
    scenario = Scenario(name, make, {**options, "num_workers": workers}, whole_epochs(2))
    assert_same_stream(threaded(count), scenario)


@pytest.mark.long(
    "nested-forkserver", "nested-spawn", "odd_ones_fail-spawn", "odd_ones_fail-forkserver"
)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("function", [nested, odd_ones_fail])
def test_threaded_stream_of_persistent_workers_matches_torch(
    method: str, function: Callable[[int], Any]
) -> None:
    options = {
        "batch_size": 4,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
        "multiprocessing_context": method,
    }
    scenario = Scenario(method, lambda: Computed(21, function), options, whole_epochs(3))
    assert_same_stream(threaded(3), scenario)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [as_is, lambda data: Subset(Subset(data, range(8)), range(8))])
def test_samples_of_a_batch_are_fetched_concurrently(
    workers: int, wrap: Callable[..., Any]
) -> None:
    """Each waits until all four have started; one after the other they would wait for ever."""
    dataset = wrap(Computed(8, needs_four))
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, fetch_threads=4)
    assert describe(list(loader)) == describe([torch.arange(4), torch.arange(4, 8)])


@pytest.mark.parametrize("workers", [0, 1])
def test_first_failing_sample_in_batch_order_is_raised(workers: int) -> None:
    FIVE_FAILED.clear()
    dataset = Computed(16, fails_at_5_before_2)
    loader = DataLoader(dataset, batch_size=8, num_workers=workers, fetch_threads=8)
    iterator = iter(loader)
    with pytest.raises(LookupError) as caught:
        next(iterator)
    assert type(caught.value) is LookupError
    if workers == 0:
        assert str(caught.value) == "two"
        assert caught.traceback[-1].name == "fails_at_5_before_2"
    else:
        lines = str(caught.value).splitlines()
        assert lines[0] == "Caught LookupError in DataLoader worker process 0."
        assert lines[1] == "Original Traceback (most recent call last):"
        assert lines[-1] == "LookupError: two"
        assert any(line.endswith("in fails_at_5_before_2") for line in lines)
    del caught
    assert next(iterator).tolist() == list(range(8, 16))


def test_failing_batch_waits_for_its_running_samples() -> None:
    """No work on a batch may still be running when the loop continues."""
    started, failing = threading.Event(), threading.Event()
    ended: list[int] = []

    def function(index: int) -> int:
        if index == 0:
            assert started.wait(WAIT_S)
            failing.set()
            raise ValueError
        started.set()
        assert failing.wait(WAIT_S)
        threading.Event().wait(0.2)  # long enough to detect a fetch that does not wait
        ended.append(index)
        return index

    pool = FetchPool(2)
    error_of(lambda: pool.fetch(Computed(2, function), [0, 1]))
    assert ended == [1]


def test_samples_not_started_before_a_failure_never_start() -> None:
    started: list[int] = []

    def function(index: int) -> int:
        started.append(index)
        raise ValueError(index)

    error = error_of(lambda: FetchPool(1).fetch(Computed(9, function), [4, 5, 6]))
    assert str(error) == "4"
    assert started == [4]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exit_raised_by_a_dataset_propagates_from_next(kind: type[BaseException]) -> None:
    dataset = Computed(12, functools.partial(raise_it, kind))
    iterator = iter(DataLoader(dataset, batch_size=4, fetch_threads=4))
    next(iterator)
    with pytest.raises(kind):
        next(iterator)
    assert next(iterator).tolist() == [8, 9, 10, 11]


@pytest.mark.long("SystemExit")
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exit_raised_by_a_dataset_ends_the_worker_as_with_torch(
    kind: type[BaseException],
) -> None:
    dataset = Computed(12, functools.partial(raise_it, kind))
    options = {"batch_size": 4, "num_workers": 1, "prefetch_factor": 1}
    want = error_of(lambda: take_two(torch.utils.data.DataLoader(dataset, **options)))
    got = error_of(lambda: take_two(DataLoader(dataset, **options, fetch_threads=4)))
    assert type(got) is type(want)
    assert str(got).startswith("DataLoader worker (pid(s) ") and "exited" in str(want)


def take_two(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator), next(iterator)


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_thread_state_reaches_the_samples(workers: int) -> None:
    options = {"batch_size": 4, "num_workers": workers, "collate_fn": as_is}
    for init in (None, change_thread):
        scenario = Scenario(
            "state", lambda: Computed(12, ambient), {**options, "worker_init_fn": init}
        )
        assert_same_stream(threaded(4), scenario)


def test_fetch_threads_of_a_worker_compute_on_one_thread_each() -> None:
    loader = DataLoader(
        Computed(4, lambda index: torch.get_num_threads()),
        batch_size=4,
        num_workers=1,
        fetch_threads=4,
    )
    assert next(iter(loader)).tolist() == [1, 1, 1, 1]


def test_trainer_thread_state_reaches_the_samples_of_each_batch() -> None:
    iterator = iter(
        DataLoader(Computed(40, ambient), batch_size=4, collate_fn=as_is, fetch_threads=4)
    )

    def check() -> None:
        assert next(iterator) == [ambient(0)] * 4

    threads = torch.get_num_threads()
    check()
    with torch.inference_mode():
        check()
        with torch.set_grad_enabled(True):
            check()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16), torch.device("meta"):
        check()
    torch.set_num_threads(threads + 1)
    check()
    torch.set_num_threads(threads)
    contextvars.copy_context().run(lambda: (NAME.set("trainer"), check()))
    check()
    assert torch.get_num_threads() == threads


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_trainer_cuda_stream_reaches_the_samples() -> None:
    """Its counterpart without a GPU is the test above."""
    dataset = Computed(8, lambda index: torch.cuda.current_stream())
    iterator = iter(DataLoader(dataset, batch_size=4, collate_fn=as_is, fetch_threads=4))
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            assert next(iterator) == [stream] * 4


def test_shared_storages_made_on_threads_do_not_overlap() -> None:
    """In a worker torch's collate makes them in the slab of the current batch."""
    dataset = Computed(16, batched_inside)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, fetch_threads=4)
    for index, batch in enumerate(loader):
        want = 40.0 * index + 10 * torch.arange(4)[:, None] + torch.arange(6)
        assert torch.equal(batch, want[:, :, None, None].expand(4, 6, 4, 999))


def test_samples_are_passed_on_by_identity() -> None:
    samples = [torch.ones(3), torch.zeros(2)]
    (batch,) = DataLoader(samples, batch_size=2, collate_fn=as_is, fetch_threads=2)
    assert batch[0] is samples[0] and batch[1] is samples[1]


def test_threads_are_named_and_end_with_the_iterator() -> None:
    def native_name(index: int) -> str:
        FOUR.wait(WAIT_S)
        return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()

    iterator = iter(DataLoader(Computed(8, native_name), batch_size=4, fetch_threads=9))
    assert fetch_thread_names() == []
    names = [f"pk_fetch_{k}" for k in range(4)]
    assert sorted(next(iterator)) == names
    assert sorted(fetch_thread_names()) == names
    del iterator
    assert fetch_thread_names() == []


def test_threads_end_with_the_iterator_after_an_error() -> None:
    iterator = iter(DataLoader(Computed(21, odd_ones_fail), batch_size=7, fetch_threads=3))
    next_error(iterator)
    assert len(fetch_thread_names()) == 3
    del iterator
    assert fetch_thread_names() == []


def test_forked_child_starts_its_own_threads() -> None:
    iterator = iter(DataLoader(Computed(8, needs_four), batch_size=4, fetch_threads=4))
    next(iterator)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(next(iterator).tolist()))
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0
    assert answers.get() == [4, 5, 6, 7]
    answers.close()
    assert next(iterator).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]
)
def test_assigned_fetch_threads_takes_effect_at_the_next_iter(options: dict[str, Any]) -> None:
    loader = DataLoader(Computed(4, number), batch_size=4, **options)
    assert len(list(loader)) == 1
    loader.dataset.function = needs_four  # type: ignore[attr-defined]
    loader.fetch_threads = 4
    if not options.get("persistent_workers"):
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
        return
    first = loader._iterator
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    second = loader._iterator
    assert second is not first
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert loader._iterator is second


def test_fetch_threads_is_a_public_attribute() -> None:
    loader = DataLoader([1, 2], fetch_threads=3)
    assert vars(loader)["fetch_threads"] == 3
    assert vars(DataLoader([1, 2]))["fetch_threads"] == 1


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0, ValueError, "fetch_threads must be >= 1, got 0; pass 1"),
        (-2, ValueError, "fetch_threads must be >= 1, got -2; pass 1"),
        (True, TypeError, "fetch_threads must be an int >= 1 or 'auto', got True of type bool"),
        (2.0, TypeError, "fetch_threads must be an int >= 1 or 'auto', got 2.0 of type float"),
        ("4", TypeError, "fetch_threads must be an int >= 1 or 'auto', got '4' of type str"),
        (None, TypeError, "fetch_threads must be an int >= 1 or 'auto', got None of type NoneType"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_invalid_fetch_threads_is_rejected_at_construction_and_iter(
    value: Any, kind: type[Exception], text: str, workers: int
) -> None:
    loader = DataLoader([1], num_workers=workers)
    loader.fetch_threads = value
    for make in (lambda: DataLoader([1], fetch_threads=value), lambda: iter(loader)):
        error = error_of(make)
        assert type(error) is kind
        assert str(error).startswith(text)


class Piped(MapDataPipe[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (
            Streamed(lambda: [1]),
            {},
            "=2 requires a map-style dataset, got the IterableDataset Streamed",
        ),
        (Piped(), {}, " must be 1 for a datapipe, which torch's iterator reads, got 2"),
        ([1], {"batch_size": None}, "=2 requires batches of samples, got batch_size=None"),
    ],
    ids=["iterable", "datapipe", "no batches"],
)
def test_fetch_threads_is_rejected_where_it_cannot_apply(
    dataset: Any, options: dict[str, Any], text: str
) -> None:
    loader = DataLoader(dataset, **options)
    loader.fetch_threads = 2
    for make in (lambda: DataLoader(dataset, **options, fetch_threads=2), lambda: iter(loader)):
        error = error_of(make)
        assert type(error) is ValueError
        assert str(error).startswith(f"fetch_threads{text}")
        assert "leave fetch_threads at 1" in str(error)
