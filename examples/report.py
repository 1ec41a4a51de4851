# SPDX-License-Identifier: Apache-2.0
"""The measures of one training of the quickstart, and its picture and JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

LABELS = {
    "torch": "torch's DataLoader",
    "swapped": "import swapped",
    "offload": "swapped + offload",
}
COLOURS = {"torch": "#8a8f98", "swapped": "#2f7ed8", "offload": "#e2711d"}


@dataclass(slots=True)
class Run:
    """One training: its losses and the time of each step. Rates skip the first `warmup` steps."""

    way: str
    batch_size: int
    warmup: int
    begin: float = field(default_factory=time.perf_counter)
    losses: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    plan_text: str | None = None
    plan: dict[str, Any] | None = None

    def step(self, loss: float, *, wait_s: float, end: float) -> None:
        self.losses.append(loss)
        self.waits_s.append(wait_s)
        self.ends.append(end)

    def set_plan(self, plan: Any) -> None:
        if plan is not None:
            self.plan_text, self.plan = str(plan), json.loads(plan.to_json())

    @property
    def measured_s(self) -> float:
        if len(self.ends) <= self.warmup:
            return 0.0
        return self.ends[-1] - (self.ends[self.warmup - 1] if self.warmup else self.begin)

    @property
    def wait_s(self) -> float:
        return sum(self.waits_s[self.warmup :])

    @property
    def samples_per_s(self) -> float:
        samples = (len(self.ends) - self.warmup) * self.batch_size
        return samples / self.measured_s if self.measured_s else 0.0

    def windows(self, window: int) -> Iterator[tuple[float, float, float]]:
        """Seconds since the start, samples/s and share of time waited, over `window` steps each."""
        for last in range(window, len(self.ends)):
            took = self.ends[last] - self.ends[last - window]
            waited = sum(self.waits_s[last - window + 1 : last + 1])
            yield self.ends[last] - self.begin, window * self.batch_size / took, waited / took


def first_difference(runs: Sequence[Run]) -> str | None:
    """The first step at which two trainings have other bits in their loss, or None."""
    first = runs[0]
    for run in runs[1:]:
        if len(run.losses) != len(first.losses):
            return f"{len(first.losses)} steps with {first.way}, {len(run.losses)} with {run.way}"
        for step, (ours, theirs) in enumerate(zip(run.losses, first.losses, strict=True)):
            if struct.pack("d", ours) != struct.pack("d", theirs):
                return f"step {step} is {theirs!r} with {first.way} and {ours!r} with {run.way}"
    return None


def draw(runs: Sequence[Run], equal: bool, path: Path) -> None:
    """Draws throughput and the trainer's wait over time, one line for each training."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    speed, wait = figure.subplots(2, 1, sharex=True)
    window = max(1, min(len(run.losses) for run in runs) // 20)
    for run in runs:
        seconds, rates, shares = zip(*run.windows(window), strict=True)
        label = f"{LABELS[run.way]}: {run.samples_per_s:.0f} samples/s"
        speed.plot(seconds, rates, color=COLOURS[run.way], label=label, linewidth=1.8)
        wait.plot(seconds, [100 * share for share in shares], color=COLOURS[run.way], linewidth=1.8)
    speed.set(ylabel="samples/s", ylim=(0, None))
    wait.set(ylabel="trainer waits, % of time", xlabel="seconds of training", ylim=(0, None))
    verdict = "losses equal to the bit" if equal else "LOSSES DIFFER"
    title = f"The same training with each loader: {verdict}" if len(runs) > 1 else "One training"
    speed.set_title(f"{title} (sliding window, {window} steps)", fontsize=11)
    figure.legend(loc="outside lower center", ncols=len(runs), frameon=False, fontsize=9)
    for axes in (speed, wait):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def write_json(runs: Sequence[Run], equal: bool, args: argparse.Namespace, path: Path) -> None:
    record = {
        "losses_equal": equal,
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "workers": args.workers,
        "threads": args.threads,
        "seed": args.seed,
        "warmup_steps": args.warmup,
        "torch": torch.__version__,
        "machine": {"cpu_count": os.cpu_count(), "processor": platform.machine()},
        "runs": [
            {
                "way": run.way,
                "samples_per_s": run.samples_per_s,
                "trainer_wait_s": run.wait_s,
                "measured_s": run.measured_s,
                "held_out_accuracy": run.accuracy,
                "losses": run.losses,
                "waits_s": run.waits_s,
                "plan": run.plan,
            }
            for run in runs
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
