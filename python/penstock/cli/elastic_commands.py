# SPDX-License-Identifier: Apache-2.0
"""The commands of a pool that starts and ends its workers automatically: up, down."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import _pool, errors
from penstock.cli.command_parser import (
    CommandError,
    CommandParser,
    amount,
    integer,
    one_of,
    run_subcommand,
    seconds,
)
from penstock.cli.dashboard_options import StartDashboard, add_dashboard, dashboard_of
from penstock.cli.isolation_options import add_isolation, isolation_arguments, isolation_of
from penstock.cli.pool_commands import (
    ADDRESS,
    add_controller,
    add_keys,
    add_shares,
    controller_of,
    start_controller,
)
from penstock.engines.adapter import POLL_S, Adapter, AdapterLimits
from penstock.engines.engine import Engine, WorkerCommand
from penstock.engines.journal import Journal
from penstock.engines.local_engine import LocalEngine
from penstock.engines.ray_engine import RayEngine
from penstock.engines.slurm_engine import SlurmEngine
from penstock.engines.worker_keys import WorkerKeys
from penstock.errors import PenstockError
from penstock.pool.pool_log import PoolLog
from penstock.pool.worker_spec import DRAIN_GRACE_S, PATIENCE_S

_ENGINES = ("local", "ray", "slurm")
_COUNT_MAX = 4096
_END_LIMIT_S = 120.0
_ENDING_TURN_S = 0.25  # while workers leave


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run a command of this module; return the exit code. Raises CommandError for arguments that
    the command does not accept."""
    return run_subcommand(_COMMANDS, command, arguments)


def _up(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "up",
        "up --engine local|ray|slurm [--min N] [--max N] [OPTION ...]",
        """\
Runs the controller of a pool and an engine that starts as many workers as the jobs need and
releases idle ones. SIGTERM, Ctrl-C or `penstock down` stops the pool; its workers finish their
batches first. A pool that was killed resumes when it is started again.""",
        """\
examples:
  penstock up --engine local --max 8
  penstock up --engine slurm --max 64 --bind tcp://alpha:7000 --keys keys --partition harvest""",
    )
    parser.add_argument(
        "--engine",
        type=one_of(_ENGINES),
        metavar="NAME",
        required=True,
        help=f"engine that runs the workers: {', '.join(_ENGINES)}",
    )
    parser.add_argument(
        "--bind",
        default="tcp://127.0.0.1:0",
        metavar=ADDRESS,
        help="address at which the controller listens; port 0 selects a free port, which is "
        "printed and used again after a restart (default: tcp://127.0.0.1:0)",
    )
    add_keys(parser)
    parser.add_argument(
        "--worker-keys",
        metavar="DIR",
        help="key folder on the workers' machines, with worker.secret and the public keys "
        "(default: a folder in --state, created from --keys and removed when the pool ends)",
    )
    parser.add_argument(
        "--min",
        type=integer(0, _COUNT_MAX),
        default=0,
        metavar="N",
        help="minimum number of workers (default: 0)",
    )
    parser.add_argument(
        "--max",
        type=integer(0, _COUNT_MAX),
        default=64,
        metavar="N",
        help="maximum number of workers (default: 64)",
    )
    parser.add_argument(
        "--idle",
        type=seconds(0),
        default=60.0,
        metavar="SECONDS",
        help="time after which an idle worker is released (default: 60)",
    )
    parser.add_argument(
        "--grace",
        type=seconds(0),
        default=DRAIN_GRACE_S,
        metavar="SECONDS",
        help="time for a worker to finish its batches before it is terminated (default: 30)",
    )
    parser.add_argument(
        "--price",
        type=amount,
        metavar="AMOUNT",
        help="price per worker-hour, for the status and the budget",
    )
    parser.add_argument(
        "--budget",
        type=amount,
        metavar="AMOUNT",
        help="maximum total cost of the workers; requires --price (default: unlimited)",
    )
    add_shares(parser)
    add_dashboard(parser)
    parser.add_argument(
        "--state",
        metavar="DIR",
        help="folder for the journal, the logs and the workers' keys (default: "
        "~/.local/state/penstock/ENGINE)",
    )
    parser.add_argument("--partition", metavar="NAME", help="slurm: partition of the workers' jobs")
    parser.add_argument("--account", metavar="NAME", help="slurm: account of the workers' jobs")
    parser.add_argument(
        "--cpus",
        type=integer(1, 1024),
        default=1,
        metavar="N",
        help="ray, slurm: number of CPUs per worker (default: 1)",
    )
    parser.add_argument(
        "--memory",
        type=integer(1, 1 << 24),
        metavar="MB",
        help="slurm: memory per worker (default: the partition's)",
    )
    parser.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME",
        help="slurm: additional environment variable to pass to the workers; may be given several "
        "times (default: PATH, HOME, LD_LIBRARY_PATH, PYTHON* and similar, no secrets)",
    )
    parser.add_argument(
        "--address",
        default="auto",
        metavar="HOST:PORT",
        help="ray: address of the cluster (default: auto, this machine's cluster)",
    )
    parser.add_argument(
        "--resource",
        type=_resource,
        action="append",
        metavar="NAME=N",
        help="ray: custom resource that each worker requires; may be given several times",
    )
    add_isolation(parser)
    args = parser.parse(arguments)
    if args.min > args.max:
        raise CommandError(f"--min must be <= --max ({args.max}), got {args.min}", "up")
    if args.budget is not None and args.price is None:
        raise CommandError("--budget requires --price, the price per worker-hour", "up")
    if args.worker_keys is not None and args.keys is None:
        raise CommandError("--worker-keys requires --keys, the key folder of the controller", "up")
    state = Path(args.state or Path.home() / ".local" / "state" / "penstock" / args.engine)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(state / "lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PenstockError(
                f"another penstock up is using {state}; stop it with penstock down, or name "
                "another folder with --state"
            ) from None
        _pool.close_memory()
        with dashboard_of(args, "up") as start_dashboard:
            return _Elastic(args, state).run(start_dashboard)


class _Elastic:
    """A controller with an adapter. Confined to the main thread."""

    def __init__(self, args: Any, state: Path) -> None:
        self._log = PoolLog("penstock up")
        self._limit_lines = _pool.raise_descriptor_limit()
        journal = Journal(state / "journal")
        self._controller = _start_controller(args, journal.endpoint, self._log)
        endpoint = self._controller.endpoint
        journal.note_endpoint(endpoint)
        key_folder = args.worker_keys and os.path.abspath(args.worker_keys)
        self._worker_keys: WorkerKeys | None = None
        if args.keys is not None and key_folder is None:
            own = (state / "worker-keys").absolute()
            self._worker_keys = WorkerKeys(Path(args.keys).absolute(), own)
            key_folder = str(own)
        isolation = isolation_arguments(isolation_of(args))
        command = WorkerCommand(endpoint, key_folder, PATIENCE_S, args.grace, isolation)
        limits = AdapterLimits(
            worker_count_min=args.min,
            worker_count_max=args.max,
            idle_s=args.idle,
            grace_s=args.grace,
            price_per_hour=args.price,
            budget=args.budget,
        )
        engine = _engine_of(args, command, journal.pool, state)
        self._adapter = Adapter(
            engine, journal, limits, endpoint, args.keys, self._log.warn, self._worker_keys
        )
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._controller_error = ""

    def run(self, start_dashboard: StartDashboard) -> int:
        # Readable after a signal. A handler that takes a lock could deadlock with its own thread.
        end_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

        def set_signal_handlers() -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: os.eventfd_write(end_fd, 1))

        set_signal_handlers()
        serving = threading.Thread(target=self._serve, name="penstock-controller")
        with contextlib.ExitStack() as stack:
            serving.start()
            stack.callback(serving.join)
            stack.callback(os.write, self._stop_write, b"x")
            stack.callback(self._adapter.close)
            endpoint = self._controller.endpoint
            self._log.info(f"the controller listens at {endpoint}, process {os.getpid()}")
            for line in self._limit_lines:
                self._log.info(line)
            self._log.info(f"for training programs: export PENSTOCK_POOL={endpoint}")
            start_dashboard(endpoint, self._log)
            is_to_end = False
            while self._adapter.run_once(is_to_end=is_to_end):
                set_signal_handlers()  # Ray replaces the handlers when it connects
                if not serving.is_alive():
                    raise PenstockError(
                        f"the controller has ended: {self._controller_error or 'it was stopped'}; "
                        "workers continue with their current jobs, and `penstock up` with the "
                        "same --state finds them again"
                    )
                if is_to_end:
                    time.sleep(_ENDING_TURN_S)
                else:
                    is_to_end = bool(select.select([end_fd], [], [], POLL_S)[0])
            if self._worker_keys is not None:
                self._worker_keys.remove()
        self._log.info("has ended; no workers are left")
        return 0

    def _serve(self) -> None:
        try:
            self._controller.run(self._stop_read, self._log.note_member)
        except Exception as error:  # the main thread reports it
            self._controller_error = str(error)


def _variable(text: str) -> str:
    """Parse the name of an environment variable, as an argparse type."""
    if text not in os.environ:
        raise argparse.ArgumentTypeError(f"must name a variable of the environment, got {text!r}")
    return text


def _resource(text: str) -> tuple[str, float]:
    """Parse NAME=N, as an argparse type."""
    name, equals, count = text.partition("=")
    with contextlib.suppress(ValueError):
        if name and equals and 0 < float(count) < 1e6:
            return name, float(count)
    raise argparse.ArgumentTypeError(f"must be NAME=N, such as dataworker=1, got {text!r}")


def _start_controller(args: Any, before: str, log: PoolLog) -> _pool.Controller:
    """Start the controller, at its endpoint ``before`` if any free port is allowed: live workers
    look for it there."""
    host, _, port = args.bind.rpartition(":")
    if port == "0" and before.rpartition(":")[0] == host:
        try:
            return start_controller(before, args)
        except PenstockError as error:
            controller = start_controller(args.bind, args)  # fails, too, unless it was the port
            log.warn(
                f"{error}; the controller uses another port; restart the processes that still "
                f"connect to {before}"
            )
            return controller
    return start_controller(args.bind, args)


def _engine_of(args: Any, command: WorkerCommand, pool: str, state: Path) -> Engine:
    if args.engine == "local":
        return LocalEngine(command, f"{pool}-", state / "logs")
    if args.engine == "ray":
        resources = dict(args.resource or ())
        return RayEngine(
            command, f"{pool}-", address=args.address, cpus=args.cpus, resources=resources
        )
    return SlurmEngine(
        command,
        f"{pool}-",
        state / "logs",
        partition=args.partition,
        account=args.account,
        cpus=args.cpus,
        memory_mb=args.memory,
        grace_s=args.grace,
        variables=args.env,
    )


def _down(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "down",
        f"down [--controller {ADDRESS}] [OPTION ...]",
        """\
Stops a pool started by `penstock up`: its workers finish their batches and leave, then the engine's
adapter and the controller end. Returns when the controller has ended.""",
        "example:\n  penstock down --controller tcp://127.0.0.1:7000",
    )
    add_controller(parser)
    args = parser.parse(arguments)
    where = controller_of(parser, args)
    try:
        has_engine = _pool.end_pool(where, args.keys, args.timeout)
    except errors.TimeoutError as error:
        raise errors.TimeoutError(
            f"{error}. If `penstock up` was killed, start `penstock up` again with the same "
            "--state, and then stop it"
        ) from error
    if not has_engine:
        raise PenstockError(
            f"the controller at {where} has no engine that could stop its workers; stop the "
            "controller and the workers where they were started"
        )
    deadline = time.monotonic() + _END_LIMIT_S
    while time.monotonic() < deadline:
        try:
            _pool.pool_status(where, args.keys, 1.0)
        except PenstockError:
            print(f"penstock down: the pool at {where} has ended")
            return 0
        time.sleep(0.2)
    raise PenstockError(
        f"the pool at {where} did not end within {_END_LIMIT_S:g} s; penstock status shows the "
        "remaining workers"
    )


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"up": _up, "down": _down}
