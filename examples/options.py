# SPDX-License-Identifier: Apache-2.0
"""The quickstart's command line: every mistake is reported before the first training starts."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path

from photograph_crops import PHOTOGRAPHS, Recipe
from report import LABELS

EXAMPLES = Path(__file__).resolve().parent
DATA = EXAMPLES / "out" / "photographs"
PICTURE = EXAMPLES.parent / "build" / "quickstart.svg"  # git does not see it


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quickstart.py",
        description=description,
    )
    positive, natural = _at_least(1), _at_least(0)
    add = parser.add_argument
    add("--epochs", type=positive, help="epochs of each training (default: 4; 1 with --quick)")
    add("--workers", type=natural, default=2, help="data workers (default: 2)")
    add("--batch-size", type=positive, default=32, help="photographs per step (default: 32)")
    add("--lr", type=_above_zero, default=0.05, help="learning rate (default: 0.05)")
    add("--seed", type=natural, default=0, help="seed of each training (default: 0)")
    add(
        "--threads",
        type=positive,
        default=1,
        help="threads of the trainer (default: 1)",
    )
    add(
        "--warmup",
        type=natural,
        default=10,
        help="steps left out of rate and wait (default: 10)",
    )
    add("--ways", nargs="+", choices=LABELS, default=list(LABELS), help="trainings (default: all)")
    add(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the crops (default: in examples/out)",
    )
    add(
        "--picture",
        type=Path,
        default=PICTURE,
        help="SVG to draw (default: build/quickstart.svg)",
    )
    add("--json", type=Path, help="file for losses, accuracies, speeds, waits, plan and ledgers")
    add("--quick", action="store_true", help="640 crops and one epoch, to see that it runs")
    args = parser.parse_args()
    if args.quick:
        args.data = args.data.with_name(args.data.name + "-quick")
    if args.epochs is None:
        args.epochs = 1 if args.quick else 4
    if args.picture.suffix != ".svg":
        parser.error(f"--picture {args.picture} does not end in .svg; the picture is an SVG")
    for path in (args.picture, args.json):
        _check_can_write(parser, path)
    if set(args.ways) - {"torch"}:
        _check_can_import_penstock(parser)
    recipe = Recipe(32, 8) if args.quick else Recipe()
    step_count = args.epochs * (recipe.train_count * len(PHOTOGRAPHS) // args.batch_size)
    if step_count <= args.warmup:
        parser.error(
            f"--batch-size {args.batch_size} makes {step_count} steps and --warmup leaves out "
            f"{args.warmup} of them; lower --batch-size or --warmup, or raise --epochs"
        )
    args.recipe = recipe
    return args


def _at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is too low; give {lowest} or more")
        return value

    return integer


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is out of range; give a number above 0")
    return value


def _check_can_write(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """Checks before the training, not after it, that the results can be written."""
    if path is None:
        return
    if path.is_dir():
        parser.error(f"{path} is a folder; give the name of a file")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        parser.error(f"{path} cannot be written: {existing} is not a writable folder")


def _check_can_import_penstock(parser: argparse.ArgumentParser) -> None:
    try:
        importlib.import_module("penstock")
    except ImportError as err:
        parser.error(
            f"penstock cannot be imported by this Python ({err}); "
            "run `make demo`, or give `--ways torch` to see torch's loader alone"
        )
