# SPDX-License-Identifier: Apache-2.0
"""Batches that the workers of one machine keep together, whichever command has started them: real
pools of several servers on loopback, and datasets that count the samples that are fetched."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_pools import Elastic
from pool_datasets import CODE, Recorded, digests
from pool_processes import PoolProcesses, pool_of, wait_until

from penstock import DataLoader, Pool

pytestmark = pytest.mark.slow

SAMPLES, BATCH = 64, 8
# Of a sample: batches that follow a message between two servers, and batches that are passed as
# files in memory.
SMALL, LARGE = 256, 4096
WORKERS = 4


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """`penstock up` with four workers, each of which has a server to itself."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        elastic = Elastic(tmp_path_factory.mktemp("keeping"), monkeypatch)
        try:
            elastic.up("--min", str(WORKERS), "--max", str(WORKERS), "--keep", "256MB")
            elastic.has_workers(WORKERS)
            wait_for_share(elastic.pool)
            yield elastic.pool
            elastic.down()
        finally:
            elastic.close()


def wait_for_share(pool: PoolProcesses) -> None:
    """Wait until the workers know that they keep batches, and have found each other: they look for
    each other twice in a second from then on."""
    wait_until(lambda: pool.status()["controller"]["is_settled"])
    time.sleep(2.5)


def pooled(pool: PoolProcesses, dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        pool=Pool(pool.endpoint, code_paths=[CODE]),
        timeout=60,
        **{"batch_size": BATCH, "seeding": "batch", **options},
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def alone(dataset: Recorded, epochs: int = 1, **options: Any) -> list[list[str]]:
    """Return the digests of the batches of a loader without a pool, which does not count."""
    if "seed" in options:
        options["generator"] = seeded(options.pop("seed"))
    copy = Recorded(Path(dataset.path + ".alone"), dataset.count, dataset.draws, dataset.values)
    loader = DataLoader(copy, batch_size=BATCH, seeding="batch", **options)
    return [digests(loader) for _ in range(epochs)]


def train_at_once(
    pool: PoolProcesses, dataset: Recorded, jobs: int, epochs: int
) -> list[list[list[str]]]:
    """Return the digests of ``jobs`` jobs with one seed that run at the same time."""
    found: list[Any] = [None] * jobs

    def train(job: int) -> None:
        loader = pooled(pool, dataset, generator=seeded(3), shuffle=True)
        found[job] = [digests(loader) for _ in range(epochs)]

    threads = [threading.Thread(target=train, args=(job,)) for job in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("values", [SMALL, LARGE])
def test_validation_of_several_servers_makes_no_sample_from_the_third_time_on(
    pool: PoolProcesses, tmp_path: Path, values: int
) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES, values=values)
    loader = pooled(pool, dataset)
    expected = alone(dataset)[0]
    counts = []
    for _ in range(4):
        assert digests(loader) == expected
        counts.append(dataset.read_count())
    # A first batch of the second epoch, of each worker at most, shows that its seeds do not matter.
    assert counts[0] == SAMPLES
    assert counts[1] <= SAMPLES + WORKERS * BATCH
    assert counts[2:] == [counts[1]] * 2


@pytest.mark.parametrize("values", [SMALL, LARGE])
def test_jobs_with_one_seed_at_several_servers_cost_as_much_as_one(
    pool: PoolProcesses, tmp_path: Path, values: int
) -> None:
    dataset = Recorded(tmp_path / "count", 4 * SAMPLES, "torch", values, seconds=0.002)
    expected = alone(dataset, 2, seed=3, shuffle=True)
    assert train_at_once(pool, dataset, WORKERS, 2) == [expected] * WORKERS
    assert dataset.read_count() <= 1.05 * 2 * 4 * SAMPLES


def test_late_and_resumed_jobs_take_what_another_server_has(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES, "torch", LARGE)
    expected = alone(dataset, 1, seed=3, shuffle=True)[0]
    first = pooled(pool, dataset, generator=seeded(3), shuffle=True)
    assert digests(itertools.islice(iter(first), 3)) == expected[:3]
    state = first.state_dict()
    assert digests(pooled(pool, dataset, generator=seeded(3), shuffle=True)) == expected
    made = dataset.read_count()
    # The batches ahead of the first job, at most two of each worker, may have been taken back.
    assert made <= SAMPLES + 2 * WORKERS * BATCH
    resumed = pooled(pool, dataset, generator=seeded(3), shuffle=True)
    resumed.load_state_dict(state)
    assert digests(resumed) == expected[3:]
    assert dataset.read_count() == made


@pytest.fixture
def two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    for opened in pool_of(tmp_path, monkeypatch, "--keep", "64MB"):
        opened.start_workers(2)
        wait_for_share(opened)
        yield opened


def test_servers_that_are_killed_in_mid_epoch_cost_no_value(
    two_servers: PoolProcesses, tmp_path: Path
) -> None:
    """Two jobs of small batches, then two of large ones, while each server is killed."""
    for values in (SMALL, LARGE):
        dataset = Recorded(tmp_path / f"{values}", 4 * SAMPLES, "torch", values, seconds=0.002)
        expect_no_difference_while_servers_are_killed(two_servers, dataset)


def expect_no_difference_while_servers_are_killed(pool: PoolProcesses, dataset: Recorded) -> None:
    expected = alone(dataset, 2, seed=3)
    loaders = [pooled(pool, dataset, generator=seeded(3)) for _ in range(2)]
    servers = [worker for worker in pool.processes if hasattr(worker, "pids")]
    for epoch in range(2):
        batches = [iter(loader) for loader in loaders]
        found = [digests(itertools.islice(one, 4)) for one in batches]
        # One of the two keeps the batches of both. The other one may have been killed before.
        wait_until(lambda server=servers[epoch % 2]: server.pids != [])  # type: ignore[misc]
        os.kill(servers[epoch % 2].pids[0], signal.SIGKILL)
        rest: list[Any] = [None, None]

        def finish(job: int, batches: Sequence[Any] = batches, rest: list[Any] = rest) -> None:
            rest[job] = digests(batches[job])

        threads = [threading.Thread(target=finish, args=(job,)) for job in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [[*found[job], *rest[job]] for job in range(2)] == [expected[epoch]] * 2


def test_worker_that_joins_later_serves_the_batches_of_others(
    two_servers: PoolProcesses, tmp_path: Path
) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES, values=LARGE)
    expected = alone(dataset)[0]
    loader = pooled(two_servers, dataset)
    for _ in range(2):
        assert digests(loader) == expected
    made = dataset.read_count()
    (worker,) = two_servers.start_workers(1)
    wait_for_share(two_servers)
    (joined, _, _) = worker.served()[0]

    def serves() -> bool:
        assert digests(loader) == expected
        workers = two_servers.status()["workers"]
        return any(one["id"] == joined and one["kept_answers"] > 0 for one in workers)

    wait_until(serves)
    assert dataset.read_count() == made


def test_servers_whose_jobs_see_other_modules_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pool in pool_of(tmp_path, monkeypatch, "--keep", "64MB"):
        other = tmp_path / "elsewhere"
        other.mkdir()
        pool.start_worker()
        pool.start_worker(environment={"PYTHONPATH": str(other)})
        wait_for_share(pool)
        dataset = Recorded(tmp_path / "count", SAMPLES, "torch", seconds=0.01)
        expected = alone(dataset, 1, seed=3, shuffle=True)
        assert train_at_once(pool, dataset, 2, 1) == [expected] * 2
        # Each server makes a batch once at most.
        assert SAMPLES < dataset.read_count() <= 2 * SAMPLES
