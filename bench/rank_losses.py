# SPDX-License-Identifier: Apache-2.0
"""The training data and losses of a job that is reduced from 4 ranks to 2 and to 1.

Each number of ranks is a separate torchrun, which resumes from the state of the one before. The
samples and the augmented inputs of each step are compared bit for bit with those seen by 1
uninterrupted rank. The losses are means over the ranks: sums of floating-point numbers in another
order, so that their last digits may differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import MeasurementError, Record, add_report_options, report, run_main, summary
from table import aligned

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "python"))

SIZES = ((4, 2), (2, 3), (1, None))  # ranks, and the step after which they stop


def run(folder: Path, sizes: tuple[tuple[int, int | None], ...], wrap: str) -> dict[int, Any]:
    """Each step with its number of ranks."""
    from torchrun_jobs import forget_steps, steps_of, torchrun

    folder.mkdir()
    steps: dict[int, Any] = {}
    for world_size, last in sizes:
        done = torchrun(folder, world_size, wrap=wrap, steps=last, workers=1)
        if done.returncode != 0:
            raise MeasurementError(f"{world_size} ranks failed: {done.stderr}")
        of_size = steps_of(folder, world_size)
        steps |= {number: (world_size, step) for number, step in of_size.items()}
        forget_steps(folder)
    return steps


def measure(args: argparse.Namespace) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as name:
        job = run(Path(name) / "job", SIZES, args.wrap)
        alone = run(Path(name) / "alone", ((1, None),), args.wrap)
    if job.keys() != alone.keys():
        raise MeasurementError(f"the job took the steps {[*job]}, but one rank took {[*alone]}")
    for number, (world_size, step) in sorted(job.items()):
        of_one = alone[number][1]
        parameters = {
            "step": number,
            "ranks": world_size,
            "wrap": args.wrap,
            "samples": step.indices == of_one.indices,
            "inputs": step.inputs == of_one.inputs,
        }
        for kind, losses in {"job": step.losses, "one rank": of_one.losses}.items():
            loss = sum(losses) / len(losses)
            yield summary("rank_losses/loss", {**parameters, "kind": kind}, [loss], ndigits=12)


def table(everything: list[Record]) -> str:
    rows = [["step", "ranks", "samples", "inputs", "loss", "loss of 1 rank", "difference"]]
    losses = {(r["parameters"]["step"], r["parameters"]["kind"]): r["median"] for r in everything}
    for one in (r["parameters"] for r in everything if r["parameters"]["kind"] == "job"):
        step = one["step"]
        mine, alone = losses[step, "job"], losses[step, "one rank"]
        equal = ["equal" if one[what] else "OTHER" for what in ("samples", "inputs")]
        shown = [f"{mine:.9f}", f"{alone:.9f}", f"{mine - alone:.1e}"]
        rows.append([str(step), str(one["ranks"]), *equal, *shown])
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--wrap",
        choices=("ddp", "fsdp2"),
        default="ddp",
        help="how the model is wrapped (default: ddp)",
    )
    add_report_options(parser)
    return parser.parse_args()


def main() -> int:
    done = report("rank_losses", parse_arguments(), measure, table)
    return 2 if done is None else 0


if __name__ == "__main__":
    run_main(main)
