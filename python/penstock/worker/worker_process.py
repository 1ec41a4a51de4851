# SPDX-License-Identifier: Apache-2.0
"""Set up the process of a worker, and show the stack of a worker that does not answer.

In every worker, faulthandler writes the Python stacks of all threads to a file in memory on a
signal, which works even while native code holds the interpreter lock. The trainer sends the signal
when a timeout expires, and reads the file through /proc.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import torch

from penstock import _C
from penstock.compat.iterators import set_thread_name, set_worker_signal_handlers

_SIGNAL = signal.SIGRTMIN + 11
_FILE_NAME = "penstock-stack"
_OWN_FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_DUMP_SECONDS_MAX = 1.0
_LINES_MAX = 40
_SAMPLES_SHOWN_MAX = 200  # characters
_STATES = {
    "T": "it is stopped by a signal",
    "D": "it waits in the kernel, such as for a disk or a network file system without response",
    "Z": "it is dead",
}


def set_up_process() -> None:
    """Prepare this process for making batches: torch's signal handlers and number of threads in a
    worker, and memory that is kept for the next batch."""
    set_worker_signal_handlers()
    set_thread_name("pt_data_worker")
    _C.tune_malloc()
    _make_arrow_use_malloc()
    torch.set_num_threads(1)


def _make_arrow_use_malloc() -> None:
    """Make pyarrow allocate by malloc, unless the program has chosen one of Arrow's pools.

    Arrow's default pool returns freed pages to the system after some milliseconds, so that every
    batch read from Parquet incurs page faults for them. A pyarrow that is imported later reads the
    environment variable.
    """
    variable = "ARROW_DEFAULT_MEMORY_POOL"
    if variable in os.environ:
        return
    os.environ[variable] = "system"
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and arrow.default_memory_pool().backend_name == "mimalloc":
        arrow.set_memory_pool(arrow.system_memory_pool())


def enable_stack_dump() -> None:
    """Call once in a worker: from then on, the trainer can request its stack."""
    # The file must outlive the call; faulthandler keeps its descriptor number, but not the file.
    faulthandler.register(_SIGNAL, os.memfd_create(_FILE_NAME), all_threads=True)


def format_pending_batch(worker_id: int, pid: int | None, sequence: int, samples: str) -> str:
    """Describe the batch that a worker has not delivered, its samples if they have indices, and the
    worker's stack. Wait as `_where_it_is` does."""
    shown = samples if len(samples) <= _SAMPLES_SHOWN_MAX else samples[:_SAMPLES_SHOWN_MAX] + "..."
    what = f"batch {sequence}, samples {shown}" if shown else f"batch {sequence}"
    return f"Worker {worker_id} (pid {pid}) has not delivered {what}; {_where_it_is(pid)}".rstrip()


def _where_it_is(pid: int | None) -> str:
    """Return the stacks of a worker, most recent call first, or the reason for their absence; end
    with a newline.

    Wait for them for up to a second.
    """
    if pid is None:
        return "its stack is not available: it has no process id\n"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in _STATES:
            return _STATES[state] + "\n"
        file = _stack_file(pid)
        if file is None or not _handles_signal(pid):
            return "it does not serve yet: it is still starting or reading its dataset\n"
        return "its stack, most recent call first:\n" + _ask(pid, file)
    except OSError as error:
        return f"its stack is not available: {error}\n"


def _ask(pid: int, file: Path) -> str:
    begin = size = file.stat().st_size
    deadline = time.monotonic() + _DUMP_SECONDS_MAX
    os.kill(pid, _SIGNAL)
    while time.monotonic() < deadline:
        time.sleep(0.02)
        grown = file.stat().st_size
        if grown > begin and grown == size:
            break
        size = grown
    with file.open("rb") as stream:
        stream.seek(begin)
        lines = _without_own_frames(stream.read().decode(errors="replace").splitlines())
    if not lines:
        return "  (it did not report its stack within a second)\n"
    if len(lines) > _LINES_MAX:
        lines[_LINES_MAX:] = [f"({len(lines) - _LINES_MAX} more lines)"]
    return "".join(f"  {line}\n" for line in lines)


def _without_own_frames(lines: list[str]) -> list[str]:
    """Return the stacks down to the frame in which penstock called the dataset."""
    kept = []
    is_ours = False
    for line in lines:
        is_ours = not line.lstrip().startswith(("Thread ", "Current thread ")) and (
            is_ours or f'File "{_OWN_FOLDER}' in line
        )
        if not is_ours:
            kept.append(line)
    return kept


def _stack_file(pid: int) -> Path | None:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if _FILE_NAME in os.readlink(entry):
                return entry
        except FileNotFoundError:
            continue
    return None


def _handles_signal(pid: int) -> bool:
    """Return whether it has a handler; without one, the signal would end the process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (_SIGNAL - 1) & 1)
    return False
