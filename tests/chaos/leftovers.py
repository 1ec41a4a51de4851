# SPDX-License-Identifier: Apache-2.0
"""The leftovers of a scenario: processes, and files in shared memory, in its runtime folder and
among the temporary ones.

Its processes are recognised by their environment, which names the scenario's folder, or, where only
root can read it, by such a folder among their arguments.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import process_traces

CODE_FOLDER = re.compile(r"penstock-code-\d+-(\d+)-")
ENDING_SECONDS_MAX = 10.0  # that exiting processes may take on a busy machine


def processes_of(runtime_folder: Path, temporary_folder: Path) -> list[int]:
    """Every process that has the first in its environment, or the second among its visible
    arguments, except this one."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]
    return [
        pid
        for pid in pids
        if pid != os.getpid()
        and _names_one_of(pid, runtime_folder, temporary_folder)
        and process_traces.is_running(pid)
    ]


def _names_one_of(pid: int, runtime_folder: Path, temporary_folder: Path) -> bool:
    marker = f"XDG_RUNTIME_DIR={runtime_folder}".encode()
    try:
        try:
            return marker in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except PermissionError:  # the server of a worker has keys
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            return f"{temporary_folder}{os.sep}".encode() in arguments
    except OSError:
        return False  # it has ended, or is another user's


def left_behind(
    runtime_folder: Path, temporary_folder: Path, killed: set[int], shared_before: set[str]
) -> list[str]:
    """Waits until exiting processes are gone; names the ones that are still there.

    The files of a killed process are removed by the next one of its kind.
    """
    running = processes_of(runtime_folder, temporary_folder)
    process_traces.wait_gone(running, ENDING_SECONDS_MAX)
    left = [
        f"process {pid} ({process_traces.name_of(pid)})"
        for pid in processes_of(runtime_folder, temporary_folder)
    ]
    new_files = set(os.listdir(process_traces.SHARED_MEMORY)) - shared_before
    left += [f"/dev/shm/{name}" for name in process_traces.unused_files(new_files)]
    files = (path for path in runtime_folder.rglob("*") if path.is_file() or path.is_socket())
    left += [str(path) for path in files if path.suffix not in (".secret", ".public")]
    for path in temporary_folder.glob("*penstock*"):
        maker = CODE_FOLDER.match(path.name)
        if maker is None or int(maker[1]) not in killed:
            left.append(str(path))
    return left
