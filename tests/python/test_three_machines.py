# SPDX-License-Identifier: Apache-2.0
"""The section "Three machines" of docs/how-to/pools.md, with its commands.

Network namespaces act as the machines.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pool_processes import Process

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "docs" / "how-to" / "pools.md"
PROCESSES = 2  # instead of README's 16, for which beta has CPUs
SECONDS_MAX = 90.0
LISTENS = "0A"  # the state of a socket, as /proc/net/tcp has it

TRAIN = """\
import os

import torch
from penstock import DataLoader


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.rand(8)
        return x, x.sum() + index % 3


torch.manual_seed(3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
pool = os.environ.get("PENSTOCK_POOL")
options = {"timeout": 60, "pool": pool} if pool else {"seeding": "batch"}
loader = DataLoader(Points(), batch_size=8, shuffle=True, **options)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x).squeeze(1), y)
        loss.backward()
        optimizer.step()
print(loader.stats().iterator, loss.item().hex())
"""


@dataclass
class Machine:
    """A network namespace on a bridge, and a folder for its user."""

    name: str
    address: str
    namespace: str
    home: Path
    processes: list[Process] = field(default_factory=list)

    def wrapped(self, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def start(self, arguments: list[str], environment: dict[str, str]) -> Process:
        process = Process(
            arguments,
            environment,
            within=self.wrapped([]),
            folder=self.home,
        )
        self.processes.append(process)
        return process

    def listening(self) -> set[str]:
        """Addresses, without their ports, of the listeners in this namespace."""
        found = set()
        for table in ("tcp", "tcp6"):
            text = run(self.wrapped(["cat", f"/proc/net/{table}"]))
            for line in text.splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == LISTENS:
                    found.add(spoken(local.partition(":")[0]))
        return found


def spoken(digits: str) -> str:
    """An address of /proc/net/tcp: bytes of an IPv4 address, the last one first."""
    if len(digits) != 8:
        return digits
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(digits)))


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def page_commands() -> list[tuple[str, str]]:
    """Machine and command, in README's order."""
    text = README.read_text(encoding="utf-8").partition("**Three machines.**")[2]
    block = re.search(r"```console\n(.*?)```", text, re.DOTALL)
    assert block is not None
    found = re.findall(r"^(alpha|beta|gamma)\$ +(.+)$", block[1], re.MULTILINE)
    assert len(found) == 6, found
    return found


def test_page_has_six_commands() -> None:
    assert [name for name, _ in page_commands()] == ["alpha"] * 4 + ["beta", "gamma"]


@contextlib.contextmanager
def machines_of(folder: Path) -> Iterator[dict[str, Machine]]:
    """Three namespaces and a bridge, whose names belong to this process."""
    mark = f"{os.getpid():x}"
    machines = {}
    hosts = "127.0.0.1 localhost\n"
    for number, name in enumerate(("alpha", "beta", "gamma")):
        home = folder / name
        home.mkdir()
        address = f"10.83.7.{number + 1}"
        hosts += f"{address} {name}\n"
        machines[name] = Machine(name, address, f"pk{name}{mark}", home)
    switch = f"pkswitch{mark}"
    with contextlib.ExitStack() as undo:
        # In a separate namespace the bridge is not subject to the host's rules.
        run(["ip", "netns", "add", switch])
        undo.callback(run, ["ip", "netns", "del", switch])
        run(["ip", "-n", switch, "link", "add", "bridge0", "type", "bridge"])
        run(["ip", "-n", switch, "link", "set", "bridge0", "up"])
        for machine in machines.values():
            run(["ip", "netns", "add", machine.namespace])
            undo.callback(run, ["ip", "netns", "del", machine.namespace])
            # The file that `ip netns exec` puts in place of /etc/hosts.
            etc = Path("/etc/netns") / machine.namespace
            undo.callback(remove_folder, etc)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(hosts)
            inside = ["ip", "-n", machine.namespace]
            link = f"to{machine.name}"
            run(
                [*inside, "link", "add", "eth0", "type", "veth"]
                + ["peer", "name", link, "netns", switch]
            )
            run(["ip", "-n", switch, "link", "set", link, "master", "bridge0", "up"])
            run([*inside, "address", "add", f"{machine.address}/24", "dev", "eth0"])
            run([*inside, "link", "set", "eth0", "up"])
            run([*inside, "link", "set", "lo", "up"])
        try:
            yield machines
        finally:
            for machine in machines.values():
                for process in machine.processes:
                    process.end()
                    assert process.process.stdout is not None
                    process.process.stdout.close()


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it may hold others' namespaces
        folder.parent.rmdir()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (Debian's iproute2)")
    trial = f"pktrial{os.getpid():x}"
    tried = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()}")
    run(["ip", "netns", "del", trial])
    with machines_of(tmp_path) as made:
        yield made


def environment_of(machine: Machine, settings: list[str]) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PENSTOCK_") and name != "XDG_RUNTIME_DIR"
    }
    environment["HOME"] = str(machine.home)
    environment.update(setting.split("=", 1) for setting in settings)
    return environment


def copy_as_scp(words: list[str], machines: dict[str, Machine]) -> None:
    """``scp FILES... HOST:FOLDER/`` from alpha, into a folder that only its user can enter."""
    *patterns, target = words
    name, _, folder = target.partition(":")
    there = machines[name].home / folder
    there.mkdir(mode=0o700, exist_ok=True)
    for pattern in patterns:
        found = list(machines["alpha"].home.glob(pattern))
        assert found, f"{pattern} names no file"
        for path in found:
            copied = there / path.name
            shutil.copyfile(path, copied)
            copied.chmod(0o600)


@pytest.mark.long
def test_commands_of_page_train_on_three_machines(machines: dict[str, Machine]) -> None:
    (machines["gamma"].home / "train.py").write_text(TRAIN)
    trained = ""
    for name, command in page_commands():
        machine = machines[name]
        words = shlex.split(command)
        settings = []
        while "=" in words[0]:
            settings.append(words.pop(0))
        program, *arguments = words
        if program == "scp":
            copy_as_scp(arguments, machines)
            continue
        assert program == "penstock", command
        if "--processes" in arguments:
            arguments[arguments.index("--processes") + 1] = str(PROCESSES)
        process = machine.start(arguments, environment_of(machine, settings))
        if arguments[0] == "controller":
            process.wait_for_lines(lambda line: "listens at tcp://" in line)
        elif arguments[0] == "worker":
            process.wait_for_lines(lambda line: "listens at tcp://" in line, PROCESSES)
        else:
            assert process.wait() == 0, process.output
            trained = process.output.splitlines()[-1]
    assert machines["alpha"].listening() == {machines["alpha"].address}
    assert machines["beta"].listening() == {machines["beta"].address}
    assert machines["gamma"].listening() == set()
    secrets = {
        name: sorted(path.stem for path in (machine.home / "keys").glob("*.secret"))
        for name, machine in machines.items()
    }
    assert (secrets["beta"], secrets["gamma"]) == (["worker"], ["trainer"])
    gamma = machines["gamma"]
    alone = gamma.start(["run", "train.py"], environment_of(gamma, []))
    assert alone.wait() == 0, alone.output
    kind, loss = trained.split()
    assert kind == "pool", trained
    assert alone.output.splitlines()[-1].split()[1] == loss
