# SPDX-License-Identifier: Apache-2.0
"""The commands that run a program of the user's: run, explain."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.command_parser import (
    FAILED_EXIT_CODE,
    CommandError,
    CommandParser,
    one_of,
    whole_number,
)
from penstock.cli.named_program import PROGRAM_USAGE, named_if_missing, start_of
from penstock.cli.pool_commands import KEYS_VARIABLE, POOL_VARIABLE, PROCESSES_MAX
from penstock.errors import PenstockError
from penstock.tuning.usable_cpus import usable_cpus


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Carries out a command of this module; returns the exit code. Raises CommandError for
    arguments that the command does not take, and the program's exceptions, SystemExit included."""
    return _COMMANDS[command](arguments)


def _run(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "run",
        PROGRAM_USAGE.format(command="run"),
        """\
Runs a Python program as python does, with penstock's DataLoader in the place of torch's. The
program, its arguments and the frameworks that it uses stay as they are. What follows the program
is for the program.""",
        """\
With PENSTOCK_POOL=tcp://HOST:PORT the program's loaders get their batches from the workers of the
pool whose controller is there.

With --pool-local N they get them from a pool of the program's own: N worker processes and their
controller, which are started on this machine before the program and end with it, whatever ends it.
They listen on loopback, with the keys that this user's processes share (or those of PENSTOCK_KEYS).
PENSTOCK_POOL has the controller's address, for the program and all that it starts: the ranks of a
job share one pool when it is started around torchrun, as below.

The exit code is the program's.

examples:
  penstock run train.py --epochs 3
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
        help="send the modules of this folder or file to a pool's workers, beside the program's "
        "own; may be given several times (default: PENSTOCK_CODE_PATHS)",
    )
    parser.add_argument(
        "--pool-local",
        type=whole_number(1, PROCESSES_MAX),
        metavar="N",
        help="start a pool of N worker processes on this machine for the program (default: none)",
    )
    options, program = parser.parse_before_program(arguments)
    start = start_of(program, parser.command)
    if options.code:
        _name_code_paths(options.code, parser.command)
    prepare = _nothing
    if options.pool_local is not None:
        _check_pool_local(options.pool_local, parser.command)
        prepare = functools.partial(_start_pool, options.pool_local)
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
Then it ends the program and prints what of that model could run in the data workers, what has to
stay in the trainer, why, and what it costs.

Standard output is the plan alone; what the program prints goes to standard error.""",
        """\
The exit code is 0 when there is a plan (also one that says why nothing moves), 1 when the program
called no model with a batch, and the program's own when it fails.

examples:
  penstock explain train.py --epochs 3
  penstock explain --format json train.py > plan.json
  penstock explain --svg plan.svg train.py
  penstock explain --format dot -m package.train | dot -Tpdf -o plan.pdf""",
    )
    parser.add_argument(
        "--format",
        type=one_of(("text", "json", "dot")),
        default="text",
        metavar="FORMAT",
        help="print the plan as a table (text), as JSON (json) or as a graph for Graphviz (dot) "
        "(default: text)",
    )
    parser.add_argument(
        "--cut",
        type=one_of(("auto", "maximal", "none")),
        metavar="CUT",
        help="plan the cheapest cut (auto), a cut that moves all that can move (maximal), or no "
        "cut (none) (default: that of the program's own penstock.offload, else auto)",
    )
    parser.add_argument(
        "--svg",
        metavar="FILE",
        help="draw the plan as a picture into this file, too; a browser shows it, with the reason "
        "of a call when the pointer rests on it (default: none)",
    )
    options, program = parser.parse_before_program(arguments)
    start = start_of(program, parser.command)
    picture = None if options.svg is None else _writable(options.svg, parser.command)
    # It watches models by means of Dynamo, which no other command needs.
    from penstock.cli.explained_program import explain_program

    with named_if_missing(program):
        return explain_program(start, options.format, options.cut, picture)


class _NoPoolError(Exception):
    """The pool of --pool-local could not be started."""


def _check_pool_local(worker_count: int, command: str) -> None:
    """Raises CommandError where a pool of the program's own makes no sense, and warns of one that
    is too large."""
    if address := os.environ.get(POOL_VARIABLE):
        raise CommandError(
            f"--pool-local asks for a pool of the program's own, and {POOL_VARIABLE} names the one "
            f"at {address}; unset {POOL_VARIABLE}, or leave --pool-local out",
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
            f"{cpu_count} CPUs that this process may use; workers that compute will wait for each "
            f"other, and for the program",
            file=sys.stderr,
        )


def _start_pool(worker_count: int) -> None:
    from penstock.pool.local_pool import LocalPool  # which few programs need

    try:
        pool = LocalPool.start(worker_count, os.environ.get(KEYS_VARIABLE) or None)
    except PenstockError as error:
        raise _NoPoolError(f"--pool-local {worker_count}: {error}") from error
    # Registered before the program runs, and so called last: threads of the program, and handlers
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


def _writable(path: str, command: str) -> Path:
    """A file that can be written, whatever folder the program goes to. What is wrong with it is
    told before the program has run for long."""
    file = Path(os.path.abspath(path))
    reason = ""
    if not path or file.is_dir():
        reason = "is a folder" if path else "is no name"
    elif not file.parent.is_dir():
        reason = f"cannot be written, as there is no folder {str(file.parent)!r}"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "cannot be written, for want of permission"
    if reason:
        raise CommandError(
            f"--svg {path!r} {reason}; name a file in a folder that you may write to", command
        )
    return file


def _name_code_paths(paths: Sequence[str], command: str) -> None:
    from penstock.pool.travelling_code import name_code_paths  # arguments that only a pool needs

    for path in paths:
        if not os.path.exists(path):
            raise CommandError(
                f"--code names {path!r}, which is not there; a folder or a .py file is expected",
                command,
            )
    name_code_paths(paths)


_COMMANDS = {"run": _run, "explain": _explain}
