# SPDX-License-Identifier: Apache-2.0
"""Loaders with a pool against the same loader with ``num_workers=0, seeding="batch"``: real workers
in separate processes, reached by CURVE over TCP on loopback."""

from __future__ import annotations

import copy
import enum
import gc
import itertools
import json
import os
import signal
import socket
import sys
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_datasets import CODE, Augmented, Shards, StatefulShards, digests
from pool_processes import PoolProcesses, clients, expect_clients, pool_of
from torch.utils.data import Dataset

import penstock
from penstock import DataLoader, Pool
from penstock.errors import PoolWarning, WorkerError

pytestmark = pytest.mark.slow


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def pooled(
    pool: PoolProcesses, dataset: Any, trust_workers: bool = False, **options: Any
) -> DataLoader[Any]:
    of_pool = Pool(pool.endpoint, code_paths=[CODE], trust_workers=trust_workers)
    return DataLoader(dataset, pool=of_pool, timeout=60, **options)


def alone(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, seeding="batch", **options)


def seeded_digests(loader: DataLoader[Any], epochs: int = 1) -> list[list[str]]:
    torch.manual_seed(7)
    return [digests(loader) for _ in range(epochs)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_shuffled_pool_stream_matches_one_process(
    steady_pool: PoolProcesses, persistent: bool
) -> None:
    dataset = Augmented(100)
    loader = pooled(steady_pool, dataset, batch_size=8, shuffle=True, persistent_workers=persistent)
    expected = seeded_digests(alone(dataset, batch_size=8, shuffle=True), epochs=3)
    assert seeded_digests(loader, epochs=3) == expected
    assert loader.stats().iterator == "pool"
    assert loader.stats().batches == 3 * 13


def test_user_sampler_order_is_kept_on_a_pool(steady_pool: PoolProcesses) -> None:
    dataset = Augmented(60)
    order = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35] * 3
    expected = seeded_digests(alone(dataset, batch_size=4, sampler=order))
    assert seeded_digests(pooled(steady_pool, dataset, batch_size=4, sampler=order)) == expected


@pytest.mark.parametrize("make", [Shards, StatefulShards])
def test_pool_shards_of_iterable_dataset_match_one_process(
    steady_pool: PoolProcesses, make: Any
) -> None:
    dataset = make(101)
    expected = seeded_digests(alone(dataset, batch_size=4, shards=5), epochs=2)
    assert (
        seeded_digests(pooled(steady_pool, dataset, batch_size=4, shards=5), epochs=2) == expected
    )


@pytest.mark.parametrize("make", [Augmented, Shards, StatefulShards])
def test_pool_state_resumes_with_and_without_a_pool(steady_pool: PoolProcesses, make: Any) -> None:
    dataset = make(96)
    options: dict[str, Any] = {"batch_size": 4}
    options.update({"shuffle": True} if make is Augmented else {"shards": 3})
    torch.manual_seed(7)
    expected = digests(alone(dataset, **options))
    torch.manual_seed(7)
    loader = pooled(steady_pool, dataset, **options)
    begun = digests(itertools.islice(loader, 9))
    state = json.loads(json.dumps(loader.state_dict()))
    for other in (pooled(steady_pool, make(96), **options), alone(make(96), **options)):
        other.load_state_dict(state)
        assert begun + digests(other) == expected


@pytest.mark.long
def test_large_batches_arrive_from_a_pool(steady_pool: PoolProcesses) -> None:
    dataset = Augmented(12, values=3_000_000)  # 48 MB a batch
    expected = seeded_digests(alone(dataset, batch_size=4))
    assert seeded_digests(pooled(steady_pool, dataset, batch_size=4)) == expected


Pair = namedtuple("Pair", ["left", "right"])


class Odd(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index

    def collate(self, indices: list[int]) -> Any:
        return {
            "array": np.arange(6, dtype=np.float32).reshape(2, 3) + indices[0],
            "words": ["a", "b", None, b"bytes", 1.5, True],
            "pair": Pair(torch.ones(2), (1, "x")),
            "empty": np.zeros((0, 3), dtype=np.int8),
        }


def test_batches_of_arrays_text_and_namedtuples_match(steady_pool: PoolProcesses) -> None:
    dataset = Odd()
    options = {"batch_size": 2, "collate_fn": dataset.collate}
    batches = list(pooled(steady_pool, dataset, **options))
    assert digests(batches) == digests(alone(dataset, **options))
    assert type(batches[0]["pair"]) is Pair
    assert type(batches[0]["array"]) is np.ndarray
    batches[0]["array"][0, 0] = 5  # it may be written to


class Opaque:
    pass


def opaque(samples: Any) -> Any:
    return Opaque()


def test_arbitrary_objects_need_trust_workers(steady_pool: PoolProcesses) -> None:
    with pytest.raises(penstock.errors.PenstockError, match="trust_workers=True"):
        list(pooled(steady_pool, Odd(), collate_fn=opaque))
    loader = pooled(steady_pool, Odd(), collate_fn=opaque, trust_workers=True)
    assert [type(batch) for batch in loader] == [Opaque] * 4


class Program:
    """The classes of a program's main module, where a worker does not find them by name."""

    class Batch:
        def __init__(self, samples: Any) -> None:
            self.count = len(samples)
            self.kind = Program.Kind.LATE
            self.values = torch.arange(3.0)

    class Kind(enum.Enum):
        LATE = "late"


Program.__module__ = Program.Batch.__module__ = Program.Kind.__module__ = "__main__"


def test_batches_may_have_classes_of_the_main_module(
    steady_pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was "Can't pickle <class '__main__.Batch'>", also with trust_workers."""
    monkeypatch.setattr(sys.modules["__main__"], "Program", Program, raising=False)
    loader = pooled(steady_pool, Odd(), batch_size=2, collate_fn=Program.Batch, trust_workers=True)
    batches = list(loader)
    assert [type(batch) for batch in batches] == [Program.Batch] * 2
    assert batches[0].count == 2
    assert batches[0].kind is Program.Kind.LATE
    assert batches[0].values.tolist() == [0.0, 1.0, 2.0]


class OwnError(Exception):
    pass


class Failing(Dataset[int]):
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise self.error("no sample two")
        return index


def test_dataset_errors_are_raised_at_their_position(steady_pool: PoolProcesses) -> None:
    batches = iter(pooled(steady_pool, Failing(ValueError)))
    assert [int(next(batches)), int(next(batches))] == [0, 1]
    words = rf"worker [0-9a-f]{{16}} \({socket.gethostname()}, process \d+, working directory /"
    with pytest.raises(ValueError, match=f"(?s)in penstock {words}.*no sample two"):
        next(batches)
    assert [int(batch) for batch in batches] == [3, 4, 5]
    with pytest.raises(WorkerError, match="(?s)OwnError.*no sample two"):
        list(pooled(steady_pool, Failing(OwnError)))


@pytest.mark.long
def test_worker_added_later_serves_the_running_stream(pool: PoolProcesses) -> None:
    pool.start_worker()
    dataset = Augmented(400)
    torch.manual_seed(7)
    expected = digests(alone(dataset, batch_size=4))
    torch.manual_seed(7)
    batches = iter(pooled(pool, dataset, batch_size=4))
    found = digests(itertools.islice(batches, 10))
    pool.start_worker(processes=2)
    assert found + digests(batches) == expected


def test_killed_workers_lose_no_batch(pool: PoolProcesses) -> None:
    workers = pool.start_workers(3)
    dataset = Augmented(300)
    torch.manual_seed(7)
    expected = digests(alone(dataset, batch_size=2))
    torch.manual_seed(7)
    batches = iter(pooled(pool, dataset, batch_size=2))
    found = []
    for number, batch in enumerate(batches):
        found += digests([batch])
        if number in (20, 60, 100):
            os.kill(workers[number // 40].pids[-1], signal.SIGKILL)
    assert found == expected


class Deadly(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_batch_that_kills_workers_fails_naming_its_samples(pool: PoolProcesses) -> None:
    pool.start_worker(processes=2)
    batches = iter(pooled(pool, Deadly(), batch_size=2))
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(
        RuntimeError, match=r"^3 workers in a row died .* \(samples 4, 5\).* at tcp://127"
    ):
        next(batches)
    assert next(batches).tolist() == [6, 7]


@pytest.mark.long
def test_own_workers_and_the_pool_serve_one_stream(steady_pool: PoolProcesses) -> None:
    dataset = Augmented(200)
    expected = seeded_digests(alone(dataset, batch_size=4, shuffle=True), epochs=2)
    loader = pooled(steady_pool, dataset, batch_size=4, shuffle=True, num_workers=2)
    assert seeded_digests(loader, epochs=2) == expected


@pytest.mark.long
def test_own_workers_serve_while_the_pool_is_empty(pool: PoolProcesses) -> None:
    dataset = Augmented(40)
    expected = seeded_digests(alone(dataset, batch_size=4))
    assert seeded_digests(pooled(pool, dataset, batch_size=4, num_workers=1)) == expected


@pytest.mark.long
def test_own_workers_added_later_serve_after_pool_is_drained(
    pool: PoolProcesses,
) -> None:
    """Training waited for ever: two local processes ran, and got no requests."""
    worker = pool.start_worker()
    expected = seeded_digests(alone(Augmented(40), batch_size=4), epochs=2)
    loader = pooled(pool, Augmented(40), batch_size=4)
    found = seeded_digests(loader)
    assert worker.end() == 0
    loader.num_workers = 1
    assert found + [digests(loader)] == expected


@pytest.mark.long
def test_empty_pool_warns_and_times_out(pool: PoolProcesses) -> None:
    loader = DataLoader(Augmented(4), pool=pool.endpoint, timeout=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PoolWarning)
        with pytest.raises(RuntimeError, match="(?s)timed out after 7 seconds.*has no worker"):
            next(iter(loader))
    assert any("waits for workers" in str(one.message) for one in caught)


@pytest.mark.long
def test_timeout_error_names_address_without_controller(pool: PoolProcesses) -> None:
    pool.close()
    loader = DataLoader(Augmented(4), pool=pool.endpoint, timeout=2)
    with pytest.raises(RuntimeError, match="(?s)timed out.*no controller answered at tcp://"):
        next(iter(loader))


def test_unknown_host_error_does_not_suggest_a_controller(
    pool: PoolProcesses,
) -> None:
    loader = DataLoader(Augmented(4), pool="tcp://no-such-host.invalid:7000", timeout=1)
    with pytest.raises(
        RuntimeError, match="(?s)timed out.*no address is known for this name"
    ) as caught:
        next(iter(loader))
    assert "start one" not in str(caught.value)


@pytest.mark.long
def test_error_says_when_the_controller_last_answered(pool: PoolProcesses) -> None:
    pool.start_worker()
    dataset = Augmented(4)
    loader = pooled(pool, dataset)
    assert len(digests(loader)) == 4
    pool.close()
    dataset.count = 3  # which the client of the epoch before does not have
    loader.timeout = 2
    words = r"(?s)timed out.*no controller answered.*last answered \d+ s ago, in an earlier"
    with pytest.raises(RuntimeError, match=words):
        next(iter(loader))


def test_stream_continues_while_controller_is_down(pool: PoolProcesses) -> None:
    pool.start_worker(processes=2)
    dataset = Augmented(300)
    torch.manual_seed(7)
    expected = digests(alone(dataset, batch_size=2))
    torch.manual_seed(7)
    batches = iter(pooled(pool, dataset, batch_size=2))
    found = digests(itertools.islice(batches, 20))
    pool.processes[0].end(signal.SIGKILL)
    found += digests(itertools.islice(batches, 60))
    pool.start_controller(bind=pool.endpoint)
    assert found + digests(batches) == expected


@pytest.mark.long
def test_next_epochs_need_no_controller(pool: PoolProcesses) -> None:
    pool.start_worker(processes=2)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True}
    expected = seeded_digests(alone(Augmented(80), **options), epochs=3)
    loader = pooled(pool, Augmented(80), **options)
    found = seeded_digests(loader)
    pool.processes[0].end(signal.SIGKILL)
    found += [digests(loader) for _ in range(2)]
    assert found == expected
    assert loader.stats().batches == 60


@pytest.mark.parametrize("make", [Augmented, StatefulShards])
def test_abandoned_and_changed_epochs_match_one_process(
    steady_pool: PoolProcesses, make: Any
) -> None:
    """The client that an iterator leaves behind serves the next one, if that belongs to the same
    job."""

    def stream(loader: DataLoader[Any], dataset: Any) -> Iterator[list[str]]:
        torch.manual_seed(7)
        batches = iter(loader)
        yield digests(itertools.islice(batches, 3))
        del batches
        first, second = iter(loader), iter(loader)
        yield digests(itertools.islice(first, 2))
        yield digests(second)
        yield digests(first)
        dataset.count //= 2
        yield digests(loader)
        yield digests(copy.deepcopy(loader))

    found, expected = make(64), make(64)
    options: dict[str, Any] = {"batch_size": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoolWarning)  # one shard
        streams = list(stream(pooled(steady_pool, found, **options), found))
    assert streams == list(stream(alone(expected, **options), expected))


def test_client_does_not_outlive_its_loader(steady_pool: PoolProcesses) -> None:
    gc.collect()
    before = clients()
    loader = pooled(steady_pool, Augmented(8))
    digests(loader)
    expect_clients(before + 1)
    assert len(digests(loader)) == 8
    expect_clients(before + 1)
    del loader
    gc.collect()
    expect_clients(before)


class NeverPulled:
    def __iter__(self) -> Iterator[int]:
        raise ValueError("no index")
        yield 0


class PulledTwice:
    def __iter__(self) -> Iterator[int]:
        yield from range(2)
        raise ValueError("no more")


@pytest.mark.parametrize("sampler", [None, NeverPulled(), PulledTwice()])
def test_failed_iterator_leaves_the_pool_even_if_error_is_kept(
    steady_pool: PoolProcesses, sampler: Any
) -> None:
    """The user kept the errors of five loops: the pool had six trainers."""
    gc.collect()
    before = clients()
    errors = []
    loader = pooled(steady_pool, Failing(ValueError), sampler=sampler)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no (sample two|index|more)") as caught:
            for _ in loader:
                pass
        errors.append(caught.value)
        expect_clients(before)
    assert all(error.__traceback__ is not None for error in errors)
    # The user's frames are as they were, for a debugger.
    frame = errors[0].__traceback__.tb_frame
    assert frame.f_locals["errors"] is errors


def test_two_jobs_share_a_pool(steady_pool: PoolProcesses) -> None:
    loaders = [pooled(steady_pool, Augmented(count), batch_size=4) for count in (80, 60)]
    streams = [iter(loader) for loader in loaders]
    found: list[list[Any]] = [[], []]
    for pair in itertools.zip_longest(*streams):
        for batches, batch in zip(found, pair, strict=True):
            batches += [] if batch is None else [batch["index"].tolist()]
    assert [sum(part, []) for part in found] == [list(range(80)), list(range(60))]
    status = steady_pool.status()
    assert len(status["workers"]) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeding": "worker"}, r"pass seeding='batch' \(the default with a pool\)"),
        ({"pool": "localhost:7000"}, "tcp://host:7000"),
        (
            {"pool": Pool("tcp://127.0.0.1:7000", code_paths=["/not/there"])},
            "must name existing fol",
        ),
        ({"prefetch_factor": 0}, "an int >= 1, got 0"),
        ({"num_workers": "auto"}, "it is the pool that grows and shrinks"),
        ({"timeout": -1}, "seconds, or 0 for none, got -1"),
    ],
)
def test_invalid_pool_options_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataLoader(Augmented(4), **{"pool": "tcp://127.0.0.1:7000", **options})


def test_pool_allows_worker_options_without_num_workers() -> None:
    loader = DataLoader(
        Augmented(4), pool="tcp://127.0.0.1:7", prefetch_factor=3, persistent_workers=True
    )
    assert (loader.prefetch_factor, loader.persistent_workers, loader.timeout) == (3, True, 0)
    assert loader.pool == "tcp://127.0.0.1:7"
    assert loader.num_workers == 0
