# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of bench/loader.py: every case runs, and its figures are plausible."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench_runs import run_bench

BENCH = Path(__file__).resolve().parents[2] / "bench"

CASES = (
    "large",
    "tiny",
    "photographs",
    "tabular",
    "audio",
    "nested",
    "text",
    "object_store",
    "first_batch/tiny",
    "next_epoch/tiny",
    "one_batch/object_store",
    "spawn_start/array",
    "forkserver_start/tensor",
    "memory/object_list",
    "memory/shared_list",
)


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return pytest.importorskip("stream_equal")


@pytest.mark.long(
    "audio",
    "first_batch/tiny",
    "forkserver_start/tensor",
    "large",
    "memory/object_list",
    "memory/shared_list",
    "nested",
    "next_epoch/tiny",
    "object_store",
    "one_batch/object_store",
    "photographs",
    "spawn_start/array",
    "tabular",
    "text",
    "tiny",
)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_loader_case_writes_complete_records(case: str, tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench(
        "loader.py", "--quick", "--only", case, "--out", str(lines), "--data", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    for record in records:
        assert set(record) >= {
            "name", "parameters", "median", "p10", "p90", "n", "commit", "machine",
        }  # fmt: skip
        assert record["n"] == 1
    ratios = [record for record in records if record["name"] == f"loader/{case}/ratio"]
    assert [r for r in ratios if r["parameters"]["over"] == "torch" and r["median"] > 0]
    again = run_bench("loader.py", "--read", str(lines), "--markdown")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_unknown_case_is_rejected_by_name() -> None:
    done = run_bench("loader.py", "--only", "lagre")
    assert done.returncode == 2
    assert "--only must be one of large, tiny" in done.stderr
    assert "got lagre" in done.stderr


def test_single_bit_difference_is_located_in_the_stream(bench_module: ModuleType) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def one_bit_off(dataset: TensorDataset, **arguments: object) -> list[list[torch.Tensor]]:
        batches = list(DataLoader(dataset, **arguments))
        batches[2][0].view(torch.int32)[1] ^= 1
        return batches

    def arguments() -> dict[str, object]:
        return {"dataset": TensorDataset(torch.arange(8.0)), "batch_size": 2}

    same = bench_module.first_difference(arguments, (DataLoader, DataLoader))
    assert same is None
    other = bench_module.first_difference(arguments, (DataLoader, one_bit_off))
    assert other is not None and other.startswith("entry 2 of 10 differs: torch batch of epoch 0")


def test_median_interval_contains_the_median_within_the_values(
    bench_module: ModuleType,
) -> None:
    figures = pytest.importorskip("figures")
    low, high = figures.median_interval([1.0, 1.2, 1.1, 5.0, 1.15, 1.05, 1.1])
    assert 1.0 <= low <= 1.1 <= high <= 1.2


def test_measurements_before_a_failure_are_printed(
    bench_module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = pytest.importorskip("figures")

    def measure(_: object) -> Iterator[dict[str, Any]]:
        yield figures.summary("a bench/ratio", {}, [1.0, 2.0, 3.0])
        raise figures.MeasurementError("the second one ended with 1")

    args = argparse.Namespace(read=None, out=None, markdown=True)
    assert figures.report("a bench", args, measure, str) is None
    out, err = capsys.readouterr()
    assert json.loads(out)["median"] == 2.0
    assert "a bench: the second one ended with 1" in err


@pytest.mark.long
@pytest.mark.slow
def test_shared_tensors_are_timed(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    command = [sys.executable, str(BENCH / "shared_tensors.py"), "--quick", "--out", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(lines.read_text().splitlines()) == 6
    assert "| 1,024 |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_local_workers_with_a_pool_are_timed(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    command = [sys.executable, str(BENCH / "own_workers.py"), "--quick", "--out", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(lines.read_text().splitlines()) == 7
    assert "| 64 |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_restored_loaders_are_timed(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    lines = tmp_path / "figures.jsonl"
    done = run_bench("restore.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    assert len(lines.read_text().splitlines()) == 1 + 2 * 4 + 2
    assert "| started   | ranks       | 4,000" in done.stdout


@pytest.mark.slow
def test_visits_are_measured(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("visits.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == 2 * 3 + 2
    assert all(r["parameters"]["bytes"] <= 40 + 3 * 1024 for r in records[:6])


@pytest.mark.long
@pytest.mark.slow
def test_samplers_are_measured(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("samplers.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == 12 + 6 + 12
    assert all(r["median"] <= 1 for r in records if r["name"] == "samplers/share_error")
    assert "CostBatchSampler, 8 ranks | split" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_sample_cache_is_measured(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("sample_cache.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [r["median"] for r in records if r["name"] == "sample_cache/hits"] == [1.0, 1.0]
    assert "| second epoch from |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_caches_of_ranks_are_measured(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("by_cache.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == 12
    hits, owned, read = records[3:6]  # caches that hold all that a rank owns
    assert hits["parameters"]["share"] == "by_cache" and hits["median"] == owned["median"] > 0.9
    assert read["median"] == pytest.approx(1 - hits["median"], abs=1e-4)
    assert "| step | budget | share" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_batch_types_are_measured(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("batch_types.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    names = {record["parameters"]["kind"] for record in records}
    assert len(records) == 6 * len(names)
    assert {"dict", "dataclass, registered", "jagged", "sparse COO", "object, pickled"} <= names
    assert "| dict | 0." in done.stdout and "| 1.00 (1.00 to 1.00) |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_packing_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    lines = tmp_path / "figures.jsonl"
    done = run_bench("packing.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    padding: dict[str, list[float]] = {}
    for record in records:
        if record["name"] == "packing/padding":
            padding.setdefault(record["parameters"]["kind"], []).append(record["median"])
    best = padding.pop("penstock, best_fit")
    assert len(best) == 12
    for others in padding.values():
        assert all(one <= other for one, other in zip(best, others, strict=True))
    assert "| pack tensors " in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_state_costs_are_measured(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("states.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    assert len(lines.read_text().splitlines()) == 5 * 5 * 2
    assert "| module  | 5       | penstock, a state each batch  |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_rank_step_agreement_is_timed(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("common_steps.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    assert len(lines.read_text().splitlines()) == 2 * 2 * 2
    assert "| 0       | 20 ms | drop      |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_step_ledger_is_compared_with_known_delays(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    done = run_bench("ledger.py", "--quick", "--markdown", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    assert len(lines.read_text().splitlines()) == 3 * 2 * 2 + 1 + 2
    assert "of a step of 5 ms" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_tabular_rows_are_timed(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    command = [sys.executable, str(BENCH / "tabular_rows.py"), "--quick", "--out", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(lines.read_text().splitlines()) == 30
    assert "| arrays |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_watched_step_cost_is_measured(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    command = [sys.executable, str(BENCH / "watched_steps.py"), "--quick", "--out", str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["name"] for record in records][:2] == [
        "watched_steps/nobody_ns",
        "watched_steps/added_us",
    ]
    assert "| trace |" in done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_dataset_inspections_are_timed(tmp_path: Path) -> None:
    lines = tmp_path / "figures.jsonl"
    command = [sys.executable, str(BENCH / "dataset_look.py"), "--quick", "--data", str(tmp_path)]
    done = subprocess.run(
        [*command, "--out", str(lines)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    cases = {record["parameters"]["case"] for record in records}
    assert len(cases) == 8 and len(records) == 3 * len(cases)
    assert all(f"| {case} |" in done.stdout for case in cases)
