# SPDX-License-Identifier: Apache-2.0
"""The commands of a pool: keys, controller, worker, status, top, costs, drain."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from penstock import _pool
from penstock.cli.command_parser import (
    CommandError,
    CommandParser,
    amount,
    byte_count,
    integer,
    one_of,
    run_subcommand,
    seconds,
)
from penstock.cli.dashboard_options import StartDashboard, add_dashboard, dashboard_of
from penstock.cli.isolation_options import add_isolation, isolation_of
from penstock.engines.engine import NAME_VARIABLE
from penstock.errors import PenstockError
from penstock.pool.job_isolation import plan_isolation
from penstock.pool.pool_log import PoolLog
from penstock.pool.pool_status import PoolStatus, cost_text, name_of, status_text
from penstock.pool.terms import Terms, read_terms
from penstock.pool.worker_spec import DRAIN_GRACE_S, PATIENCE_S, PoolWorkerSpec, worker_addresses

POOL_VARIABLE = "PENSTOCK_POOL"
KEYS_VARIABLE = "PENSTOCK_KEYS"
_DEFAULT_TIMEOUT_S = 5.0
PROCESSES_MAX = 1024
ADDRESS = "tcp://HOST:PORT"
_TOP_INTERVAL_S = 1.0


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run a command of this module; return the exit code. Raises CommandError for arguments that
    the command does not accept."""
    return run_subcommand(_COMMANDS, command, arguments)


def _make_keys(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "keys",
        "keys DIR [--user NAME --out FOLDER | --machine NAME --out FOLDER]\n"
        "keys DIR --rotate | --finish",
        """\
Creates the keys of a pool: a pair for each role. A pool that spans machines needs them; a pool on a
single machine uses keys that this user's processes share. With --user, creates a key folder for one
user's training programs, so that the pool can identify that user. With --machine, creates a key
folder for the workers of one machine, whose access can then be revoked separately. With --rotate,
replaces the keys of all roles while training continues; --finish completes the rotation.""",
        """\
examples:
  penstock keys keys
  penstock keys keys --user ann --out keys-of-ann
  penstock keys keys --machine beta --out keys-of-beta
  penstock keys keys --rotate""",
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        help="folder for the keys, created with mode 0700; with another option, the existing key "
        "folder of the pool; with --finish, the key folder of the pool or of a host",
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--user", metavar="NAME", help="create keys for a user of this pool")
    task.add_argument("--machine", metavar="NAME", help="create keys for a machine with workers")
    task.add_argument(
        "--rotate",
        action="store_true",
        help="create new keys for all roles; the former keys stay valid until --finish",
    )
    task.add_argument(
        "--finish",
        action="store_true",
        help="revoke the former keys: processes that still use them are rejected within seconds",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder to create for the user's or the machine's keys"
    )
    args = parser.parse(arguments)
    folder = args.folder
    if args.out is None and args.user is not None:
        raise CommandError("--user NAME requires --out FOLDER", "keys")
    if args.out is None and args.machine is not None:
        raise CommandError("--machine NAME requires --out FOLDER", "keys")
    if args.out is not None and args.user is None and args.machine is None:
        raise CommandError("--out FOLDER requires --user NAME or --machine NAME", "keys")
    if args.user is not None:
        _pool.make_user_keys(folder, args.user, args.out)
        message = (
            f"{args.out} contains the keys that {args.user} needs for training. To admit "
            f"{args.user}, copy {folder}/{args.user}.user.public to the key folders of the "
            "controller and the workers, which read it within seconds"
        )
    elif args.machine is not None:
        _pool.make_machine_keys(folder, args.machine, args.out)
        message = (
            f"{args.out} contains the keys for the workers of {args.machine}. To admit them, copy "
            f"{folder}/{args.machine}.machine.public to the key folder of the controller, which "
            "reads it within seconds"
        )
    elif args.rotate:
        _pool.rotate_keys(folder)
        message = (
            f"{folder} has new keys for each role; the former keys stay valid. Next:\n"
            "  1. copy the .former.public files to all key folders, then the other .public files, "
            "then the .secret file of each host's role\n"
            "  2. restart the controller, then the workers; start programs with the new keys\n"
            "  3. when no process uses the former keys any more, run penstock keys DIR --finish "
            "for each folder"
        )
    elif args.finish:
        _pool.finish_rotation(folder)
        message = (
            f"the former keys were removed from {folder}: servers with this folder reject them "
            "within seconds"
        )
    else:
        _pool.make_key_folder(folder)
        message = (
            f"{folder} has a pair of keys for each role. A host needs all .public files, and the "
            ".secret file of each role that it runs: controller, worker, trainer or operator"
        )
    print(f"penstock keys: {message}.")
    return 0


def _control(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "controller",
        f"controller --bind {ADDRESS} [--keys DIR] [--dashboard PORT] [OPTION ...]",
        """\
Runs the controller of a pool, which distributes the pool's workers among its trainers, until
SIGTERM or Ctrl-C. Training continues without it, and it can be restarted at any time.""",
        """\
examples:
  penstock controller --bind tcp://127.0.0.1:7000
  penstock controller --bind tcp://alpha:7000 --keys keys --dashboard 8080""",
    )
    parser.add_argument(
        "--bind",
        required=True,
        metavar=ADDRESS,
        help="address to listen at; port 0 selects a free port, which is printed",
    )
    add_shares(parser)
    add_keys(parser)
    add_dashboard(parser)
    args = parser.parse(arguments)
    _pool.close_memory()
    with dashboard_of(args, "controller") as start_dashboard:
        return _run_controller(args, start_dashboard)


def _run_controller(args: argparse.Namespace, start_dashboard: StartDashboard) -> int:
    limit_lines = _pool.raise_descriptor_limit()
    controller = start_controller(args.bind, args)
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # Python sees a signal only after the native loop; the descriptor is written immediately.
    signal.set_wakeup_fd(stop_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    shown_keys = args.keys or f"{_pool.shared_key_folder()}, shared by this user's processes"
    log = PoolLog("penstock controller")
    log.info(f"listens at {controller.endpoint}, keys in {shown_keys}, process {os.getpid()}")
    for line in limit_lines:
        log.info(line)
    start_dashboard(controller.endpoint, log)
    controller.run(stop_read, log.note_member)
    log.info(f"ends after {signal.Signals(os.read(stop_read, 1)[0]).name}")
    return 0


def _work(arguments: Sequence[str]) -> int:
    # Imported here, as the other commands do not need it.
    from penstock.pool.worker_supervisor import Supervisor

    parser = CommandParser(
        "worker",
        f"worker [--controller {ADDRESS}] [--processes N] [OPTION ...]",
        """\
Runs pool workers on this host. They make batches for the trainers that the controller assigns. A
worker that ends is restarted unless it was drained. On SIGTERM or Ctrl-C, the workers finish their
batches and leave; a second signal ends them immediately.""",
        """\
examples:
  penstock worker --controller tcp://127.0.0.1:7000 --processes 4
  penstock worker --controller tcp://alpha:7000 --keys keys --bind tcp://10.0.0.5:7100""",
    )
    _add_pool(parser)
    parser.add_argument(
        "--processes",
        type=integer(1, PROCESSES_MAX),
        default=1,
        metavar="N",
        help="number of workers to start on this host (default: 1)",
    )
    parser.add_argument(
        "--bind",
        metavar=ADDRESS,
        help="address at which trainers connect to the first worker; each further worker takes "
        "the next port (default: a free port of the interface towards the controller)",
    )
    parser.add_argument(
        "--advertise",
        metavar=ADDRESS,
        help="address to which trainers connect, if it differs from --bind, for example behind NAT "
        "(default: --bind)",
    )
    parser.add_argument(
        "--data-bind",
        metavar=ADDRESS,
        help="address of the second port of the first worker, for the encrypted bytes of batches; "
        "each further worker takes the next port (default: a free port of the interface of --bind)",
    )
    parser.add_argument(
        "--data-advertise",
        metavar=ADDRESS,
        help="address to which trainers connect for the bytes of batches, if it differs from "
        "--data-bind (default: the host of --advertise, the port of --data-bind)",
    )
    parser.add_argument(
        "--patience",
        type=seconds(1),
        default=PATIENCE_S,
        metavar="SECONDS",
        help="time after which a worker without a trainer and without a controller ends "
        f"(default: {PATIENCE_S:g})",
    )
    parser.add_argument(
        "--grace",
        type=seconds(1),
        default=DRAIN_GRACE_S,
        metavar="SECONDS",
        help="time in which a worker may finish its batch after SIGTERM, Ctrl-C or `penstock "
        f"drain`; other workers then make its unfinished batches (default: {DRAIN_GRACE_S:g})",
    )
    parser.add_argument(
        "--powercap",
        metavar="DIR",
        help="powercap folder from which the energy use of this host is read; the worker ends if "
        "it cannot be read (default: /sys/class/powercap; if that cannot be read, the energy is "
        "unknown)",
    )
    add_isolation(parser)
    args = parser.parse(arguments)
    if args.powercap == "":
        raise CommandError(
            "--powercap must name the powercap folder, got an empty string", "worker"
        )
    where = controller_of(parser, args)
    addresses = worker_addresses(
        where,
        args.bind,
        args.advertise,
        args.processes,
        data_bind=args.data_bind,
        data_advertise=args.data_advertise,
    )
    log = PoolLog("penstock worker")
    if args.keys is not None and (warning := _pool.warning_of_workers_keys(args.keys)):
        log.warn(warning)
    plan = plan_isolation(isolation_of(args), args.keys)
    for line in plan.messages:
        log.info(line)
    for line in plan.warnings:
        log.warn(line)
    return Supervisor(
        [
            PoolWorkerSpec(
                bind=address.bind,
                advertised=address.advertised,
                data_bind=address.data_bind,
                data_advertised=address.data_advertised,
                controller=where,
                key_folder=args.keys,
                patience_s=args.patience,
                parent_pid=os.getpid(),
                name=os.environ.get(NAME_VARIABLE, ""),
                powercap=args.powercap or "",
                grace_s=args.grace,
            )
            for address in addresses
        ],
        isolation=plan.isolation,
    ).run()


def _show_status(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "status",
        f"status [--controller {ADDRESS}] [--all | --json] [OPTION ...]",
        """\
Shows the workers of a pool and their jobs. For each job, it shows the recent batches per second of
its trainer, and the share of that time for which the trainer waited. A job that requests no
batches, as between epochs, is idle.""",
        """\
examples:
  penstock status --controller tcp://127.0.0.1:7000
  penstock status --json > status.json""",
    )
    add_controller(parser)
    parser.add_argument(
        "--all", action="store_true", help="also show jobs that have been idle for long"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the controller's full status as JSON"
    )
    args = parser.parse(arguments)
    fields = json.loads(_pool.pool_status(controller_of(parser, args), args.keys, args.timeout))
    if args.json:
        print(json.dumps(fields, indent=2))
    else:
        print(status_text(PoolStatus(fields), with_idle=args.all))
    return 0


def _top(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "top",
        f"top [--controller {ADDRESS}] [--once [--json]] [OPTION ...]",
        """\
Shows the jobs of a pool with their ranks, its workers, a breakdown of the step time, and events, on
the whole terminal. The keys are htop's; F1 lists them. The display is read-only.""",
        """\
examples:
  penstock top --controller tcp://127.0.0.1:7000
  penstock top --once
  penstock top --once --json > pool.json""",
    )
    add_controller(parser)
    parser.add_argument("--once", action="store_true", help="print one frame as text and exit")
    parser.add_argument(
        "--json", action="store_true", help="with --once: print the data of the frame as JSON"
    )
    parser.add_argument(
        "--tree", action="store_true", help="start with the tree of jobs and their ranks"
    )
    parser.add_argument(
        "--interval",
        type=seconds(0.1),
        default=_TOP_INTERVAL_S,
        metavar="SECONDS",
        help=f"refresh interval (default: {_TOP_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--no-color",
        action="store_true",
        help="use only bold and reverse video (default: colours, unless NO_COLOR is set)",
    )
    args = parser.parse(arguments)
    if args.json and not args.once:
        raise CommandError("--json requires --once", "top")
    # Imported here, as the other commands of a pool do not need it.
    from penstock.live.pool_view import PoolAddress, ask_pool

    address = PoolAddress(controller_of(parser, args), args.keys, args.timeout)
    if args.json:
        print(json.dumps(ask_pool(address).as_json(), indent=2))
        return 0
    try:
        from penstock.live.top_screen import frame_text, run_screen
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rich":
            raise
        raise PenstockError(
            "requires the package rich, which is not installed: pip install 'penstock[top]'; "
            "--once --json does without it"
        ) from error
    if args.once:
        print(frame_text(ask_pool(address), is_tree=args.tree))
        return 0
    signal.signal(signal.SIGTERM, _end_by_python)
    no_color = bool(args.no_color or os.environ.get("NO_COLOR"))
    run_screen(address, interval_s=args.interval, no_color=no_color, is_tree=args.tree)
    return 0


def _end_by_python(number: int, _: object) -> NoReturn:
    """End by an exception, so that the terminal is restored."""
    sys.exit(128 + number)


def _show_costs(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "costs",
        f"costs [--controller {ADDRESS}] [--json] [OPTION ...]",
        """\
Shows the costs of the jobs of a pool, including jobs that have ended: worker and CPU hours, bytes,
samples and energy; money and CO2 by the given factors. Missing figures are shown as unknown, and
are null in the JSON.""",
        """\
examples:
  penstock costs --controller tcp://127.0.0.1:7000
  penstock costs --price-per-hour 0.04 --energy-price 0.30 --gco2-per-kwh 350""",
    )
    add_controller(parser)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--price-per-hour",
        type=amount,
        metavar="AMOUNT",
        help="price per worker-hour (default: the price given to `penstock up --price`)",
    )
    parser.add_argument(
        "--energy-price", type=amount, metavar="AMOUNT", help="price per kWh, in the same currency"
    )
    parser.add_argument(
        "--gco2-per-kwh", type=amount, metavar="GRAMS", help="CO2 per kWh, in grams"
    )
    args = parser.parse(arguments)
    answer = _pool.pool_costs(
        controller_of(parser, args),
        args.keys,
        args.timeout,
        price_per_hour=args.price_per_hour,
        energy_price_per_kwh=args.energy_price,
        gco2_per_kwh=args.gco2_per_kwh,
    )
    fields = json.loads(answer)
    print(json.dumps(fields, indent=2) if args.json else cost_text(fields))
    return 0


def _drain(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "drain",
        f"drain WORKER [--controller {ADDRESS}] [OPTION ...]",
        """\
Lets a worker finish its current batches, hand back the others and leave its pool. It is not
restarted.""",
        """\
example:
  penstock drain node7/4711 --controller tcp://127.0.0.1:7000""",
    )
    parser.add_argument(
        "worker",
        metavar="WORKER",
        help="worker to drain: its name (HOST/PROCESS, as `penstock status` shows it), its id or "
        "a prefix of its id",
    )
    add_controller(parser)
    args = parser.parse(arguments)
    where = controller_of(parser, args)
    status = PoolStatus(json.loads(_pool.pool_status(where, args.keys, args.timeout)))
    worker = status.find_worker(args.worker)
    name = f"{name_of(worker)} ({worker['id']})"
    if not _pool.drain_worker(where, args.keys, int(worker["id"], 16), args.timeout):
        raise ValueError(f"worker {name} has already left the pool")
    print(f"penstock drain: worker {name} finishes its current batches and leaves the pool")
    return 0


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "keys": _make_keys,
    "controller": _control,
    "worker": _work,
    "status": _show_status,
    "top": _top,
    "costs": _show_costs,
    "drain": _drain,
}


def add_shares(parser: CommandParser) -> None:
    parser.add_argument(
        "--policy",
        type=one_of(("gpu-progress", "max-min")),
        default="gpu-progress",
        metavar="NAME",
        help="how workers are distributed among jobs: gpu-progress gives each job an even share, "
        "up to its need, and the rest to the jobs that they help most; max-min gives each job the "
        "same number (default: gpu-progress)",
    )
    parser.add_argument(
        "--terms",
        metavar="FILE",
        help="JSON file of priorities and quotas of jobs and of users, by name: "
        '{"jobs": {"train.py: Images": {"priority": 2, "quota": 16}}, "users": {"ann": {"quota": '
        "32}}} (default: all are equal)",
    )
    parser.add_argument(
        "--keep",
        type=byte_count,
        default=0,
        metavar="BYTES",
        help="memory of the pool's workers, such as 200GB, in which batches are kept for further "
        "requests of the same batch: of the next validation, and of other jobs with the same seed "
        "and the same keys (default: 0, none are kept)",
    )


def start_controller(bind: str, args: argparse.Namespace) -> _pool.Controller:
    """Start a controller with the options of add_keys() and add_shares()."""
    terms = read_terms(args.terms) if args.terms else Terms()
    return _pool.Controller.start(bind, args.keys, args.policy, terms.jobs, terms.users, args.keep)


def add_keys(parser: CommandParser) -> None:
    parser.add_argument(
        "--keys",
        metavar="DIR",
        default=os.environ.get(KEYS_VARIABLE) or None,
        help=f"folder with the keys of the pool (default: {KEYS_VARIABLE}, else keys that this "
        "user's processes share on this machine)",
    )


def _add_pool(parser: CommandParser) -> None:
    parser.add_argument(
        "--controller",
        metavar=ADDRESS,
        default=os.environ.get(POOL_VARIABLE) or None,
        help=f"address of the pool's controller (default: {POOL_VARIABLE})",
    )
    add_keys(parser)


def add_controller(parser: CommandParser) -> None:
    _add_pool(parser)
    parser.add_argument(
        "--timeout",
        type=seconds(0.001),
        default=_DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"time to wait for the controller's answer (default: {_DEFAULT_TIMEOUT_S:g})",
    )


def controller_of(parser: CommandParser, args: argparse.Namespace) -> str:
    if args.controller is None:
        raise CommandError(
            f"the address of the controller is missing; pass --controller {ADDRESS}, or set "
            f"{POOL_VARIABLE}",
            parser.command,
        )
    return str(args.controller)
