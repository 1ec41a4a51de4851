# SPDX-License-Identifier: Apache-2.0
"""The commands about traces: trace, merge-traces."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.command_parser import CommandError, CommandParser, carry_out, whole_number
from penstock.cli.named_program import PROGRAM_USAGE, named_if_missing, start_of
from penstock.observing.trace_file import check_writable, merge_traces

if TYPE_CHECKING:
    from penstock.observing.step_trace import StepTrace

_STEPS_MAX = 1_000_000
_FILE = "trace.json"


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Carries out a command of this module; returns the exit code. Raises CommandError for
    arguments that the command does not take, and the program's exceptions, SystemExit included."""
    if command == "trace":
        return _trace(arguments)
    return carry_out({"merge-traces": _merge}, command, arguments)


def _trace(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "trace",
        PROGRAM_USAGE.format(command="trace"),
        """\
Runs a program as `penstock run` does, and writes where the time of a window of its steps went: a
trace for https://ui.perfetto.dev or chrome://tracing. Its tracks are the trainer, each worker, the
wire and the copy to the device; arrows lead from a batch's making to the step that it was for.""",
        """\
The file is written when the window is full, or when the program ends, also by an error or Ctrl-C.
Each of several ranks writes a file of its own, trace.rank0.json and so on; `penstock merge-traces`
makes one of them. The exit code is the program's.

examples:
  penstock trace train.py --epochs 3
  penstock trace --skip 100 --steps 50 -o steps.json.gz train.py
  penstock run --pool-local 4 -m penstock trace train.py
  torchrun --nproc-per-node 2 -m penstock trace train.py""",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1, _STEPS_MAX),
        default=200,
        metavar="N",
        help="trace so many batches of all loaders together (default: 200)",
    )
    parser.add_argument(
        "--skip",
        type=whole_number(0, _STEPS_MAX),
        default=0,
        metavar="K",
        help="leave the first batches out (default: 0)",
    )
    parser.add_argument(
        "-o",
        "--output",
        default=_FILE,
        metavar="FILE",
        help=f"write this file, compressed if it ends in .gz (default: {_FILE})",
    )
    options, program = parser.parse_before_program(arguments)
    start = start_of(program, parser.command)
    output = Path(options.output).absolute()  # a program may go to another folder
    try:
        check_writable(output)
    except OSError as error:
        raise CommandError(f"-o {options.output}: {error}", parser.command) from error
    begun: list[StepTrace] = []

    def begin() -> None:
        # Here, since it imports torch: a command that was called wrongly ends without it.
        from penstock.observing.step_trace import StepTrace

        begun.append(StepTrace(output, options.steps, options.skip, _say).__enter__())

    try:
        with named_if_missing(program):
            start(begin)
    finally:
        for trace in begun:
            _end(trace)
    return 0


def _end(trace: StepTrace) -> None:
    """Writes what was not written yet. A program's own error stays the one that is told."""
    try:
        trace.__exit__(None, None, None)
    except OSError as error:
        print(f"penstock trace: the trace was not written: {error}", file=sys.stderr)


def _say(trace: StepTrace) -> None:
    assert trace.path is not None
    if trace.step_count == 0:
        print(
            f"penstock trace: {trace.path} has no steps: no batch of a DataLoader was given in "
            f"this process after those that --skip leaves out; processes that the program starts "
            f"to train in are traced when they run under `penstock trace` themselves",
            file=sys.stderr,
        )
        return
    steps = "1 step" if trace.step_count == 1 else f"{trace.step_count} steps"
    print(
        f"penstock trace: {steps} in {trace.path} ({trace.file_bytes / 1e6:.1f} MB); open it in "
        f"https://ui.perfetto.dev or chrome://tracing",
        file=sys.stderr,
        flush=True,
    )


def _merge(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "merge-traces",
        "merge-traces -o FILE TRACE [TRACE ...]",
        """\
Makes one trace of several: those of the ranks of a job, and those of torch.profiler, on one clock.
torch's trace of a process goes to that process's tracks.""",
        """\
examples:
  penstock merge-traces -o job.json trace.rank0.json trace.rank1.json
  penstock merge-traces -o both.json.gz trace.json torch.json""",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="write this file")
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="a trace, compressed or not")
    options = parser.parse(arguments)
    event_count = merge_traces(options.traces, options.output)
    print(f"{options.output}: {event_count} events of {len(options.traces)} traces")
    return 0
