# SPDX-License-Identifier: Apache-2.0
"""penstock simulate: its figures, its table, its JSON, and its refusals of bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import _pool
from penstock.cli.command_line import main

TRACE = Path(__file__).resolve().parents[1] / "data" / "philly_jobs.csv"
SMALL = ["--first", "60", "--seeds", "2"]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", "simulate", *arguments])
        return (main(), *capfd.readouterr())

    return call


def test_without_jobs_it_says_that_they_are_synthetic(simulate: Call) -> None:
    code, out, _ = simulate(*SMALL)
    assert code == 0
    assert out.startswith("synthetic jobs, since no --jobs was given; 8 servers of 8 GPUs, ")
    first_words = [line.split()[0] for line in out.splitlines() if line]
    assert first_words[1:7] == ["policy", *_pool.CPU_POLICIES]


def test_a_trace_is_named_with_its_vc(simulate: Call) -> None:
    code, out, _ = simulate("--jobs", str(TRACE), "--vc", "6c71a0", *SMALL)
    assert code == 0
    assert out.startswith(f"the jobs of {TRACE}, VC 6c71a0; ")


def test_a_call_prints_the_same_each_time(simulate: Call) -> None:
    assert simulate(*SMALL, "--json") == simulate(*SMALL, "--json")


def test_json_has_each_run_and_the_parts_of_the_gain(simulate: Call) -> None:
    code, out, _ = simulate(
        "--jobs", str(TRACE), *SMALL, "--policies", "proportional,infinite", "--json"
    )
    assert code == 0
    policies = json.loads(out)["policies"]
    assert list(policies) == ["proportional", "infinite"]
    runs = {name: policy["runs"] for name, policy in policies.items()}
    assert [len(of_policy) for of_policy in runs.values()] == [2, 2]
    speedup = policies["infinite"]["speedup_over_first"]
    ratios = [
        slow["completion_mean_s"] / fast["completion_mean_s"]
        for slow, fast in zip(runs["proportional"], runs["infinite"], strict=True)
    ]
    assert speedup["mean"] == pytest.approx(sum(ratios) / 2)
    assert speedup["least"] == pytest.approx(min(ratios))
    assert speedup["interval_low"] < speedup["mean"] < speedup["interval_high"]
    slow_s, fast_s = (
        sum(run["completion_mean_s"] for run in of_policy) / 2 for of_policy in runs.values()
    )
    parts_s = speedup["waiting_gain_s"] + speedup["running_gain_s"]
    assert parts_s == pytest.approx(slow_s - fast_s)


def test_one_seed_has_no_interval(simulate: Call) -> None:
    _, out, _ = simulate("--first", "20", "--seeds", "1", "--policies", "proportional,infinite")
    assert "times as fast as proportional" in out and "interval" not in out


# Jobs whose workers were all behind such a link never ended.
def test_a_slow_link_ends_no_later_than_shares_in_proportion_by_far(simulate: Call) -> None:
    _, out, _ = simulate(*SMALL, "--link", "0.001", "--policies", "proportional,penstock", "--json")
    assert json.loads(out)["policies"]["penstock"]["speedup_over_first"]["least"] > 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "8"], "--servers is '8'; servers and GPUs of each such as 8x8"),
        (["--split", "0/0/0"], "--split is '0/0/0'; shares of image/language/speech"),
        (["--policies", "penstok"], "--policies has 'penstok'; did you mean penstock?"),
        (["--order", "lifo"], "--order is 'lifo'; did you mean fifo?"),
        (["--noise", "nan"], "--noise is 'nan'; a number from 0 to 10 is expected"),
        (["--seeds", "0"], "--seeds is '0'; a whole number from 1 to 1000 is expected"),
    ],
)
def test_a_wrong_argument_is_named(simulate: Call, arguments: list[str], message: str) -> None:
    code, out, err = simulate(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_wrong_line_of_a_table_is_named(simulate: Call, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("submit_s,duration_s,num_gpus,vc\n0,soon,1,a\n")
    code, out, err = simulate("--jobs", str(jobs))
    assert (code, out) == (1, "")
    assert err.startswith(f"penstock simulate: {jobs}, line 2: duration_s is 'soon'; a number ")
    profiles = tmp_path / "models.csv"
    profiles.write_text("model,class\n")
    assert f"{profiles}, line 1: " in simulate("--profiles", str(profiles))[2]


def test_a_file_that_is_not_there_or_no_text_is_named(simulate: Call, tmp_path: Path) -> None:
    assert "nowhere.csv" in simulate("--jobs", str(tmp_path / "nowhere.csv"))[2]
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    assert "bytes.csv is no text in UTF-8" in simulate("--jobs", str(tmp_path / "bytes.csv"))[2]


def test_a_vc_without_a_file_is_refused(simulate: Call) -> None:
    code, _, err = simulate("--vc", "research")
    assert code == 1 and "the VC is 'research' and there is no file of jobs" in err
