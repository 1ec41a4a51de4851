# SPDX-License-Identifier: Apache-2.0
"""Programs in separate processes: alone, or as the ranks of one training on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

SECONDS_MAX = 100.0
PYTHON = [sys.executable]
PENSTOCK_RUN = [sys.executable, "-m", "penstock", "run"]


def run_program(command: list[str], source: str, folder: Path, *arguments: str) -> str:
    """The output of a program."""
    return _run([_start([*command, _write(source, folder), *arguments], folder, {})])[0]


def run_ranks(source: str, folder: Path, count: int = 2) -> list[str]:
    """The output of each rank of a training. They meet on the loopback interface over gloo."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = _write(source, folder)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return _run(
        [
            _start(
                [*PYTHON, program],
                folder,
                {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"},
            )
            for rank in range(count)
        ]
    )


def _write(source: str, folder: Path) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def _start(command: list[str], folder: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "ignore",
        "PENSTOCK_FALLBACK": "error",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **variables,
    }
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def _run(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Waits for all; when one fails or hangs, kills the others with their workers."""
    deadline = time.monotonic() + SECONDS_MAX
    try:
        ends = [process.communicate(timeout=deadline - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process, (_, error) in zip(processes, ends, strict=True):
        assert process.returncode == 0, error
    return [out for out, _ in ends]
