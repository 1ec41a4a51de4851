# SPDX-License-Identifier: Apache-2.0
"""Random lives of jobs of real gloo ranks: numbers of ranks, kills by SIGKILL, and resumes from the
last state that was written. Every sample has to be given once, in one order, with one augmentation.

    rank_sequences.py FOLDER --seed 1 --count 50 --markdown

Prints a line of JSON for each sequence, or a table. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_ranks

from penstock import DataLoader, MixtureSampler, Ranks

STEP_SIZE = 12  # divisible by 1, 2, 3 and 4 ranks
SIZES = (1, 2, 3, 4)
DISTURBED_MAX = 4  # interrupted runs of a sequence; the next run continues to the end
Row = list[float]


class Points(torch.utils.data.Dataset[torch.Tensor]):
    """Returns a sample's index and its augmentation."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


@dataclass(frozen=True)
class Job:
    """The properties shared by all runs of a sequence."""

    count: int
    epochs: int
    remainder: Any
    is_mixture: bool
    has_global_size: bool  # otherwise each run chooses the size of a rank's batch

    def loader(self, job: tuple[int, int], batch_size: int, workers: int) -> Any:
        options: dict[str, Any] = {"shuffle": True}
        if self.is_mixture:
            lengths = [self.count // 3, self.count - self.count // 3]
            sampler = MixtureSampler(lengths, [1, 2], when_exhausted="leave_out")
            options = {"sampler": sampler}
        return DataLoader(
            Points(self.count),
            batch_size=1 if self.has_global_size else batch_size,
            ranks=Ranks(
                *job,
                global_batch_size=STEP_SIZE if self.has_global_size else None,
                remainder=self.remainder,
            ),
            num_workers=workers,
            **options,
        )


@dataclass(frozen=True)
class Run:
    """The ranks from a start to a kill, a stop, or the end."""

    world_size: int
    workers: int
    batch_size: int
    save_every: int
    ends_in_step: int | None  # of this run
    victim: int | None  # the rank that is killed there; None: all stop


@dataclass
class Sequence:
    """The result of a job."""

    job: Job
    sizes: list[int] = field(default_factory=list)
    kills: int = 0
    resumes: int = 0
    samples_expected: int = 0
    samples_given: int = 0
    padding: int = 0
    steps_lost: int = 0  # made, and repeated since no state was written after them
    fault: str | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--markdown", action="store_true", help="print a table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = []
    for number in range(args.count):
        folder = args.folder / str(number)
        folder.mkdir(parents=True)
        done.append(run_sequence(random.Random(f"{args.seed} {number}"), folder))
        if not args.markdown:
            print(json.dumps(asdict(done[-1])), flush=True)
    if args.markdown:
        print(table(done))
    return int(any(sequence.fault for sequence in done))


def run_sequence(rng: random.Random, folder: Path) -> Sequence:
    job = Job(
        count=rng.randrange(20, 90),
        epochs=rng.choice([1, 1, 2]),
        remainder=rng.choice(["pad", "uneven", "drop"]),
        is_mixture=rng.random() < 0.3,
        has_global_size=rng.random() < 0.6,
    )
    sequence = Sequence(job)
    steps: list[tuple[int, list[Row]]] = []  # the epoch and the samples of each valid step
    saved = 0  # the steps of the last state
    while not (folder / "done").exists():
        run = choose_run(rng, is_last=len(sequence.sizes) == DISTURBED_MAX)
        number = len(sequence.sizes)
        body = functools.partial(run_rank, run=run, job=job, folder=folder, number=number)
        log = folder / f"run-{number}.log"
        codes = run_ranks(run.world_size, body, log)
        is_killed = run.victim is not None and codes[run.victim] == -signal.SIGKILL
        if any(codes) and not is_killed:
            sequence.fault = f"{run} ended with {codes}: {log.read_text()}"
            return sequence
        sequence.kills += is_killed
        sequence.resumes += number > 0 and saved > 0
        sequence.sizes.append(run.world_size)
        before, saved = saved, steps_saved(folder)
        made = steps_of(folder, number, run.world_size)
        steps += [made[step] for step in range(before + 1, saved + 1)]
        sequence.steps_lost += sum(step > saved for step in made)
    count_samples(sequence, steps)
    return sequence


def choose_run(rng: random.Random, is_last: bool) -> Run:
    world_size = rng.choice(SIZES)
    return Run(
        world_size=world_size,
        workers=rng.choice([0, 0, 1]),
        batch_size=rng.choice([1, 3, 5]),
        save_every=rng.choice([1, 1, 2, 3]),
        ends_in_step=None if is_last else rng.randrange(6),
        victim=rng.randrange(world_size) if rng.random() < 0.75 and not is_last else None,
    )


def run_rank(rank: int, run: Run, job: Job, folder: Path, number: int) -> None:
    loader = job.loader((rank, run.world_size), run.batch_size, run.workers)
    saved: dict[str, Any] = {"step": 0, "epoch": 0}
    if (folder / "job.json").exists():
        saved = json.loads((folder / "job.json").read_text())
        loader.load_state_dict(saved["loader"])
    step = first = saved["step"]
    with (folder / f"run-{number}-rank-{rank}").open("w") as file:
        for epoch in range(saved["epoch"], job.epochs):
            for batch in loader:
                if step - first == run.ends_in_step:
                    if run.victim is None:
                        return
                    if run.victim == rank:
                        os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(batch.sum())  # like the gradients of a training
                step += 1
                print(json.dumps([step, epoch, batch.tolist()]), file=file, flush=True)
                if (step - first) % run.save_every == 0:
                    save(folder, loader, step, epoch)
            save(folder, loader, step, epoch + 1)
        if rank == 0:
            (folder / "done").touch()


def save(folder: Path, loader: Any, step: int, epoch: int) -> None:
    dist.barrier()  # every rank has written the step
    if dist.get_rank() == 0:
        text = json.dumps({"loader": loader.state_dict(), "step": step, "epoch": epoch})
        (folder / "job.new").write_text(text)
        (folder / "job.new").rename(folder / "job.json")


def steps_saved(folder: Path) -> int:
    path = folder / "job.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else 0


def steps_of(folder: Path, number: int, world_size: int) -> dict[int, tuple[int, list[Row]]]:
    """Return the steps of a run, over all ranks. Some ranks may be missing in the last one."""
    steps: dict[int, tuple[int, list[Row]]] = {}
    for rank in range(world_size):
        path = folder / f"run-{number}-rank-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            step, epoch, rows = json.loads(line)
            steps.setdefault(step, (epoch, []))[1].extend(rows)
    return steps


def count_samples(sequence: Sequence, steps: list[tuple[int, list[Row]]]) -> None:
    """Compare the samples with the order of one uninterrupted rank."""
    job = sequence.job
    alone = Job(job.count, job.epochs, "uneven", job.is_mixture, True).loader((0, 1), 1, 0)
    for epoch in range(job.epochs):
        expected = [row for batch in alone for row in batch.tolist()]
        given = [rows for of_epoch, rows in steps if of_epoch == epoch]
        # Padding is in an epoch's last step, and repeats samples of that step.
        last = given.pop() if given else []
        indices = [row[0] for row in last]
        own = [row for place, row in enumerate(last) if row[0] not in indices[:place]]
        rows = [row for step in given for row in step] + own
        sequence.padding += len(last) - len(own)
        sequence.samples_given += len(rows)
        if job.remainder == "drop":
            largest = STEP_SIZE if job.has_global_size else 5 * max(SIZES)
            if len(expected) - len(rows) >= largest:
                sequence.fault = f"epoch {epoch} left {len(expected) - len(rows)} samples out"
            expected = expected[: len(rows)]
        sequence.samples_expected += len(expected)
        if rows != expected:
            often = {key: n for key, n in Counter(row[0] for row in rows).items() if n > 1}
            missing = {row[0] for row in expected} - {row[0] for row in rows}
            sequence.fault = (
                f"epoch {epoch}: twice {often}, never {missing}, else another order or augmentation"
            )


def table(sequences: list[Sequence]) -> str:
    """Return a table with a row for each number of runs."""
    groups: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(len(sequence.sizes), []).append(sequence)
    lines = [
        "| runs | sequences | sizes, for example | kills | resumes | samples of the epochs | given "
        "| padding | steps made again | faults |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [(str(runs), groups[runs]) for runs in sorted(groups)] + [("all", sequences)]
    for name, group in rows:
        sizes = "" if name == "all" else "→".join(map(str, group[0].sizes))
        counts = [
            sum(getattr(sequence, what) for sequence in group)
            for what in (
                "kills",
                "resumes",
                "samples_expected",
                "samples_given",
                "padding",
                "steps_lost",
            )
        ]
        faults = sum(sequence.fault is not None for sequence in group)
        cells = [name, len(group), sizes, *counts, faults]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    sys.exit(code)
