# SPDX-License-Identifier: Apache-2.0
"""The measures of one training of the quickstart, and their JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

LABELS = {
    "torch": "torch's DataLoader",
    "swapped": "import swapped",
    "offload": "swapped + offload",
}


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
    ledger_text: str | None = None
    ledger: dict[str, Any] | None = None

    def step(self, loss: float, *, wait_s: float, end: float) -> None:
        self.losses.append(loss)
        self.waits_s.append(wait_s)
        self.ends.append(end)

    def set_plan(self, plan: Any) -> None:
        if plan is not None:
            self.plan_text, self.plan = str(plan), json.loads(plan.to_json())

    def set_ledger(self, ledger: Any) -> None:
        """Of the measured steps, as penstock's ``loader.stats().ledger``; torch has none."""
        if ledger is not None:
            self.ledger_text, self.ledger = str(ledger), asdict(ledger)

    @property
    def step_parts(self) -> dict[str, float]:
        """Seconds of a mean step, by part; empty without a ledger."""
        if not self.ledger:
            return {}
        parts = {name: value for name, value in self.ledger.items() if name != "steps"}
        return {name: value / self.ledger["steps"] for name, value in parts.items()}

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


def first_difference(runs: Sequence[Run]) -> str | None:
    """The first step at which the losses of two trainings differ in any bit, or None."""
    first = runs[0]
    for run in runs[1:]:
        if len(run.losses) != len(first.losses):
            return f"{len(first.losses)} steps with {first.way}, {len(run.losses)} with {run.way}"
        for step, (ours, theirs) in enumerate(zip(run.losses, first.losses, strict=True)):
            if struct.pack("d", ours) != struct.pack("d", theirs):
                return f"step {step} is {theirs!r} with {first.way} and {ours!r} with {run.way}"
    return None


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
                "ledger": run.ledger,
            }
            for run in runs
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
