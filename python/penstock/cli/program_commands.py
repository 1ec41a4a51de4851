# SPDX-License-Identifier: Apache-2.0
"""The commands that run a user's program, and the commands that read its results: run, explain,
trace, merge-traces, doctor."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from penstock.cli.command_parser import (
    FAILED_EXIT_CODE,
    CommandError,
    CommandParser,
    error_record,
    integer,
    one_of,
    run_subcommand,
    seconds,
)
from penstock.cli.pool_commands import KEYS_VARIABLE, POOL_VARIABLE, PROCESSES_MAX
from penstock.cli.program import PROGRAM_USAGE, named_if_missing, start_of
from penstock.errors import PenstockError, code_of
from penstock.observing.trace_file import check_writable, merge_traces
from penstock.tuning.process_resources import usable_cpus

if TYPE_CHECKING:
    from penstock.observing.step_trace import StepTrace

_TRACED_STEPS_MAX = 1_000_000
_TRACE_FILE = "trace.json"
_DOCTOR_STEPS = 60
_DOCTOR_SECONDS = 20.0
_DOCTOR_TIMEOUT_S = 600.0
_TRIALS = 5
INTERRUPTED_EXIT_CODE = 130


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run a command of this module; return the exit code. Raises CommandError for arguments that
    the command does not accept, and the program's exceptions, SystemExit included."""
    if command in _PROGRAM_COMMANDS:
        return _PROGRAM_COMMANDS[command](arguments)
    return run_subcommand(_COMMANDS, command, arguments)


def _run(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "run",
        PROGRAM_USAGE.format(command="run"),
        """\
Runs a Python program as python does, with penstock's DataLoader instead of torch's. The program,
its arguments and its frameworks stay unchanged. Arguments after the program are passed to it.""",
        """\
With PENSTOCK_POOL=tcp://HOST:PORT, the program's loaders get their batches from the workers of the
pool whose controller has this address.

With --pool-local N, they get them from a separate pool: N worker processes and their controller,
which are started on this machine before the program and end with it, even if it crashes. They
listen on loopback, with the keys that this user's processes share (or the keys in PENSTOCK_KEYS).
PENSTOCK_POOL is set to the controller's address, for the program and all processes that it starts:
the ranks of a job share one pool if `penstock run` starts torchrun, as below.

--record-visits FOLDER records the samples of each step: `penstock visits FOLDER` shows whether each
epoch gave each sample once. With --keep-loader, the program keeps torch's loader, so that its own
stream is examined. Processes that the program itself starts are not recorded.

The exit code is the program's.

examples:
  penstock run train.py --epochs 3
  penstock run --record-visits run/visits --keep-loader train.py
  penstock run --pool-local 4 train.py --epochs 3
  penstock run --pool-local 4 -m torch.distributed.run --nproc-per-node 2 -m penstock run train.py
  penstock run -m package.train
  torchrun --nproc-per-node 2 --no-python penstock run train.py""",
    )
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="PATH",
        help="send the modules of this folder or file to a pool's workers, in addition to the "
        "program's modules; may be given several times (default: PENSTOCK_CODE_PATHS)",
    )
    parser.add_argument(
        "--pool-local",
        type=integer(1, PROCESSES_MAX),
        metavar="N",
        help="start a pool of N worker processes on this machine for the program (default: no "
        "pool)",
    )
    parser.add_argument(
        "--record-visits",
        metavar="FOLDER",
        help="record in this folder which samples each step is given, for `penstock visits`; each "
        "loader has a folder loader-0, loader-1 and so on (default: no record)",
    )
    parser.add_argument(
        "--keep-loader",
        action="store_true",
        help="keep torch's DataLoader, for --record-visits (default: replace it)",
    )
    options, program = parser.parse_before_program(arguments)
    start = start_of(program, parser.command)
    if options.code:
        _name_code_paths(options.code, parser.command)
    if options.keep_loader:
        if options.record_visits is None:
            raise CommandError(
                "--keep-loader requires --record-visits FOLDER; to run the program as it is, use "
                "python",
                parser.command,
            )
        start = functools.partial(start, keeps_loader=True)
    prepare = _nothing
    if options.pool_local is not None:
        _check_pool_local(options.pool_local, parser.command)
        prepare = functools.partial(_start_pool, options.pool_local)
    if options.record_visits is not None:
        folder = _folder_for_visits(options.record_visits, parser.command)
        prepare = functools.partial(_record_visits, folder, options.keep_loader, prepare)
    try:
        with named_if_missing(program):
            start(prepare)
    except _NoPoolError as error:
        print(f"penstock run: {error}", file=sys.stderr)
        return FAILED_EXIT_CODE
    return 0


def _explain(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "explain",
        PROGRAM_USAGE.format(command="explain"),
        """\
Runs a program as `penstock run` does until it first calls a model with a batch of a DataLoader.
Then ends the program and prints which operations of the model could run in the data workers, which
have to stay in the trainer, why, and their costs.

Standard output contains only the plan; the program's output is redirected to standard error.""",
        """\
The exit code is 0 if there is a plan (even one that moves no operation), 1 if the program called no
model with a batch, and the program's exit code if it fails.

examples:
  penstock explain train.py --epochs 3
  penstock explain --json train.py > plan.json
  penstock explain --html plan.html train.py
  penstock explain --format dot -m package.train | dot -Tpdf -o plan.pdf""",
    )
    parser.add_argument(
        "--format",
        type=one_of(("text", "json", "dot")),
        default="text",
        metavar="FORMAT",
        help="format of the plan: text, JSON (json) or a Graphviz graph (dot) (default: text)",
    )
    parser.add_argument(
        "--json",
        action="store_const",
        const="json",
        dest="format",
        help="the same as --format json; errors are printed as JSON, too",
    )
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="print every call and its reason; by default calls that stay share a line",
    )
    parser.add_argument(
        "--cut",
        type=one_of(("auto", "maximal", "none")),
        metavar="CUT",
        help="cut to plan: the cheapest (auto), one that moves all that can move (maximal), or no "
        "cut (none) (default: the argument of the program's penstock.offload, else auto)",
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        help="also draw the plan into this file for a browser, which shows the reason for a call "
        "after a click (default: no picture)",
    )
    parser.add_argument(
        "--svg",
        metavar="FILE",
        help="deprecated: also draw the plan into this file with Graphviz (default: no picture)",
    )
    options, program = parser.parse_before_program(arguments)
    start = start_of(program, parser.command)
    if options.verbose and options.format != "text":
        raise CommandError(
            f"--verbose applies to the format text; {options.format} always has every call",
            parser.command,
        )
    pictures = {
        form: _writable(f"--{form}", path, parser.command)
        for form, path in (("html", options.html), ("svg", options.svg))
        if path is not None
    }
    if "svg" in pictures:
        from penstock.graph.plan_picture import find_graphviz

        try:
            find_graphviz()
        except RuntimeError as error:
            raise CommandError(f"--svg: {error}: --html FILE", parser.command) from error
        print("penstock explain: --svg is deprecated; use --html FILE", file=sys.stderr)
    # Imported here, as it watches models through Dynamo, which no other command needs.
    from penstock.cli.explained_program import explain_program

    with named_if_missing(program):
        return explain_program(
            start, "table" if options.verbose else options.format, options.cut, pictures
        )


class _NoPoolError(Exception):
    """The pool of --pool-local could not be started."""


def _check_pool_local(worker_count: int, command: str) -> None:
    """Raise CommandError if a local pool makes no sense here, and warn if it is too large."""
    if address := os.environ.get(POOL_VARIABLE):
        raise CommandError(
            f"--pool-local starts a separate pool, but {POOL_VARIABLE} names the pool at "
            f"{address}; unset {POOL_VARIABLE}, or leave --pool-local out",
            command,
        )
    if (rank := os.environ.get("LOCAL_RANK")) and os.environ.get("WORLD_SIZE", "1") != "1":
        raise CommandError(
            f"--pool-local would start a pool for each rank (this one has LOCAL_RANK={rank}); "
            f"start one for all ranks of this machine: penstock run --pool-local {worker_count} -m "
            f"torch.distributed.run ... -m penstock run PROGRAM.py",
            command,
        )
    cpu_count = usable_cpus()
    if worker_count > cpu_count:
        print(
            f"penstock run: --pool-local {worker_count} starts more worker processes than the "
            f"{cpu_count} CPUs that this process may use; workers that compute will compete with "
            "each other and with the program",
            file=sys.stderr,
        )


def _start_pool(worker_count: int) -> None:
    from penstock.pool.local_pool import LocalPool  # needed by few programs

    try:
        pool = LocalPool.start(worker_count, os.environ.get(KEYS_VARIABLE) or None)
    except PenstockError as error:
        raise _NoPoolError(f"--pool-local {worker_count}: {error}") from error
    # Registered before the program runs, and so called last: the program's threads, and handlers
    # that it registers, may still read batches.
    atexit.register(pool.end)
    os.environ[POOL_VARIABLE] = pool.endpoint
    workers = "1 worker" if worker_count == 1 else f"{worker_count} workers"
    print(
        f"penstock run: a pool of {workers} on this machine, controller at {pool.endpoint}",
        file=sys.stderr,
        flush=True,
    )


def _nothing() -> None: ...


def _folder_for_visits(folder: str, command: str) -> Path:
    """Make a folder, and return its absolute path. Errors are reported before the program runs."""
    path = Path(folder).absolute()  # the program may change folders
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--record-visits {folder}: {error}", command) from error
    return path


def _record_visits(folder: Path, keeps_loader: bool, prepare: Callable[[], None]) -> None:
    prepare()
    # Imported here, as it imports torch: a command that was called wrongly ends without it.
    from penstock.loader.torch_visits import record_all

    record_all(folder, keeps_torch=keeps_loader)


def _writable(option: str, path: str, command: str) -> Path:
    """Return an absolute path that can be written, even if the program changes folders. Errors are
    reported here, before the program has run for long."""
    file = Path(os.path.abspath(path))
    reason = ""
    if not path or file.is_dir():
        reason = "is a folder" if path else "is empty"
    elif not file.parent.is_dir():
        reason = f"cannot be written, because the folder {str(file.parent)!r} does not exist"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "cannot be written, because permission is denied"
    if reason:
        raise CommandError(f"{option} {path!r} {reason}; name a file in a writable folder", command)
    return file


def _name_code_paths(paths: Sequence[str], command: str) -> None:
    from penstock.pool.travelling_code import export_code_paths  # only needed for these arguments

    for path in paths:
        if not os.path.exists(path):
            raise CommandError(
                f"--code must name an existing folder or .py file, got {path!r}",
                command,
            )
    export_code_paths(paths)


def _trace(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "trace",
        PROGRAM_USAGE.format(command="trace"),
        """\
Runs a program as `penstock run` does, and writes a trace that shows how a window of its steps spent
its time, for https://ui.perfetto.dev or chrome://tracing. Its tracks are the trainer, each worker,
the wire and the copy to the device; arrows connect the making of a batch with its step.""",
        """\
The file is written when the window is full, or when the program ends, even by an error or Ctrl-C.
Each of several ranks writes a separate file, trace.rank0.json and so on; `penstock merge-traces`
merges them. The exit code is the program's.

examples:
  penstock trace train.py --epochs 3
  penstock trace --skip 100 --steps 50 -o steps.json.gz train.py
  penstock run --pool-local 4 -m penstock trace train.py
  torchrun --nproc-per-node 2 -m penstock trace train.py""",
    )
    parser.add_argument(
        "--steps",
        type=integer(1, _TRACED_STEPS_MAX),
        default=200,
        metavar="N",
        help="number of batches to trace, of all loaders together (default: 200)",
    )
    parser.add_argument(
        "--skip",
        type=integer(0, _TRACED_STEPS_MAX),
        default=0,
        metavar="K",
        help="number of batches to skip first (default: 0)",
    )
    parser.add_argument(
        "-o",
        "--output",
        default=_TRACE_FILE,
        metavar="FILE",
        help=f"output file, compressed if its name ends in .gz (default: {_TRACE_FILE})",
    )
    options, program = parser.parse_before_program(arguments)
    start = start_of(program, parser.command)
    output = Path(options.output).absolute()  # the program may change folders
    try:
        check_writable(output)
    except OSError as error:
        raise CommandError(f"-o {options.output}: {error}", parser.command) from error
    begun: list[StepTrace] = []

    def begin() -> None:
        # Imported here, as it imports torch: a command that was called wrongly ends without it.
        from penstock.observing.step_trace import StepTrace

        begun.append(StepTrace(output, options.steps, options.skip, _report_trace).__enter__())

    try:
        with named_if_missing(program):
            start(begin)
    finally:
        for trace in begun:
            _end_trace(trace)
    return 0


def _end_trace(trace: StepTrace) -> None:
    """Write the unwritten rest. An error here does not replace the program's error."""
    try:
        trace.__exit__(None, None, None)
    except OSError as error:
        print(f"penstock trace: the trace was not written: {error}", file=sys.stderr)


def _report_trace(trace: StepTrace) -> None:
    assert trace.path is not None
    if trace.step_count == 0:
        print(
            f"penstock trace: {trace.path} has no steps: no batch of a DataLoader was delivered "
            "in this process after the batches that --skip omits; to trace processes that the "
            "program starts for training, run them under `penstock trace`",
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


def _merge_traces(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "merge-traces",
        "merge-traces -o FILE TRACE [TRACE ...]",
        """\
Merges the traces of the ranks of a job, and traces of torch.profiler, into one trace with a common
clock. torch's trace of a process is added to that process's tracks.""",
        """\
examples:
  penstock merge-traces -o job.json trace.rank0.json trace.rank1.json
  penstock merge-traces -o both.json.gz trace.json torch.json""",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="output file")
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="trace to merge, compressed or not"
    )
    options = parser.parse(arguments)
    event_count = merge_traces(options.traces, options.output)
    print(f"{options.output}: {event_count} events from {len(options.traces)} traces")
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "doctor",
        "doctor [OPTION ...] PROGRAM.py [ARGUMENT ...]\n"
        "doctor [OPTION ...] -m MODULE [ARGUMENT ...]",
        f"""\
Finds the bottleneck of a program, and changes that speed it up. Runs the program as `penstock run`
does, ends it after some steps of its busiest loader, and prints its bottleneck. Then runs the
program again with other options of that loader, and prints predicted and measured step times.

The program's files are not changed, and its batches are the same as without doctor: options that
change their order are listed, but tried only with --allow-reordering. The program runs up to
{_TRIALS + 2} times, each time from the start and without a terminal; its output is not shown.""",
        """\
The exit code is 0 if there is a diagnosis, and 1 if there is none or the program cannot be run
twice.

examples:
  penstock doctor train.py --epochs 3
  penstock doctor --trials 0 train.py
  penstock doctor --json -m package.train > diagnosis.json""",
    )
    parser.add_argument(
        "--steps",
        type=integer(2, 100_000),
        default=_DOCTOR_STEPS,
        metavar="N",
        help=f"minimum number of steps to measure in a run (default: {_DOCTOR_STEPS})",
    )
    parser.add_argument(
        "--seconds",
        type=seconds(0.5),
        default=_DOCTOR_SECONDS,
        metavar="S",
        help="maximum duration of a measurement, even if it has fewer steps (default: "
        f"{_DOCTOR_SECONDS:g})",
    )
    parser.add_argument(
        "--trials",
        type=integer(0, 50),
        default=_TRIALS,
        metavar="K",
        help=f"maximum number of changes to try, each in a separate run (default: {_TRIALS})",
    )
    parser.add_argument(
        "--timeout",
        type=seconds(1),
        default=_DOCTOR_TIMEOUT_S,
        metavar="S",
        help=f"time limit of a run (default: {_DOCTOR_TIMEOUT_S:g})",
    )
    parser.add_argument(
        "--allow-reordering",
        action="store_true",
        help="also try options that change the order of the batches",
    )
    parser.add_argument("--json", action="store_true", help="print the diagnosis as JSON")
    options, program = parser.parse_before_program(arguments)
    if not program or program == ["-m"]:
        raise CommandError("missing program; name a file, or a module with -m", "doctor")
    if program[0] != "-m" and not os.path.exists(program[0]):
        raise CommandError(f"the file {program[0]!r} does not exist", "doctor")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise CommandError(
            "doctor was started as one of several ranks, each of which would rerun the program; "
            "start it once, for a program with one rank",
            "doctor",
        )
    signal.signal(signal.SIGTERM, _end_on_signal)
    try:
        return _examine(program, options)
    except KeyboardInterrupt as error:
        message = "interrupted; all processes that it started have ended"
        if options.json:
            print(error_record(code_of(error), message))
        print(f"penstock doctor: {message}", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE


def _examine(program: Sequence[str], options: object) -> int:
    # Imported here, as it imports torch: a command that was called wrongly ends without it.
    from penstock.doctor import examination
    from penstock.doctor.program_runs import ProgramRuns, RunResult
    from penstock.tuning.observation import LoaderSettings

    asked = vars(options)
    command = [sys.executable, "-m", "penstock.cli.examined_program", *program]
    runs = ProgramRuns(command, asked["steps"], asked["seconds"], asked["timeout"])
    allow_reordering: bool = asked["allow_reordering"]

    _print_progress("running the program unchanged")
    found = examination.examine_first_run(runs.run())
    if examination.is_worth_a_plan(found):
        _print_progress(
            "running the program to find the parts of the model that could run in the workers"
        )
        examination.note_movable(found, runs.run(asks_for_plan=True), allow_reordering)
    else:
        examination.note_movable(found, None, allow_reordering)
    if not asked["json"]:
        print(examination.diagnosis_text(found) + "\n", flush=True)

    def run(settings: LoaderSettings, base: LoaderSettings, loader: int) -> RunResult:
        moves = settings.offload and not base.offload
        return runs.run(loader, settings.changes_from(base), moves)

    examination.try_changes(found, run, asked["trials"], allow_reordering, _print_progress)
    if asked["json"]:
        print(json.dumps(examination.as_record(found), indent=2))
    else:
        print(examination.changes_text(found))
    return FAILED_EXIT_CODE if found.cannot_repeat else 0


def _print_progress(text: str) -> None:
    print(f"penstock doctor: {text}", file=sys.stderr, flush=True)


def _end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


# Errors of these commands are the program's, and its exceptions stay unchanged.
_PROGRAM_COMMANDS = {"run": _run, "explain": _explain, "trace": _trace}
_COMMANDS = {"merge-traces": _merge_traces, "doctor": _doctor}
