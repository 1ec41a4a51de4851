# SPDX-License-Identifier: Apache-2.0
"""Batches that a pool keeps by name, against loaders without a pool: real controllers and workers
on loopback, and datasets that count the samples that are fetched."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import (
    CODE,
    Corrupt,
    Recorded,
    RecordedWithGenerator,
    Shards,
    digests,
)
from pool_processes import PoolProcesses, pool_of, wait_until

from penstock import DataLoader, Pool, _pool
from penstock.cli.command_parser import byte_count

pytestmark = pytest.mark.slow

SAMPLES, BATCH = 64, 8


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    """One that keeps the batches of all tests. The paths of their datasets, and therefore the names
    of their batches, differ."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(tmp_path_factory.mktemp("keeping"), monkeypatch, "--keep", "256MB"):
            opened.start_worker(processes=4)
            wait_for_share(opened)
            yield opened


@pytest.fixture
def small_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    """One that keeps about five batches of eight, at two workers."""
    for opened in pool_of(tmp_path, monkeypatch, "--keep", "100kB"):
        opened.start_worker(processes=2)
        yield opened


def pooled(
    pool: PoolProcesses, dataset: Any, *, keys: str | None = None, **options: Any
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        pool=Pool(pool.endpoint, keys=keys, code_paths=[CODE]),
        timeout=60,
        **{"batch_size": BATCH, "seeding": "batch", **options},
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def alone(dataset: Recorded, epochs: int = 1, **options: Any) -> list[list[str]]:
    """Return the digests of the batches of a loader without a pool, which does not count."""
    options = {"batch_size": BATCH, "seeding": "batch", **options}
    if "seed" in options:
        options["generator"] = seeded(options.pop("seed"))
    kind = type(dataset)
    copy = kind(Path(dataset.path + ".alone"), dataset.count, dataset.draws, dataset.values)
    loader = DataLoader(copy, **options)
    return [digests(loader) for _ in range(epochs)]


def kept_answers(pool: PoolProcesses) -> int:
    return sum(worker["kept_answers"] for worker in pool.status()["workers"])


def pool_totals(pool: PoolProcesses) -> tuple[int, int]:
    return kept_answers(pool), sum(worker["kept_bytes"] for worker in pool.status()["workers"])


def wait_for_share(pool: PoolProcesses) -> None:
    """Wait until the workers know that they keep batches: a controller that has just started knows
    too few workers to share out its bytes."""
    wait_until(lambda: pool.status()["controller"]["is_settled"])
    # Each worker reports twice in a second, and gets its share in answer.
    time.sleep(1.2)


def test_second_validation_makes_one_batch_and_the_third_none(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES)
    loader = pooled(pool, dataset)
    expected = alone(dataset)[0]
    kept_before, counts = kept_answers(pool), []
    for _ in range(4):
        assert digests(loader) == expected
        counts.append(dataset.read_count())
    # The first batch of the second epoch shows that its seeds do not matter.
    assert counts[0] == SAMPLES
    assert counts[1] == counts[0] + BATCH
    assert counts[2] == counts[3] == counts[1]
    wait_until(lambda: kept_answers(pool) - kept_before >= 3 * SAMPLES // BATCH - 1)
    assert kept_answers(pool) - kept_before == 3 * SAMPLES // BATCH - 1
    text = subprocess.run(
        [sys.executable, "-m", "penstock", "status", "--controller", pool.endpoint],
        env=pool.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(r"[0-9.]+ MB of batches are kept; \d+ were not made again", text)


@pytest.mark.parametrize("draws", ["torch", "numpy", "random", "generator", "seed"])
def test_batches_with_random_numbers_are_made_in_each_epoch(
    pool: PoolProcesses, tmp_path: Path, draws: str
) -> None:
    kind = RecordedWithGenerator if draws == "generator" else Recorded
    dataset = kind(tmp_path / "count", SAMPLES, "" if draws == "generator" else draws)
    expected = alone(dataset, 3, seed=5)
    assert len({*map(tuple, expected)}) == 3
    loader = pooled(pool, dataset, generator=seeded(5))
    assert [digests(loader) for _ in range(3)] == expected
    assert dataset.read_count() == 3 * SAMPLES
    again = pooled(pool, dataset, generator=seeded(5))
    assert [digests(again) for _ in range(3)] == expected
    assert dataset.read_count() == 3 * SAMPLES, "a run that repeats another takes its batches"


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("jobs", [2, 4])
def test_jobs_with_one_seed_cost_as_much_as_one(
    pool: PoolProcesses, tmp_path: Path, jobs: int, seeding: str
) -> None:
    dataset = Recorded(tmp_path / "count", 4 * SAMPLES, "torch", seconds=0.002)
    options = {"shuffle": True, "seeding": seeding}
    expected = alone(dataset, 2, seed=3, **options)
    found: list[Any] = [None] * jobs

    def train(job: int) -> None:
        loader = pooled(pool, dataset, generator=seeded(3), **options)
        found[job] = [digests(loader) for _ in range(2)]

    threads = [threading.Thread(target=train, args=(job,)) for job in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * jobs
    assert dataset.read_count() <= 1.05 * 2 * 4 * SAMPLES


def test_late_and_restarted_jobs_take_what_is_there(pool: PoolProcesses, tmp_path: Path) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES, "torch")
    expected = alone(dataset, 1, seed=3, shuffle=True)[0]
    first = pooled(pool, dataset, generator=seeded(3), shuffle=True)
    early = digests(itertools.islice(iter(first), 3))
    assert early == expected[:3]
    state = first.state_dict()
    assert digests(pooled(pool, dataset, generator=seeded(3), shuffle=True)) == expected
    made = dataset.read_count()
    assert made <= SAMPLES + BATCH, "the first job's batches ahead may have been made twice"
    resumed = pooled(pool, dataset, generator=seeded(3), shuffle=True)
    resumed.load_state_dict(state)
    assert digests(resumed) == expected[3:]
    assert dataset.read_count() == made


def test_budget_that_is_too_small_costs_no_value(small_pool: PoolProcesses, tmp_path: Path) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES, values=512)  # 16 kB a batch
    wait_for_share(small_pool)
    loader = pooled(small_pool, dataset)
    expected = alone(dataset)[0]
    for _ in range(4):
        assert digests(loader) == expected
        kept_bytes = [worker["kept_bytes"] for worker in small_pool.status()["workers"]]
        assert sum(kept_bytes) <= 100_000
    made = dataset.read_count()
    assert digests(loader) == expected
    assert 0 < dataset.read_count() - made < SAMPLES, "it keeps a part"
    random = Recorded(tmp_path / "other", SAMPLES, "torch", values=512)
    other = pooled(small_pool, random, generator=seeded(3))
    assert [digests(other) for _ in range(2)] == alone(random, 2, seed=3)
    assert random.read_count() == 2 * SAMPLES


def test_other_seeds_data_and_samples_share_nothing(pool: PoolProcesses, tmp_path: Path) -> None:
    path = tmp_path / "count"
    made = 0
    variants: list[tuple[Recorded, int, dict[str, Any]]] = [
        (Recorded(path, SAMPLES, "torch"), 3, {}),
        (Recorded(path, SAMPLES, "torch"), 4, {}),
        (Recorded(path, SAMPLES, "torch", values=128), 3, {}),
        (Recorded(path, SAMPLES, "torch"), 3, {"batch_size": 4}),
        (Recorded(path, SAMPLES, "torch"), 3, {"seeding": "sample"}),
    ]
    for dataset, seed, options in variants:
        loader = pooled(pool, dataset, generator=seeded(seed), **options)
        assert digests(loader) == alone(dataset, 1, seed=seed, **options)[0]
        made += SAMPLES
        assert dataset.read_count() == made


def test_key_of_another_user_shares_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    _pool.make_key_folder(str(keys))
    folders = {user: str(tmp_path / f"of {user}") for user in ("ann", "ben")}
    for user, folder in folders.items():
        _pool.make_user_keys(str(keys), user, folder)
    pool = PoolProcesses(tmp_path)
    try:
        pool.start_controller("--keys", str(keys), "--keep", "64MB")
        pool.start_worker("--keys", str(keys), processes=2)
        dataset = Recorded(tmp_path / "count", SAMPLES, "torch")
        expected = alone(dataset, 1, seed=3)[0]
        time.sleep(4)  # as wait_for_share(), for which an operator's key would be needed
        counts = []
        for user in ("ann", "ann", "ben", "ben", "ann"):
            loader = pooled(pool, dataset, keys=folders[user], generator=seeded(3))
            assert digests(loader) == expected
            counts.append(dataset.read_count() // SAMPLES)
        assert counts == [1, 1, 2, 2, 2]
        pool.end()
    finally:
        pool.close()


def test_killed_processes_cost_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in pool_of(tmp_path, monkeypatch, "--keep", "64MB"):
        workers = pool.start_workers(2)
        wait_for_share(pool)
        for what in ("job", "server"):
            dataset = Recorded(tmp_path / f"count of {what}", 4 * SAMPLES, seconds=0.002)
            expected = alone(dataset)[0]
            loader = pooled(pool, dataset)
            for epoch in range(2):
                batches = iter(loader)
                found = digests(itertools.islice(batches, 8))
                server = workers[epoch % 2].pids[0]
                for pid in _processes_below(server) if what == "job" else [server]:
                    os.kill(pid, signal.SIGKILL)
                found += digests(batches)
                assert found == expected


def _processes_below(pid: int) -> list[int]:
    """Return the job processes of a server: the children of its warm process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(job)
        for warm in children
        for job in Path(f"/proc/{warm}/task/{warm}/children").read_text().split()
    ]


def test_batches_that_are_no_function_of_their_name_are_not_kept(pool: PoolProcesses) -> None:
    before = pool_totals(pool)
    skipping = pooled(pool, Corrupt(32, [3, 9]), on_error="skip", generator=seeded(1))
    iterable = pooled(pool, Shards(32), shards=2, generator=seeded(1))
    for each in (skipping, iterable):
        for _ in range(3):
            digests(each)
    time.sleep(1.2)  # for the workers' next reports
    assert pool_totals(pool) == before


def test_loader_that_keeps_nothing_makes_all_batches(pool: PoolProcesses, tmp_path: Path) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES)
    of_pool = Pool(pool.endpoint, code_paths=[CODE], keep=False)
    loader = DataLoader(dataset, batch_size=BATCH, pool=of_pool, timeout=60)
    for epoch in range(3):
        digests(loader)
        assert dataset.read_count() == (epoch + 1) * SAMPLES


def test_batches_that_raise_are_made_again(pool: PoolProcesses) -> None:
    for _ in range(2):
        with pytest.raises(LookupError, match="no sample 3"):
            digests(pooled(pool, Corrupt(32, [3]), generator=seeded(1)))


def test_nothing_is_kept_by_default(steady_pool: PoolProcesses, tmp_path: Path) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES)
    loader = pooled(steady_pool, dataset)
    for epoch in range(3):
        digests(loader)
        assert dataset.read_count() == (epoch + 1) * SAMPLES
    assert all(worker["kept_bytes"] == 0 for worker in steady_pool.status()["workers"])


def test_controller_without_keep_has_its_workers_drop_the_batches(
    small_pool: PoolProcesses, tmp_path: Path
) -> None:
    dataset = Recorded(tmp_path / "count", SAMPLES)
    wait_for_share(small_pool)
    loader = pooled(small_pool, dataset)
    digests(loader)
    wait_until(lambda: pool_totals(small_pool)[1] > 0)
    small_pool.processes[0].end()
    small_pool.start_controller(bind=small_pool.endpoint)
    wait_until(lambda: len(small_pool.status()["workers"]) == 2 and pool_totals(small_pool)[1] == 0)
    assert digests(loader) == alone(dataset)[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1048576", 1 << 20), ("200GB", 200 * 10**9), ("1.5 GiB", 3 << 29), ("2k", 2000)],
)
def test_bytes_of_an_option(text: str, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "ten", "1.5", "1XB", "9999999TB", "1e9", "nan"])
def test_bytes_that_are_not_a_number_are_refused(text: str) -> None:
    with pytest.raises(Exception, match="must be a number of bytes, such as 200GB"):
        byte_count(text)
