# SPDX-License-Identifier: Apache-2.0
"""The quickstart's output on the terminal: progress, plan, table and verdict."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from report import LABELS, Run, first_difference
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

BUSY_LOAD = 0.5  # load average over cores


class Screen:
    """Writes to the terminal; plain lines without control codes when the output is piped."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=False)

    def line(self, text: str = "") -> None:
        self._console.print(escape(text), soft_wrap=True)

    def error(self, text: str) -> None:
        Console(stderr=True, highlight=False).print(f"quickstart: {escape(text)}", soft_wrap=True)

    def title(self, args: argparse.Namespace) -> None:
        crop_count, core_count = args.recipe.crop_count, len(os.sched_getaffinity(0))
        self._console.print(f"[bold]penstock quickstart[/]: {crop_count} crops of photographs")
        self.line(
            f"epochs {args.epochs}, batch size {args.batch_size}, workers {args.workers}, "
            f"trainer threads {args.threads}, cores {core_count}, seed {args.seed}"
        )
        load = os.getloadavg()[0]
        if load > BUSY_LOAD * core_count:
            self.line(f"This machine is busy (load {load:.1f}): the speeds below will tell little.")
        self.line()

    @contextmanager
    def preparing(self, crop_count: int) -> Iterator[Bar]:
        with self._bar("writing photographs (once)", crop_count) as bar:
            yield bar

    @contextmanager
    def training(self, way: str, step_count: int) -> Iterator[Bar]:
        with self._bar(f"{LABELS[way]:18}", step_count) as bar:
            yield bar

    @contextmanager
    def _bar(self, label: str, total: int) -> Iterator[Bar]:
        if not self._console.is_terminal:
            yield Bar(self, None, label, total)
            return
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )
        # Four refreshes a second: the bar's thread shares the interpreter with the training.
        with Progress(*columns, console=self._console, refresh_per_second=4) as progress:
            bar = Bar(self, progress, label, total)
            yield bar
            if bar._done == 0:
                progress.update(progress.task_ids[0], visible=False)

    def summary(self, runs: Sequence[Run]) -> bool:
        """Prints plan, table and verdict, and returns whether all losses are bit-for-bit equal."""
        for run in runs:
            if run.plan_text is not None:
                self.line()
                self._console.print("[bold]The plan[/]: what runs in the workers now, and why")
                self.line(run.plan_text)
        self.line()
        table = Table("", box=None, pad_edge=False, header_style="bold")
        for heading in ("samples/s", "", "trainer waited", "held-out", "last loss"):
            table.add_column(heading, justify="right")
        for run in runs:
            share = run.wait_s / run.measured_s
            table.add_row(
                LABELS[run.way],
                f"{run.samples_per_s:.0f}",
                f"{run.samples_per_s / runs[0].samples_per_s:.2f}x",
                f"{run.wait_s:.1f} s ({share:.0%})",
                f"{run.accuracy:.1%}",
                f"{run.losses[-1]:.6f}",
            )
        self._console.print(table)
        for run in runs:
            if run.ledger_text is not None:
                self.line(f"{LABELS[run.way]}: {run.ledger_text}")
        self.line(f"Rate and wait leave out the first {runs[0].warmup} steps of each training.")
        self.line()
        differing = first_difference(runs)
        if len(runs) == 1:
            self.line(f"{len(runs[0].losses)} losses; nothing to compare them with.")
        elif differing is None:
            self._console.print(
                f"[bold green]Losses equal to the bit[/]: {len(runs)} trainings, "
                f"{len(runs[0].losses)} steps each."
            )
        else:
            self._console.print(f"[bold red]Losses differ[/]: {escape(differing)}")
        return differing is None

    def wrote(self, what: str, path: Path) -> None:
        inside = path.absolute().is_relative_to(Path.cwd())
        self.line(f"{what}: {os.path.relpath(path) if inside else path}")


class Bar:
    """One progress bar on a terminal, or an occasional line elsewhere."""

    def __init__(self, screen: Screen, progress: Progress | None, label: str, total: int) -> None:
        self._screen = screen
        self._progress = progress
        self._label = label
        self._total = total
        self._done = 0
        self._task = progress.add_task(label, total=total, note="") if progress else None

    def advance(self, note: Callable[[], str] = str) -> None:
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, note=note())
        elif self._done % max(1, self._total // 4) == 0:
            self._screen.line(f"  {self._label}  {self._done}/{self._total}  {note()}".rstrip())

    def step(self, run: Run) -> None:
        def note() -> str:
            rate = f"{run.samples_per_s:.0f} samples/s" if run.measured_s else "warming up"
            return f"{rate:>15}  loss {run.losses[-1]:.3f}"

        self.advance(note)
