# SPDX-License-Identifier: Apache-2.0
"""`penstock costs`: the costs of a pool's jobs, from the measurements of their workers. Unknown
values are reported as unknown, and never as zero."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of
from torch.utils.data import Dataset, IterableDataset

from penstock import DataLoader, _pool
from penstock.cli.command_line import main
from penstock.loader.stats import LoaderStats
from penstock.pool.pool_status import cost_text

BILL = {
    "worker_hours": 1.5,
    "cpu_hours": 1.25,
    "bytes": 3.2e9,
    "batches": 100,
    "samples": 6400,
    "energy_j": 27_000.0,
    "gpu_energy_j": 1.5e6,
    "money": 0.06,
    "gco2": 2.625,
}
SHARE = {
    "worker_hours": 0.234375,
    "cpu_hours": 0.1953125,
    "bytes": 5e8,
    "batches": 15.625,
    "samples": 1000,
    "energy_j": 4218.75,
    "gpu_energy_j": 234_375.0,
    "money": 0.009375,
    "gco2": 0.41015625,
}
FACTORS = {"price_per_hour": 0.04, "energy_price_per_kwh": None, "gco2_per_kwh": 350}


def job(**changes: Any) -> dict[str, Any]:
    return {
        "job": "train.py: Images",
        "about": "node7, process 4711, torch 2.11.0",
        "is_running": True,
        "since_report_s": 0.2,
        "user": None,
        "tenancies": 4,
        "metered_tenancies": 4,
        "metered_energy_j": 27_000.0,
        "total": BILL,
        "per_1000_samples": SHARE,
        **changes,
    }


def answer(*jobs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "factors": FACTORS,
        "jobs": [*jobs],
        "jobs_left_out": 0,
        "jobs_forgotten": 0,
        **changes,
    }


def cells(text: str, line: int) -> list[str]:
    return re.split(r"  +", text.splitlines()[line])


def test_job_has_a_line_and_another_per_1000_samples() -> None:
    text = cost_text(answer(job()))
    assert cells(text, 0) == [
        "job", "trainer", "state", "worker h", "CPU h", "bytes", "batches", "samples", "energy",
        "GPU energy", "money", "gCO2",
    ]  # fmt: skip
    assert cells(text, 1) == [
        "train.py: Images", "node7/4711", "running", "1.500", "1.250", "3.2 GB", "100", "6,400",
        "27 kJ", "1.5 MJ", "0.06000", "2.625",
    ]  # fmt: skip
    assert text.splitlines()[2:4] == ["", "per 1,000 samples:"]
    assert cells(text, 5)[3:] == [
        "0.2344", "0.1953", "500 MB", "15.625", "1,000", "4.219 kJ", "234.4 kJ",
        "0.009375", "0.4102",
    ]  # fmt: skip
    assert len(text.splitlines()) == 6


def test_job_is_shown_with_its_user() -> None:
    text = cost_text(answer(job(user="ann")))
    for line in (1, 5):
        assert cells(text, line)[0] == "train.py: Images (ann)"


def test_unknown_values_are_shown_with_the_reason() -> None:
    unknown = {**BILL, "energy_j": None, "gpu_energy_j": None, "money": None, "gco2": None}
    factors = dict.fromkeys(FACTORS)
    text = cost_text(
        answer(
            job(total=unknown, per_1000_samples=None, metered_tenancies=3, metered_energy_j=12.5),
            factors=factors,
        )
    )
    assert cells(text, 1)[-4:] == ["unknown"] * 4
    assert "per 1,000 samples" not in text
    assert (
        "energy of train.py: Images of node7/4711 is unknown: of 4 times that a worker served it, "
        "the worker's host reported its energy in 3 (12.5 J)" in text
    )
    assert "money is unknown: give --price-per-hour, --energy-price or both" in text
    assert "gCO2 is unknown: give --gco2-per-kwh" in text


def test_ended_and_omitted_jobs_are_reported() -> None:
    text = cost_text(
        answer(job(is_running=False, since_report_s=7300.0), jobs_left_out=2, jobs_forgotten=3)
    )
    assert cells(text, 1)[2] == "ended 2 h ago"
    assert "2 more jobs are omitted: the controller's answer has no room for them" in text
    assert "3 older jobs are no longer kept" in text


def test_pool_without_jobs_prints_no_jobs() -> None:
    assert cost_text(answer()) == "no jobs"


def test_job_names_cannot_inject_terminal_escapes() -> None:
    assert "\x1b" not in cost_text(answer(job(job="\x1b[2Jx", about="\x1b[1m, process 1")))


def test_loader_energy_is_known_only_if_all_workers_report_it() -> None:
    known = LoaderStats(pool_tenancies=2, pool_metered_tenancies=2, pool_metered_energy_j=5.0)
    assert known.pool_energy_j == 5.0
    partly = LoaderStats(pool_tenancies=2, pool_metered_tenancies=1, pool_metered_energy_j=5.0)
    assert partly.pool_energy_j is None


class Busy(Dataset[torch.Tensor]):
    """Samples that keep their worker busy for this long."""

    def __init__(self, count: int, seconds: float = 0.01) -> None:
        self.count = count
        self.seconds = seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        began_at = time.thread_time()
        while time.thread_time() < began_at + self.seconds:
            pass
        spent_s = time.thread_time() - began_at
        return torch.full((250,), spent_s)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.full((250,), float(index)) for index in range(50))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def costs(pool: PoolProcesses, **factors: float) -> dict[str, Any]:
    answer = json.loads(_pool.pool_costs(pool.endpoint, None, SECONDS_MAX, **factors))
    assert isinstance(answer, dict)
    return answer


def ended_job(pool: PoolProcesses, name: str, **factors: float) -> dict[str, Any]:
    """The job of a loader that has ended: its farewell is in flight."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        found = [one for one in costs(pool, **factors)["jobs"] if one["job"].endswith(name)]
        if found and not found[0]["is_running"]:
            assert len(found) == 1
            return dict(found[0])
        assert time.monotonic() < deadline, costs(pool)
        time.sleep(0.1)


@pytest.mark.slow
def test_job_costs_are_known_after_its_end(pool: PoolProcesses) -> None:
    pool.start_worker(processes=2)
    loader = DataLoader(Busy(250), batch_size=4, pool=pool.endpoint)
    batches = list(loader)
    assert sum(map(len, batches)) == 250
    spent_s = sum(float(batch[:, 0].sum()) for batch in batches)
    stats = loader.stats()
    assert stats.pool_samples == 250
    assert stats.pool_bytes > 250 * 1000
    # The samples' noted time is a part of their workers' time.
    assert stats.pool_cpu_s >= spent_s
    assert stats.pool_worker_s > 0
    assert stats.pool_tenancies >= 1
    assert stats.pool_energy_j is None  # no machine of this test reports it
    del loader
    seen = ended_job(pool, "Busy", price_per_hour=3.6)
    total = seen["total"]
    assert (total["batches"], total["samples"]) == (63, 250)
    assert total["bytes"] == stats.pool_bytes
    # Its workers stayed for a while after the last batch.
    assert 3600 * total["cpu_hours"] >= spent_s
    assert 3600 * total["worker_hours"] > 0
    assert total["money"] == pytest.approx(3.6 * total["worker_hours"])
    assert seen["metered_tenancies"] == 0
    assert total["energy_j"] is None and total["gco2"] is None
    assert seen["per_1000_samples"]["cpu_hours"] == pytest.approx(4 * total["cpu_hours"])
    assert costs(pool)["jobs"][0]["total"]["money"] is None


@pytest.mark.long
@pytest.mark.slow
def test_iterable_dataset_samples_are_counted_by_the_worker(pool: PoolProcesses) -> None:
    pool.start_worker()
    loader = DataLoader(Stream(), batch_size=8, pool=pool.endpoint)
    with pytest.warns(UserWarning, match="is read in 1 shard"):
        assert sum(len(batch) for batch in loader) == 50
    del loader
    total = ended_job(pool, "Stream")["total"]
    assert (total["batches"], total["samples"]) == (7, 50)


@pytest.mark.slow
def test_local_workers_do_not_count_as_pool_costs(pool: PoolProcesses) -> None:
    loader = DataLoader(Busy(20), batch_size=4, num_workers=1, pool=pool.endpoint)
    assert sum(len(batch) for batch in loader) == 20
    del loader
    seen = ended_job(pool, "Busy")
    assert seen["tenancies"] == 0
    assert seen["total"]["worker_hours"] == seen["total"]["samples"] == 0
    assert seen["per_1000_samples"] is None


class Counter:
    """A machine's powercap tree, whose processor draws ten watts."""

    def __init__(self, folder: Path) -> None:
        self.zone = folder / "powercap" / "intel-rapl:0"
        self.zone.mkdir(parents=True)
        (self.zone / "name").write_text("package-0\n")
        (self.zone / "max_energy_range_uj").write_text("262143328850\n")
        self._file = self.zone / "energy_uj"
        self.used_uj = 0
        self._set(5_000_000)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def folder(self) -> str:
        return str(self.zone.parent)

    def _set(self, value: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{value}\n")
        new.replace(self._file)  # like the kernel, which never shows half a number

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.used_uj += 500_000
            self._set(5_000_000 + self.used_uj)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.long
@pytest.mark.slow
def test_energy_is_the_worker_share_of_its_machine(pool: PoolProcesses, tmp_path: Path) -> None:
    counter = Counter(tmp_path)
    try:
        pool.start_worker("--powercap", counter.folder)
        loader = DataLoader(Busy(300), batch_size=4, pool=pool.endpoint)
        assert sum(len(batch) for batch in loader) == 300
        energy_j = loader.stats().pool_energy_j
        assert energy_j is not None and energy_j > 0
        del loader
        seen = ended_job(pool, "Busy", energy_price_per_kwh=0.5, gco2_per_kwh=350)
    finally:
        counter.stop()
    assert seen["tenancies"] == seen["metered_tenancies"] == 1
    total = seen["total"]
    assert energy_j <= total["energy_j"] <= counter.used_uj / 1e6
    kwh = total["energy_j"] / 3.6e6
    assert total["money"] == pytest.approx(0.5 * kwh)
    assert total["gco2"] == pytest.approx(350 * kwh)


@pytest.mark.long
@pytest.mark.slow
def test_one_worker_without_energy_makes_the_sum_unknown(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    counter = Counter(tmp_path)
    try:
        pool.start_worker("--powercap", counter.folder)
        pool.start_worker()
        loader = DataLoader(Busy(400), batch_size=4, pool=pool.endpoint)
        assert sum(len(batch) for batch in loader) == 400
        assert loader.stats().pool_energy_j is None
        del loader
        seen = ended_job(pool, "Busy", gco2_per_kwh=350)
    finally:
        counter.stop()
    assert seen["tenancies"] == 2 and seen["metered_tenancies"] == 1
    assert seen["metered_energy_j"] > 0
    assert seen["total"]["energy_j"] is None and seen["total"]["gco2"] is None


@pytest.mark.long
@pytest.mark.slow
def test_unreadable_powercap_tree_is_rejected(pool: PoolProcesses, tmp_path: Path) -> None:
    from pool_processes import Process

    worker = Process(
        ["worker", "--controller", pool.endpoint, "--powercap", str(tmp_path / "none")],
        pool.environment,
    )
    pool.processes.append(worker)
    assert worker.wait() == 1
    assert "none: No such file or directory; without --powercap the worker runs" in worker.output


@pytest.mark.long
@pytest.mark.slow
def test_restarted_controller_knows_the_costs_of_running_jobs(
    pool: PoolProcesses,
) -> None:
    pool.start_worker()
    loader = DataLoader(Busy(100_000), batch_size=4, pool=pool.endpoint)
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    pool.processes[0].end()
    pool.start_controller(bind=pool.endpoint)
    for _ in range(10):
        next(batches)
    deadline = time.monotonic() + SECONDS_MAX
    while not (jobs := costs(pool)["jobs"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert jobs[0]["is_running"]
    assert jobs[0]["total"]["samples"] >= 160
    assert 3600 * jobs[0]["total"]["cpu_hours"] >= 1.6


@pytest.mark.long
@pytest.mark.slow
def test_command_prints_a_table_or_json(
    pool: PoolProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> str:
        out = io.StringIO()
        monkeypatch.setattr(sys, "argv", ["penstock", "costs", *arguments])
        with contextlib.redirect_stdout(out):
            assert main() == 0
        return out.getvalue()

    pool.start_worker()
    for _ in DataLoader(Busy(8), batch_size=4, pool=pool.endpoint):
        pass
    ended_job(pool, "Busy")
    text = run("--controller", pool.endpoint, "--price-per-hour", "2")
    assert ": Busy" in text and "unknown" in text
    fields = json.loads(run("--controller", pool.endpoint, "--price-per-hour", "2", "--json"))
    assert fields["factors"] == {
        "price_per_hour": 2,
        "energy_price_per_kwh": None,
        "gco2_per_kwh": None,
    }
    assert fields["jobs"][0]["total"]["money"] > 0
    assert fields["jobs"][0]["total"]["energy_j"] is None
