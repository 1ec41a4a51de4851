# SPDX-License-Identifier: Apache-2.0
"""The benefit of one pool over a cluster for its jobs. Runs `penstock simulate` on a trace by
cases.

`--markdown` prints the table, `--picture FILE` draws it. The bench ends with 2 when a case fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import simulate_picture

POLICIES = (
    "proportional",
    "tuned",
    "tf-data-service",
    "cachew",
    "ray-data",
    "penstock",
    "infinite",
)


class Case(NamedTuple):
    name: str
    vc: str = "6c71a0"
    split: str = "20/70/10"
    options: tuple[str, ...] = ()


CASES = (
    Case("goal"),
    Case("60/30/10", split="60/30/10"),
    Case("b436b2", vc="b436b2"),
    Case("6214e9", vc="6214e9"),
    Case("SRTF", options=("--order", "srtf")),
    Case("SRTF, preempting", options=("--order", "srtf", "--preempt")),
    Case("4 windows", options=("--windows", "4", "--first", "1000")),
    Case("measured", options=("--profiles", "measured")),
    Case("16x4", options=("--servers", "16x4")),
    Case("11 CPUs", options=("--cpus-per-gpu", "11")),
    Case("16 CPUs", options=("--cpus-per-gpu", "16")),
    # The causes of penstock's distance to the bound: one cost at a time is switched off.
    Case("60/30/10, no delay", split="60/30/10", options=("--delay", "0")),
    Case("60/30/10, wide links", split="60/30/10", options=("--link", "1000000")),
    Case("60/30/10, no noise", split="60/30/10", options=("--noise", "0")),
    Case("60/30/10, moves free", split="60/30/10", options=("--move-cost", "0")),
    Case("60/30/10, a quarter's floor", split="60/30/10", options=("--floor", "0.25")),
    Case(
        "60/30/10, none of them",
        split="60/30/10",
        options=("--delay", "0", "--link", "1000000", "--noise", "0"),
    ),
)

Hours = dict[str, list[float]]  # mean completion time of each policy, by run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--jobs", required=True, help="job table, in the format of `penstock simulate`"
    )
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--first", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="output file: a JSON line per policy and case")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for case in CASES:
        if args.only is None or case.name in args.only:
            found = simulate(case, args.jobs, args.first, args.seeds)
            if found is None:
                return 2
            results[case.name] = found
            print(f"{case.name}: done", file=sys.stderr)
    lines = [line for name, result in results.items() for line in records(name, result)]
    if args.out:
        args.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if args.markdown:
        print(markdown(results))
    else:
        print("\n".join(json.dumps(line) for line in lines))
    if args.picture:
        hours = {name: means(result) for name, result in results.items()}
        args.picture.write_text(simulate_picture.draw(POLICIES, hours))
    return 0


def simulate(case: Case, jobs: str, first: int, seeds: int) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "penstock", "simulate", "--jobs", jobs, "--vc", case.vc]
    command += ["--first", str(first), "--seeds", str(seeds), "--split", case.split]
    command += ["--policies", ",".join(POLICIES), "--json", *case.options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{case.name}: {done.stderr}", file=sys.stderr)
        return None
    policies: dict[str, Any] = json.loads(done.stdout)["policies"]
    return policies


def hours_of(result: dict[str, Any]) -> Hours:
    return {
        name: [run["completion_mean_s"] / 3600 for run in policy["runs"]]
        for name, policy in result.items()
    }


def means(result: dict[str, Any]) -> dict[str, float]:
    return {name: fmean(hours) for name, hours in hours_of(result).items()}


def records(name: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"simulate/{name}/{policy}/completion_mean_h",
            "mean": fmean(hours),
            "least": min(hours),
            "most": max(hours),
            "n": len(hours),
            "waiting_gain_s": result[policy]["speedup_over_first"]["waiting_gain_s"],
            "running_gain_s": result[policy]["speedup_over_first"]["running_gain_s"],
        }
        for policy, hours in hours_of(result).items()
    ]


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Mean hours, then penstock's paired ratios with their range over runs."""
    rows = [
        "| case | "
        + " | ".join(f"{name} h" for name in POLICIES)
        + " | of "
        + " | of ".join(name for name in POLICIES if name != "penstock")
        + " | gain by waiting | ops/job-min |",
        "| --- " * (2 * len(POLICIES) + 2) + "|",
    ]
    for name, result in results.items():
        hours = hours_of(result)
        gain = result["penstock"]["speedup_over_first"]
        gained_s = gain["waiting_gain_s"] + gain["running_gain_s"]
        is_gain = gained_s > 0.01 * 3600 * fmean(hours["proportional"])
        operations = fmean(r["operations_per_job_minute"] for r in result["penstock"]["runs"])
        cells = [
            name,
            *(f"{fmean(hours[policy]):.1f}" for policy in POLICIES),
            *(
                ratio(hours[policy], hours["penstock"])
                for policy in POLICIES
                if policy != "penstock"
            ),
            f"{gain['waiting_gain_s'] / gained_s:.0%}" if is_gain else "-",
            f"{operations:.3f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", *utilisation(results)])


def utilisation(results: dict[str, dict[str, Any]]) -> list[str]:
    """A table of the shares of the GPUs' time: held by jobs, and held and not waiting for data."""
    rows = [
        "| case | "
        + " | ".join(f"{name}, held, busy" for name in POLICIES)
        + " | busy, penstock of proportional | busy of held, penstock of proportional |",
        "| --- " * (len(POLICIES) + 3) + "|",
    ]
    for name, result in results.items():
        held, busy = (
            {policy: [run[field] for run in result[policy]["runs"]] for policy in POLICIES}
            for field in ("gpu_allocated_share", "gpu_busy_share")
        )
        of_held = {
            policy: [one / all_ for one, all_ in zip(busy[policy], held[policy], strict=True)]
            for policy in POLICIES
        }
        cells = [
            name,
            *(f"{fmean(held[policy]):.2f}, {fmean(busy[policy]):.2f}" for policy in POLICIES),
            ratio(busy["penstock"], busy["proportional"]),
            ratio(of_held["penstock"], of_held["proportional"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def ratio(other: Sequence[float], own: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(other, own, strict=True)]
    return f"{fmean(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
