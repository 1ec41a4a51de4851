# SPDX-License-Identifier: Apache-2.0
"""From what each round measured to figures: medians, spread, and the paired ratio to torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

RESAMPLES = 10_000
# The questions of a case, by what answers them: a rate, a delay, or memory.
ANSWERS = {
    "rate": "batches_per_s",
    "first_batch": "latency_s",
    "next_epoch": "latency_s",
    "one_batch": "latency_s",
    "spawn_start": "latency_s",
    "forkserver_start": "latency_s",
    "memory": "growth_bytes",
}
HIGHER_IS_BETTER = ("batches_per_s",)

Record = dict[str, Any]
Rounds = dict[str, list[dict[str, float]]]  # kind -> one measurement for each round


def records(name: str, question: str, rounds: Rounds, parameters: dict[str, Any]) -> list[Record]:
    """One record for each kind and metric, and one for each ratio to torch, limit or sampler."""
    result = []
    for kind, measurements in rounds.items():
        for metric in measurements[0]:
            values = [measurement[metric] for measurement in measurements]
            result.append(
                summary(f"{name}/{metric}", {**parameters, "kind": kind}, values, ndigits=6)
            )
    main = ANSWERS[question]
    for over in rounds:
        for kind in ("torch", "penstock"):
            if kind in rounds and over != kind and over in ("torch", "limit", "sampler"):
                pairs = zip(rounds[kind], rounds[over], strict=True)
                ratios = [
                    ours[main] / theirs[main]
                    if main in HIGHER_IS_BETTER
                    else theirs[main] / ours[main]
                    for ours, theirs in pairs
                ]
                record = summary(
                    f"{name}/ratio", {**parameters, "kind": kind, "over": over}, ratios
                )
                record["interval"] = median_interval(ratios)
                result.append(record)
    return result


def median_interval(values: Sequence[float]) -> list[float]:
    """The 95% interval of the median by bootstrap over the rounds, from a fixed seed."""
    draw = numpy.random.default_rng(0)
    resampled = draw.choice(numpy.asarray(values), (RESAMPLES, len(values)))
    low, high = numpy.percentile(numpy.median(resampled, axis=1), [2.5, 97.5])
    return [round(float(low), 4), round(float(high), 4)]


def summary(
    name: str, parameters: dict[str, Any], values: Sequence[float], ndigits: int = 4
) -> Record:
    """One record: what is seen most, and the spread."""
    p10, median, p90 = (float(value) for value in numpy.percentile(values, [10, 50, 90]))
    return {
        "name": name,
        "parameters": parameters,
        "median": round(median, ndigits),
        "p10": round(p10, ndigits),
        "p90": round(p90, ndigits),
        "n": len(values),
    }


def commit() -> str:
    """The commit that is measured, marked when the tree differs from it."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()


def machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    core_count = len(os.sched_getaffinity(0))
    return (
        f"{core_count} x {model}, {memory_gib:.0f} GiB, Linux {os.uname().release}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def put_line(record: Record, out: Path | None, *, is_shown: bool) -> None:
    """Adds the record as one JSON line to the file, or without one prints it if it is to be
    shown."""
    line = json.dumps(record)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")
    elif is_shown:
        print(line, flush=True)
