# SPDX-License-Identifier: Apache-2.0
"""Slurm's daemons for one test: a controller and nodes on this machine, in a separate folder and at
separate ports, and ended by their pids."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SECONDS_MAX = 30.0
_SBIN = "/usr/sbin:/sbin"

MISSING = [
    program
    for program in ("munged", "slurmctld", "slurmd", "sbatch")
    if shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}") is None
]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class SlurmCluster:
    """Nodes ``n0``, ``n1`` and so on with ``cpus`` CPUs each, independent of this machine, in the
    partitions ``harvest`` and ``train``. Jobs of ``train`` preempt jobs of ``harvest``, which have
    ``grace_s`` before they are ended. ``within`` is the prefix of its commands."""

    def __init__(
        self,
        folder: Path,
        node_count: int = 2,
        grace_s: int = 0,
        within: Sequence[str] = (),
        cpus: int = 2,
    ) -> None:
        self._folder = folder
        self._within = within
        folder.mkdir(parents=True, exist_ok=True)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        host = socket.gethostname().split(".")[0]
        control_port, *node_ports = free_ports(1 + node_count)
        for name in ("spool", "state", *(f"n{node}" for node in range(node_count))):
            (folder / name).mkdir(exist_ok=True)
        self._munge_socket = folder / "munge.socket"
        self._write_key(folder / "munge.key")
        nodes = "\n".join(
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} "
            f"RealMemory=1000"
            for node, port in enumerate(node_ports)
        )
        names = ",".join(f"n{node}" for node in range(node_count))
        self.conf = folder / "slurm.conf"
        self.conf.write_text(
            f"""\
ClusterName=penstock
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self._munge_socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
ReturnToService=2
SlurmdTimeout=10
SlurmdParameters=config_overrides
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
PartitionName=harvest Nodes={names} Default=YES State=UP PriorityTier=1 GraceTime={grace_s}
PartitionName=train Nodes={names} PriorityTier=10 PreemptMode=OFF State=UP
"""
        )
        self.environment = {
            "SLURM_CONF": str(self.conf),
            "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}",
        }
        try:
            self._start(
                "munged",
                ["--foreground", f"--key-file={folder}/munge.key", f"--socket={self._munge_socket}",
                 f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed",
                 f"--log-file={folder}/munged.log", "--force"],
            )  # fmt: skip
            self._wait("munged", self._munge_socket.exists)
            self._start("slurmctld", ["-D", "-f", str(self.conf)])
            for node in range(node_count):
                self._start("slurmd", ["-D", "-f", str(self.conf), "-N", f"n{node}"], f"n{node}")
            self._wait("nodes", lambda: self._idle_count() == node_count)
        except BaseException:
            self.close()
            raise

    def _idle_count(self) -> int:
        lines = self.ask("sinfo", "--noheader", "--Node", "--partition=train", "--format=%N %T")
        return sum(line.split()[1:] == ["idle"] for line in lines.splitlines())

    @staticmethod
    def _write_key(path: Path) -> None:
        path.touch(mode=0o600)
        path.write_bytes(os.urandom(128))

    def _start(self, program: str, arguments: list[str], name: str | None = None) -> None:
        with open(self._folder / f"{name or program}.out", "wb") as out:
            self._daemons[name or program] = subprocess.Popen(
                [*self._within, program, *arguments],
                env={**os.environ, **self.environment},
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )

    def _wait(self, what: str, is_so: object) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_so():  # type: ignore[operator]
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}"
                    for path in sorted(self._folder.glob("*.[lo][ou][gt]"))
                )
                raise AssertionError(f"{what} did not come up:\n{logs}")
            time.sleep(0.05)

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            [*self._within, *command],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill_node(self, name: str) -> None:
        self._daemons.pop(name).kill()

    def _end_jobs(self) -> None:
        """End the jobs: a node's daemon that ends with a running job waits for it for 10 s."""
        deadline = time.monotonic() + 5
        while self.ask("squeue", "--noheader").strip() and time.monotonic() < deadline:
            self.ask("scancel", f"--user={os.getuid()}")
            self.ask("scancel", f"--user={os.getuid()}", "--signal=KILL", "--full")
            time.sleep(0.1)

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self._end_jobs()
        for daemon in reversed([*self._daemons.values()]):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
