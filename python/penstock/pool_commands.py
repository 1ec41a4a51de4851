# SPDX-License-Identifier: Apache-2.0
"""The commands of a pool: keys, controller, worker, status, drain."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from penstock import _pool
from penstock.errors import PenstockError
from penstock.pool_status import PoolStatus
from penstock.worker_addresses import worker_addresses
from penstock.worker_spec import PATIENCE_S, PoolWorkerSpec
from penstock.worker_supervisor import Supervisor

POOL_VARIABLE = "PENSTOCK_POOL"
KEYS_VARIABLE = "PENSTOCK_KEYS"
_DEFAULT_TIMEOUT_S = 5.0
_FAILED_EXIT_CODE = 1
_PROCESSES_MAX = 1024


class CommandError(Exception):
    """A command was called wrongly; the message is for the user."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog.removeprefix('penstock ')}: {message}")


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Does what one of `COMMANDS` is asked for; returns the exit code. Raises CommandError for
    arguments that it does not take."""
    try:
        return COMMANDS[command](arguments)
    except (PenstockError, ValueError, OSError) as error:
        print(f"penstock {command}: {error}", file=sys.stderr)
        return _FAILED_EXIT_CODE


def _make_keys(arguments: Sequence[str]) -> int:
    parser = _parser("keys", "makes the keys of a pool: a pair for each role")
    parser.add_argument("folder", help="is made, with mode 0700, if it is not there")
    folder = parser.parse_args(arguments).folder
    _pool.make_key_folder(folder)
    print(
        f"penstock keys: {folder} has a pair of keys for each role. A host needs all the .public "
        f"files, and of the .secret ones that of what runs there: controller, worker, trainer or "
        f"operator."
    )
    return 0


def _control(arguments: Sequence[str]) -> int:
    parser = _parser("controller", "runs the controller of a pool until it is ended")
    parser.add_argument("--bind", required=True, metavar="tcp://HOST:PORT", help="0 is a free port")
    _add_keys(parser)
    args = parser.parse_args(arguments)
    controller = _pool.Controller.start(args.bind, args.keys)
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # Python would see a signal once the native loop is over; the descriptor is written at once.
    signal.set_wakeup_fd(stop_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    keys = args.keys or f"{_pool.shared_key_folder()}, which this user's processes share"
    print(f"penstock controller: listens at {controller.endpoint}, keys in {keys}", flush=True)
    controller.run(stop_read)
    print("penstock controller: ends", flush=True)
    return 0


def _work(arguments: Sequence[str]) -> int:
    parser = _parser("worker", "makes batches for the trainers of a pool, until it is ended")
    _add_pool(parser)
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="of them on this host (1)"
    )
    parser.add_argument(
        "--bind",
        metavar="tcp://HOST:PORT",
        help="where trainers connect; further processes take the next ports; default: a free port "
        "of the interface towards the controller",
    )
    parser.add_argument(
        "--advertise",
        metavar="tcp://HOST:PORT",
        help="where trainers are told to connect, if that is another address",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="until it ends, without a trainer and without a word of the controller "
        f"({PATIENCE_S:g})",
    )
    args = parser.parse_args(arguments)
    if not 1 <= args.processes <= _PROCESSES_MAX:
        raise CommandError(
            f"--processes is {args.processes}, but 1 to {_PROCESSES_MAX} are expected"
        )
    if not 1 <= args.patience < 1e6:
        raise CommandError(f"--patience is {args.patience:g}, but seconds from 1 on are expected")
    controller = _controller(args)
    addresses = worker_addresses(controller, args.bind, args.advertise, args.processes)
    return Supervisor(
        [
            PoolWorkerSpec(
                bind=address.bind,
                advertised=address.advertised,
                controller=controller,
                key_folder=args.keys,
                patience_s=args.patience,
                code_root="",  # each process has its own
                parent_pid=os.getpid(),
            )
            for address in addresses
        ]
    ).run()


def _show_status(arguments: Sequence[str]) -> int:
    parser = _parser("status", "shows the workers and trainers of a pool")
    _add_controller(parser)
    parser.add_argument("--json", action="store_true", help="all of it, for programs")
    args = parser.parse_args(arguments)
    text = _pool.pool_status(_controller(args), args.keys, args.timeout)
    print(json.dumps(json.loads(text), indent=2) if args.json else PoolStatus(json.loads(text)))
    return 0


def _drain(arguments: Sequence[str]) -> int:
    parser = _parser("drain", "has a worker finish what it began, and leave")
    parser.add_argument("worker", help="its id, as `penstock status` shows it, or how it begins")
    _add_controller(parser)
    args = parser.parse_args(arguments)
    controller = _controller(args)
    status = PoolStatus(json.loads(_pool.pool_status(controller, args.keys, args.timeout)))
    worker_id = status.find_worker(args.worker)
    if not _pool.drain_worker(controller, args.keys, int(worker_id, 16), args.timeout):
        raise ValueError(f"worker {worker_id} has left the pool meanwhile")
    print(f"penstock drain: worker {worker_id} finishes what it began, and leaves")
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "keys": _make_keys,
    "controller": _control,
    "worker": _work,
    "status": _show_status,
    "drain": _drain,
}


def _parser(command: str, description: str) -> _Parser:
    return _Parser(prog=f"penstock {command}", description=f"penstock {command} {description}.")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keys",
        metavar="DIR",
        default=os.environ.get(KEYS_VARIABLE) or None,
        help=f"of `penstock keys`; default: {KEYS_VARIABLE}, else keys that this user's processes "
        f"share on this machine",
    )


def _add_pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--controller",
        metavar="tcp://HOST:PORT",
        default=os.environ.get(POOL_VARIABLE) or None,
        help=f"default: {POOL_VARIABLE}",
    )
    _add_keys(parser)


def _add_controller(parser: argparse.ArgumentParser) -> None:
    _add_pool(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=_DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"to wait for its answer ({_DEFAULT_TIMEOUT_S:g})",
    )


def _controller(args: argparse.Namespace) -> str:
    endpoint: Any = args.controller
    if endpoint is None:
        raise CommandError(
            f"say where the controller is: --controller tcp://HOST:PORT, or {POOL_VARIABLE}"
        )
    timeout = getattr(args, "timeout", _DEFAULT_TIMEOUT_S)
    if not 0 < timeout < 1e6:
        raise CommandError(f"--timeout is {timeout:g}, but seconds above 0 are expected")
    return str(endpoint)
