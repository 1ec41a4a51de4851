# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of the pool benches: they run, and their lines are complete."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from bench_runs import BENCH, run_bench
from native_build import build_folder

pytestmark = pytest.mark.slow

MICRO = build_folder() / "bench" / "micro"


def no_link_reason(monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason why this machine and user cannot have a link of a given rate; empty if they
    can."""
    monkeypatch.syspath_prepend(BENCH)
    shaped_link = importlib.import_module("shaped_link")
    try:
        with shaped_link.ShapedLink("1gbit"):
            return ""
    except shaped_link.NoLinkError as error:
        return str(error)


def lines_of(path: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        assert set(record) >= {
            "name", "parameters", "median", "p10", "p90", "n", "commit", "machine",
        }  # fmt: skip
    return records


@pytest.mark.long
def test_growth_has_a_row_per_worker_count(tmp_path: Path) -> None:
    lines, picture = tmp_path / "growth.jsonl", tmp_path / "growth.svg"
    done = run_bench(
        "pool_growth.py", "--quick", "--out", str(lines), "--picture", str(picture)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = lines_of(lines)
    rates = [record for record in records if record["name"] == "pool_growth/batches_per_s"]
    assert [rate["parameters"]["workers"] for rate in rates] == [1, 2]
    assert all(rate["median"] > 0 for rate in rates)
    joined = [record for record in records if record["name"] == "pool_growth/first_delivered_s"]
    assert [record["n"] for record in joined] == [1, 1]
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    again = run_bench("pool_growth.py", "--read", str(lines))
    assert again.returncode == 0 and "\n| 2 " in again.stdout


@pytest.mark.long
def test_split_worker_is_compared_with_a_single_process(tmp_path: Path) -> None:
    lines = tmp_path / "split.jsonl"
    done = run_bench("split_worker.py", "--quick", "--only", "small", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = lines_of(lines)
    rates = [r for r in records if r["name"] == "split_worker/batches_per_s"]
    assert [r["parameters"]["kind"] for r in rates] == ["one_process", "processes"]
    assert all(r["median"] > 0 and r["n"] == 2 for r in rates)
    (ratio,) = [r for r in records if r["name"] == "split_worker/ratio"]
    assert 0 < ratio["interval"][0] <= ratio["median"] <= ratio["interval"][1]
    again = run_bench("split_worker.py", "--read", str(lines))
    assert again.returncode == 0 and "\n| small   | processes " in again.stdout


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="what a server has open is shown to root alone")
def test_rate_with_strangers_is_compared_with_the_rate_without(tmp_path: Path) -> None:
    lines = tmp_path / "strangers.jsonl"
    done = run_bench("strangers.py", "--quick", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = lines_of(lines)
    ratios = [r for r in records if r["name"] == "strangers/of_the_rate_without"]
    assert [r["parameters"]["kind"] for r in ratios] == ["none", "idle", "first_byte", "half_open"]
    assert ratios[0]["median"] == 1.0
    connects = [r["median"] for r in records if r["name"] == "strangers/connects_per_s"]
    assert connects[0] == 0 and min(connects[1:]) > 0
    assert "| half-open " in done.stdout


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read a controller's memory")
def test_soak_counts_resources_after_each_epoch(tmp_path: Path) -> None:
    lines = tmp_path / "soak.jsonl"
    done = run_bench("pool_soak.py", "--quick", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    records = lines_of(lines)
    counted = [record for record in records if "slope" in record]
    assert {record["parameters"]["kind"] for record in counted} == {
        "trainer", "controller", "worker",
    }  # fmt: skip
    assert all(record["n"] == 3 for record in counted)
    assert "| trainer | fds |" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read a server's memory")
def test_first_jobs_records_have_times_and_memory(tmp_path: Path) -> None:
    lines = tmp_path / "jobs.jsonl"
    done = run_bench("first_jobs.py", "--quick", "--json", str(lines))
    assert done.returncode == 0, done.stderr
    *figures, foreign = lines_of(lines)
    assert foreign["name"] == "first_jobs/foreign_cores"
    assert all(0 < one["min"] <= one["median"] <= one["max"] for one in figures)
    assert [(one["name"].partition("/")[2], one["n"]) for one in figures[:3]] == [
        ("first_job_s", 1), ("next_jobs_s", 1), ("second_epoch_s", 2),
    ]  # fmt: skip
    counted = [one["parameters"] for one in figures[3:]]
    assert [(one["after_jobs"], one["kind"]) for one in counted] == [
        (jobs, kind) for jobs in (0, 2) for kind in ("server", "warm", "all")
    ]
    again = run_bench("first_jobs.py", "--read", str(lines))
    assert again.returncode == 0 and "| memory after 2 jobs: server, MB " in again.stdout


@pytest.mark.long
def test_loader_transport_rate_is_measured(tmp_path: Path) -> None:
    lines = tmp_path / "transport.jsonl"
    done = run_bench(
        "pool_transport.py", "--quick", "--only", "4MB", "--loader-only", "--out", str(lines)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = lines_of(lines)
    rates = [record for record in records if record["name"].endswith("/gb_per_s")]
    assert [rate["parameters"]["kind"] for rate in rates] == ["loader"]
    assert "| 4MB | loader |" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(not MICRO.exists(), reason="the C++ benchmarks are built by make test")
def test_each_transport_has_ratios(tmp_path: Path) -> None:
    lines = tmp_path / "transport.jsonl"
    done = run_bench("pool_transport.py", "--quick", "--only", "4MB", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    ratios = [record for record in lines_of(lines) if record["name"].endswith("/ratio")]
    pairs = {(record["parameters"]["kind"], record["parameters"]["over"]) for record in ratios}
    assert pairs >= {("zmq", "raw"), ("pool_sockets", "curve"), ("loader", "pool_sockets")}


@pytest.mark.long
def test_link_rate_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := no_link_reason(monkeypatch):
        pytest.skip(reason)
    lines = tmp_path / "link.jsonl"
    done = run_bench("pool_transport.py", "--quick", "--only", "link", "--out", str(lines))
    assert done.returncode == 0, done.stderr
    rates = [one for one in lines_of(lines) if one["name"].endswith("/link_gbit_per_s")]
    assert len(rates) == 2 and all(rate["median"] > 0 for rate in rates)


def test_unavailable_link_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "pool_transport.py"), "--quick", "--only", "link"]
    environment = {**os.environ, "PATH": str(tmp_path)}  # without `ip`
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 2 and done.stdout == ""
    assert "pool_transport: link: ip cannot be run" in done.stderr
    assert done.stderr.rstrip().endswith("; run it as root")
