# SPDX-License-Identifier: Apache-2.0
"""penstock simulate, of the package penstock-simulator: its figures, its table, its JSON, and its
rejection of bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import stdev

import pytest

import penstock
from penstock.cli.command_line import main
from penstock_simulator import _simulator

TRACE = Path(__file__).resolve().parents[1] / "data" / "philly_jobs.csv"
SMALL = ["--first", "60", "--seeds", "2"]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", "simulate", *arguments])
        return (main(), *capfd.readouterr())

    return call


@pytest.mark.slow
def test_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    """Without site-packages, only penstock is on the path, and it contains no simulator."""
    package = Path(penstock.__file__).parent
    (tmp_path / "penstock").symlink_to(package)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "penstock", "simulate", "--seeds", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "penstock: penstock simulate needs the package penstock-simulator; install it with pip "
        "install 'penstock[simulate]'\n"
    )
    files = [path.relative_to(package).as_posix() for path in package.rglob("*")]
    assert [name for name in files if "simulat" in name or name.endswith(".csv")] == []


def test_output_says_that_default_jobs_are_synthetic(simulate: Call) -> None:
    code, out, _ = simulate(*SMALL)
    assert code == 0
    assert out.startswith("synthetic jobs, since no --jobs was given; 8 servers of 8 GPUs, ")
    first_words = [line.split()[0] for line in out.splitlines() if line]
    assert first_words[1:9] == ["policy", *_simulator.CPU_POLICIES]


def test_output_names_trace_file_and_vc(simulate: Call) -> None:
    code, out, _ = simulate("--jobs", str(TRACE), "--vc", "6c71a0", *SMALL)
    assert code == 0
    assert out.startswith(f"the jobs of {TRACE}, VC 6c71a0; ")


def test_output_is_reproducible(simulate: Call) -> None:
    assert simulate(*SMALL, "--json") == simulate(*SMALL, "--json")


def test_json_has_each_run_and_the_speedup_parts(simulate: Call) -> None:
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


def test_windows_are_consecutive_and_give_the_interval(simulate: Call) -> None:
    trace = ["--jobs", str(TRACE), "--policies", "proportional,infinite", "--seeds", "2", "--json"]
    code, out, _ = simulate(*trace, "--first", "50", "--windows", "3")
    assert code == 0
    policies = json.loads(out)["policies"]
    slow, fast = (policies[name]["runs"] for name in ("proportional", "infinite"))
    assert [(run["window"], run["seed"]) for run in slow] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    one = json.loads(simulate(*trace, "--first", "50")[1])["policies"]["proportional"]["runs"]
    assert slow[:2] == one
    assert slow[0]["completion_mean_s"] != slow[2]["completion_mean_s"]
    ratios = [
        sum(run["completion_mean_s"] for run in slow[first : first + 2])
        / sum(run["completion_mean_s"] for run in fast[first : first + 2])
        for first in (0, 2, 4)
    ]
    half = 4.303 * stdev(ratios) / 3**0.5
    speedup = policies["infinite"]["speedup_over_first"]
    assert speedup["interval_low"] == pytest.approx(sum(ratios) / 3 - half)
    assert speedup["interval_high"] == pytest.approx(sum(ratios) / 3 + half)


def test_preemption_finishes_short_jobs_sooner(simulate: Call) -> None:
    srtf = ["--jobs", str(TRACE), "--order", "srtf", "--policies", "proportional", "--json"]
    runs = [
        json.loads(simulate(*srtf, *options)[1])["policies"]["proportional"]["runs"][0]
        for options in ([], ["--preempt"])
    ]
    assert runs[1]["completion_median_s"] < runs[0]["completion_median_s"]
    assert [run["operations_per_job_minute"] > 0 for run in runs] == [False, True]


def test_jobs_file_may_name_models(simulate: Call, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    rows = ["submit_s,duration_s,num_gpus,vc,model", "0,3600,1,a,alexnet", "0,3600,1,a,resnet50"]
    jobs.write_text("\n".join(rows))
    code, out, _ = simulate("--jobs", str(jobs), "--policies", "infinite", "--seeds", "2", "--json")
    runs = json.loads(out)["policies"]["infinite"]["runs"]
    assert code == 0 and runs[0]["completion_mean_s"] == runs[1]["completion_mean_s"]
    jobs.write_text("\n".join([*rows, "0,3600,1,a,alexnot"]))
    assert "a job has the model 'alexnot', which is not among" in simulate("--jobs", str(jobs))[2]


def test_measured_profiles_can_be_simulated(simulate: Call) -> None:
    code, out, _ = simulate(*SMALL, "--profiles", "measured", "--split", "1/0/0", "--json")
    policies = json.loads(out)["policies"]
    slow, fast = (policies[name]["runs"][0] for name in ("proportional", "infinite"))
    assert code == 0
    # Photographs, the only images, run a third faster with all the CPUs that they can use.
    assert slow["running_mean_s"] / fast["running_mean_s"] == pytest.approx(1.361, rel=1e-3)


def test_single_seed_has_no_confidence_interval(simulate: Call) -> None:
    _, out, _ = simulate("--first", "20", "--seeds", "1", "--policies", "proportional,infinite")
    assert "times as fast as proportional" in out and "interval" not in out


# Jobs whose workers were all behind such a link never ended.
def test_slow_link_slows_penstock_policy_only_slightly(simulate: Call) -> None:
    _, out, _ = simulate(*SMALL, "--link", "0.001", "--policies", "proportional,penstock", "--json")
    assert json.loads(out)["policies"]["penstock"]["speedup_over_first"]["least"] > 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "8"], "--servers must be SERVERSxGPUS, such as 8x8"),
        (["--split", "0/0/0"], "--split must be shares of image/language/speech"),
        (
            ["--policies", "penstok"],
            "--policies contains the unknown policy 'penstok'; did you mean penstock?",
        ),
        (["--order", "lifo"], "--order must be fifo or srtf, got 'lifo'; did you mean fifo?"),
        (["--noise", "nan"], "--noise must be a number from 0 to 10, got 'nan'"),
        (["--seeds", "0"], "--seeds must be an integer from 1 to 1000, got '0'"),
    ],
)
def test_invalid_argument_is_named(simulate: Call, arguments: list[str], message: str) -> None:
    code, out, err = simulate(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_invalid_table_line_is_named(simulate: Call, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("submit_s,duration_s,num_gpus,vc\n0,soon,1,a\n")
    code, out, err = simulate("--jobs", str(jobs))
    assert (code, out) == (1, "")
    assert err.startswith(
        f"penstock simulate: {jobs}, line 2: duration_s is 'soon'; expected a number "
    )
    profiles = tmp_path / "models.csv"
    profiles.write_text("model,class\n")
    assert f"{profiles}, line 1: " in simulate("--profiles", str(profiles))[2]


def test_missing_or_non_utf8_file_is_named(simulate: Call, tmp_path: Path) -> None:
    assert "nowhere.csv" in simulate("--jobs", str(tmp_path / "nowhere.csv"))[2]
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe")
    assert "bytes.csv is not valid UTF-8" in simulate("--jobs", str(tmp_path / "bytes.csv"))[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preempt"], "--preempt requires --order srtf, got --order fifo"),
        (["--windows", "2"], "--windows 2 requires --jobs FILE and --first N"),
        (
            ["--windows", "2", "--jobs", str(TRACE), "--first", "400"],
            ": the first 400 jobs would be skipped, but there are only ",
        ),
    ],
)
def test_options_without_their_prerequisite_are_rejected(
    simulate: Call, arguments: list[str], message: str
) -> None:
    code, _, err = simulate(*arguments)
    assert code == 1 and message in err


def test_vc_without_jobs_file_is_rejected(simulate: Call) -> None:
    code, _, err = simulate("--vc", "research")
    assert code == 1 and "--vc 'research' requires a file of jobs" in err
