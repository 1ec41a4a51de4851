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
    carry_out,
    one_of,
    seconds,
    whole_number,
)
from penstock.cli.dashboard_options import StartDashboard, add_dashboard, dashboard_of
from penstock.cli.isolation_options import add_isolation, isolation_of
from penstock.engines.engine import NAME_VARIABLE
from penstock.pool.cost_text import cost_text
from penstock.pool.descriptor_limit import raise_descriptor_limit
from penstock.pool.pool_log import PoolLog
from penstock.pool.pool_status import PoolStatus, name_of
from penstock.pool.status_text import status_text
from penstock.pool.terms import Terms, read_terms

POOL_VARIABLE = "PENSTOCK_POOL"
KEYS_VARIABLE = "PENSTOCK_KEYS"
_DEFAULT_TIMEOUT_S = 5.0
PROCESSES_MAX = 1024
ADDRESS = "tcp://HOST:PORT"
_TOP_INTERVAL_S = 1.0


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run a command of this module; return the exit code. Raises CommandError for arguments that
    the command does not accept."""
    return carry_out(_COMMANDS, command, arguments)


def _make_keys(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "keys",
        "keys DIR [--user NAME --out FOLDER | --machine NAME --out FOLDER]\n"
        "keys DIR --rotate | --finish",
        """\
Makes the keys of a pool: a pair for each role. A pool that spans machines needs them; one on a
single machine has keys that this user's processes share. With --user, makes a folder of keys for
one user's training programs, whom the pool then knows apart from others. With --machine, makes one
for the workers of one machine, which can then be put out alone. With --rotate, replaces the keys of
all roles while training goes on; --finish ends that.""",
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
        help="folder for the keys, which is made, with mode 0700; with an option that of the pool, "
        "and with --finish that of a host, too",
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--user", metavar="NAME", help="make keys for a user of this pool")
    task.add_argument("--machine", metavar="NAME", help="make keys for a machine with workers")
    task.add_argument(
        "--rotate",
        action="store_true",
        help="make new keys for all roles; the former ones count as well until --finish",
    )
    task.add_argument(
        "--finish",
        action="store_true",
        help="have the former keys count no more: whoever still uses them is out within seconds",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="folder for the user's or the machine's keys; it is made"
    )
    args = parser.parse(arguments)
    folder = args.folder
    if args.out is None and args.user is not None:
        raise CommandError("--user NAME and --out FOLDER go together", "keys")
    if args.out is None and args.machine is not None:
        raise CommandError("--machine NAME and --out FOLDER go together", "keys")
    if args.out is not None and args.user is None and args.machine is None:
        raise CommandError("--out FOLDER goes with --user NAME or --machine NAME", "keys")
    if args.user is not None:
        _pool.make_user_keys(folder, args.user, args.out)
        said = (
            f"{args.out} is what {args.user} needs to train, and {folder}/{args.user}.user.public "
            f"lets {args.user} in: copy it to the key folders of the controller and the workers, "
            f"which see it within seconds"
        )
    elif args.machine is not None:
        _pool.make_machine_keys(folder, args.machine, args.out)
        said = (
            f"{args.out} is what the workers of {args.machine} need, and "
            f"{folder}/{args.machine}.machine.public lets them in: copy it to the key folder of "
            f"the controller, which sees it within seconds"
        )
    elif args.rotate:
        _pool.rotate_keys(folder)
        said = (
            f"{folder} has new keys for each role, and the former ones count as well. Next:\n"
            f"  1. copy the .former.public files to all key folders, then the other .public files, "
            f"then the .secret file of each host's role\n"
            f"  2. start the controller again, then the workers; start programs with the new keys\n"
            f"  3. once none runs with the former keys, run penstock keys DIR --finish for each "
            f"folder"
        )
    elif args.finish:
        _pool.finish_rotation(folder)
        said = (
            f"the former keys are out of {folder}: servers that have it let nobody in by them any "
            f"more, within seconds"
        )
    else:
        _pool.make_key_folder(folder)
        said = (
            f"{folder} has a pair of keys for each role. A host needs all the .public files, and "
            f"of the .secret ones that of the process there: controller, worker, trainer or "
            f"operator"
        )
    print(f"penstock keys: {said}.")
    return 0


def _control(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "controller",
        f"controller --bind {ADDRESS} [--keys DIR] [--dashboard PORT] [OPTION ...]",
        """\
Runs the controller of a pool, which shares the pool's workers out among its trainers, until SIGTERM
or Ctrl-C ends it. Training goes on without it, and it may be started again at any time.""",
        """\
examples:
  penstock controller --bind tcp://127.0.0.1:7000
  penstock controller --bind tcp://alpha:7000 --keys keys --dashboard 8080""",
    )
    parser.add_argument(
        "--bind",
        required=True,
        metavar=ADDRESS,
        help="address to listen at; port 0 is a free port, which is printed",
    )
    add_shares(parser)
    add_keys(parser)
    add_dashboard(parser)
    args = parser.parse(arguments)
    _pool.close_memory()
    with dashboard_of(args, "controller") as start_dashboard:
        return _run_controller(args, start_dashboard)


def _run_controller(args: argparse.Namespace, start_dashboard: StartDashboard) -> int:
    limit_lines = raise_descriptor_limit()
    controller = start_controller(args.bind, args)
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    # Python sees a signal only after the native loop; the descriptor is written immediately.
    signal.set_wakeup_fd(stop_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    shown_keys = args.keys or f"{_pool.shared_key_folder()}, which this user's processes share"
    log = PoolLog("penstock controller")
    log.say(f"listens at {controller.endpoint}, keys in {shown_keys}, process {os.getpid()}")
    for line in limit_lines:
        log.say(line)
    start_dashboard(controller.endpoint, log)
    controller.run(stop_read)
    log.say(f"ends after {signal.Signals(os.read(stop_read, 1)[0]).name}")
    return 0


def _work(arguments: Sequence[str]) -> int:
    # Imported here, as the other commands do not need it.
    from penstock.pool.job_isolation import plan_isolation
    from penstock.pool.worker_addresses import worker_addresses
    from penstock.pool.worker_spec import DRAIN_GRACE_S, PATIENCE_S, PoolWorkerSpec
    from penstock.pool.worker_supervisor import Supervisor

    parser = CommandParser(
        "worker",
        f"worker [--controller {ADDRESS}] [--processes N] [OPTION ...]",
        """\
Runs worker processes of a pool on this host, which make batches for whichever trainer the
controller gives them to. One that ends is started again, unless it was told to leave. SIGTERM or
Ctrl-C has them finish what they have begun and leave; a second one ends them at once.""",
        """\
examples:
  penstock worker --controller tcp://127.0.0.1:7000 --processes 4
  penstock worker --controller tcp://alpha:7000 --keys keys --bind tcp://10.0.0.5:7100""",
    )
    _add_pool(parser)
    parser.add_argument(
        "--processes",
        type=whole_number(1, PROCESSES_MAX),
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
        help="address that trainers are told to connect to, where that is another one than they "
        "are bound to, as behind NAT (default: the one that is bound)",
    )
    parser.add_argument(
        "--data-bind",
        metavar=ADDRESS,
        help="address of the second port of the first worker, over which the bytes of batches "
        "cross, sealed; each further worker takes the next port (default: a free port of the "
        "interface of --bind)",
    )
    parser.add_argument(
        "--data-advertise",
        metavar=ADDRESS,
        help="address that trainers are told to connect to for the bytes of batches, where that is "
        "another one than they can see (default: the host of --advertise, the port that is bound)",
    )
    parser.add_argument(
        "--patience",
        type=seconds(1),
        default=PATIENCE_S,
        metavar="SECONDS",
        help="time after which a worker that has no trainer and hears nothing of its controller "
        f"ends (default: {PATIENCE_S:g})",
    )
    parser.add_argument(
        "--grace",
        type=seconds(1),
        default=DRAIN_GRACE_S,
        metavar="SECONDS",
        help="time that a worker has to finish its batch after SIGTERM, Ctrl-C or `penstock "
        f"drain`; others make what it has not finished by then (default: {DRAIN_GRACE_S:g})",
    )
    parser.add_argument(
        "--powercap",
        metavar="DIR",
        help="folder of the powercap tree, from which the energy of this host is read; the worker "
        "ends if it cannot be (default: /sys/class/powercap, and the energy is unknown where that "
        "cannot be read)",
    )
    add_isolation(parser)
    args = parser.parse(arguments)
    if args.powercap == "":
        raise CommandError("--powercap is empty; name the folder of the powercap tree", "worker")
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
        log.tell(warning)
    plan = plan_isolation(isolation_of(args), args.keys)
    for line in plan.news:
        log.say(line)
    for line in plan.warnings:
        log.tell(line)
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
Shows the workers of a pool and the jobs that they work for. A job has the batches a second that its
trainer was given lately, and how much of that time the trainer waited for them. A job that asks for
nothing, as between epochs, is idle.""",
        """\
examples:
  penstock status --controller tcp://127.0.0.1:7000
  penstock status --json > status.json""",
    )
    add_controller(parser)
    parser.add_argument(
        "--all", action="store_true", help="show jobs that have asked for nothing for long, too"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all that the controller knows, for programs"
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
Shows the jobs of a pool with their ranks, its workers, where the time of a step goes, and what
happens, on the whole terminal. Keys are those of htop; F1 lists them. It changes nothing.""",
        """\
examples:
  penstock top --controller tcp://127.0.0.1:7000
  penstock top --once
  penstock top --once --json > pool.json""",
    )
    add_controller(parser)
    parser.add_argument("--once", action="store_true", help="print one frame as text, and end")
    parser.add_argument(
        "--json", action="store_true", help="with --once: print what is known, for programs"
    )
    parser.add_argument("--tree", action="store_true", help="begin with ranks below their jobs")
    parser.add_argument(
        "--interval",
        type=seconds(0.1),
        default=_TOP_INTERVAL_S,
        metavar="SECONDS",
        help=f"time between two looks (default: {_TOP_INTERVAL_S:g})",
    )
    parser.add_argument(
        "--no-color",
        action="store_true",
        help="use bold and reverse letters alone (default: colours, unless NO_COLOR is set)",
    )
    args = parser.parse(arguments)
    if args.json and not args.once:
        raise CommandError("--json needs --once", "top")
    # Imported here, as the other commands of a pool do not need it.
    from penstock.live.pool_view import PoolAddress, ask_pool
    from penstock.live.top_frame import frame_text
    from penstock.live.top_rows import as_json

    address = PoolAddress(controller_of(parser, args), args.keys, args.timeout)
    if args.once:
        view = ask_pool(address)
        if args.json:
            print(json.dumps(as_json(view), indent=2))
        else:
            print(frame_text(view, is_tree=args.tree))
        return 0
    # Imported here, as a Python without curses can still print a frame.
    from penstock.live.top_screen import check_terminal, run_screen

    check_terminal()
    signal.signal(signal.SIGTERM, _end_by_python)
    run_screen(
        address,
        ask_pool(address),
        interval_s=args.interval,
        with_colours=not (args.no_color or os.environ.get("NO_COLOR")),
        is_tree=args.tree,
    )
    return 0


def _end_by_python(number: int, _: object) -> NoReturn:
    """End by an exception, so that the terminal is restored."""
    sys.exit(128 + number)


def _show_costs(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "costs",
        f"costs [--controller {ADDRESS}] [--json] [OPTION ...]",
        """\
Shows what the jobs of a pool have cost, those that have ended included: hours of workers and of
CPUs, bytes, samples and energy; money and CO2 from the factors that are given. What is not known is
called unknown, and is null in the JSON.""",
        """\
examples:
  penstock costs --controller tcp://127.0.0.1:7000
  penstock costs --price-per-hour 0.04 --energy-price 0.30 --gco2-per-kwh 350""",
    )
    add_controller(parser)
    parser.add_argument("--json", action="store_true", help="print the figures for programs")
    parser.add_argument(
        "--price-per-hour",
        type=amount,
        metavar="AMOUNT",
        help="price of a worker's hour (default: that of `penstock up --price`)",
    )
    parser.add_argument(
        "--energy-price", type=amount, metavar="AMOUNT", help="price of a kWh, in the same unit"
    )
    parser.add_argument(
        "--gco2-per-kwh", type=amount, metavar="GRAMS", help="CO2 of a kWh, in grams"
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
Has a worker finish what it has begun, hand back the rest and leave its pool. It is not started
again.""",
        """\
example:
  penstock drain node7/4711 --controller tcp://127.0.0.1:7000""",
    )
    parser.add_argument(
        "worker",
        metavar="WORKER",
        help="name of the worker, HOST/PROCESS as `penstock status` shows it, or its id, or how "
        "its id begins",
    )
    add_controller(parser)
    args = parser.parse(arguments)
    where = controller_of(parser, args)
    status = PoolStatus(json.loads(_pool.pool_status(where, args.keys, args.timeout)))
    worker = status.find_worker(args.worker)
    name = f"{name_of(worker)} ({worker['id']})"
    if not _pool.drain_worker(where, args.keys, int(worker["id"], 16), args.timeout):
        raise ValueError(f"worker {name} has left the pool meanwhile")
    print(f"penstock drain: worker {name} finishes what it has begun, and leaves")
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
        help="how workers are shared out among jobs: gpu-progress gives each an even share, as far "
        "as it has use for it, and the rest to whom it helps most; max-min gives each as many as "
        "any other (default: gpu-progress)",
    )
    parser.add_argument(
        "--terms",
        metavar="FILE",
        help="JSON file of priorities and quotas of jobs and of users, by name: "
        '{"jobs": {"train.py: Images": {"priority": 2, "quota": 16}}, "users": {"ann": {"quota": '
        "32}}} (default: all are equal)",
    )


def start_controller(bind: str, args: argparse.Namespace) -> _pool.Controller:
    """Start a controller with the options of add_keys() and add_shares()."""
    terms = read_terms(args.terms) if args.terms else Terms()
    return _pool.Controller.start(bind, args.keys, args.policy, terms.jobs, terms.users)


def add_keys(parser: CommandParser) -> None:
    parser.add_argument(
        "--keys",
        metavar="DIR",
        default=os.environ.get(KEYS_VARIABLE) or None,
        help=f"folder that `penstock keys` made (default: {KEYS_VARIABLE}, else keys that this "
        f"user's processes share on this machine)",
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
            f"say where the controller is: --controller {ADDRESS}, or {POOL_VARIABLE} in the "
            f"environment",
            parser.command,
        )
    return str(args.controller)
