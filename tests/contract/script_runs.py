# SPDX-License-Identifier: Apache-2.0
"""Whole programs as a user would write them, each run in a separate interpreter.

Each is written for torch; for penstock only the import line changes. A run has a folder for its
temporary files, a deadline, and ends with all of its processes gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import process_traces

TORCH_IMPORT = "from torch.utils.data import DataLoader"
IMPORTS = {"torch": TORCH_IMPORT, "penstock": "from penstock import DataLoader"}
# The time limit of a program from its start to its end. One whose workers are fresh interpreters
# has taken 26 s when other tests ran.
SCRIPT_SECONDS_MAX = 150.0
# The programs have no main guard, which every start method except fork needs; "force", since a
# spawned worker imports its program too.
BY_FORK = "import multiprocessing; multiprocessing.set_start_method('fork', force=True)\n"
# Torch's workers look for their trainer every 5 s. Penstock's are notified by the kernel, and are
# gone in 2 s if their processors are not busy with other work.
ORPHAN_SECONDS_MAX = 15.0


class ScriptRun:
    """A running program. Confined to the test that started it."""

    def __init__(self, process: subprocess.Popen[str], temporary_folder: Path) -> None:
        self.process = process
        self.temporary_folder = temporary_folder
        self.deadline = time.monotonic() + SCRIPT_SECONDS_MAX

    def read_line(self) -> str:
        """The next line it prints. Fails if none arrives in time."""
        assert self.process.stdout is not None
        line = ""
        while not line.endswith("\n"):
            left = max(0.0, self.deadline - time.monotonic())
            readable, _, _ = select.select([self.process.stdout], [], [], left)
            assert readable, f"nothing more was printed; so far {line!r}; {self._where_it_is()}"
            character = os.read(self.process.stdout.fileno(), 1).decode()
            assert character, f"the program ended: {self.finish()}"
            line += character
        return line.strip()

    def _where_it_is(self) -> str:
        """The stacks of a program that has taken too long; ends it with its workers."""
        self.signal_group(signal.SIGABRT)
        return self.process.communicate(timeout=10)[1]

    def read_pids(self) -> list[int]:
        """A line of process ids, as the programs print the ids of their workers."""
        return [int(word) for word in self.read_line().split()]

    def write_line(self, line: str) -> None:
        """Lets a program continue that reads its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """As the terminal does for Ctrl-C: to the trainer and its workers together."""
        os.killpg(self.process.pid, number)

    def finish(self) -> tuple[int, str, str]:
        """Waits for its end: exit code, standard output, and standard error."""
        out, error = self.process.communicate(timeout=max(1.0, self.deadline - time.monotonic()))
        return (self.process.returncode, out, error)

    def left_files(self) -> list[str]:
        return process_traces.files_below(self.temporary_folder)


@contextmanager
def running(loader_name: str, source: str, folder: Path) -> Iterator[ScriptRun]:
    """Runs a program that imports torch's DataLoader, with the import of `loader_name` instead."""
    source = textwrap.dedent(source)
    assert source.count(TORCH_IMPORT) == 1
    script = folder / "program.py"
    script.write_text(BY_FORK + source.replace(TORCH_IMPORT, IMPORTS[loader_name]))
    temporary_folder = folder / "tmp"
    temporary_folder.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(temporary_folder),
        "XDG_RUNTIME_DIR": str(temporary_folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield ScriptRun(process, temporary_folder)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
