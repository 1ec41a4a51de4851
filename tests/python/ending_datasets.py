# SPDX-License-Identifier: Apache-2.0
"""Datasets and related objects that end a process in every possible way: for pool tests, which send
them to workers."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

EXITS = {
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "BaseException": BaseException,
}


class Numbers(Dataset[int]):
    def __init__(self, count: int = 6) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index


class ExitingSample(Numbers):
    """Raises at sample 3."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise EXITS[self.how](7)
        return index


class UnpickledBatch(Numbers):
    """Batch 3 exits while it is pickled."""

    def __getitem__(self, index: int) -> Any:
        return ExitsWhenPickled() if index == 3 else index


class ExitsWhenPickled:
    def __reduce__(self) -> Any:
        sys.exit("while it was pickled")


class ExitsWhenUnpickled:
    """Can be pickled, and exits when it is unpickled."""

    def __reduce__(self) -> Any:
        return sys.exit, ("while it was unpickled",)


class ExitingIndices:
    """A sampler whose index 3 cannot be unpickled."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return iter([0, 1, 2, ExitsWhenUnpickled(), 4, 5])


class ExitingStream(IterableDataset[int]):
    """Exits at its fourth number."""

    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        sys.exit()


class HoldsAnExit(Numbers):
    """Exits while it is unpickled."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = ExitsWhenUnpickled()


class OpensManyFiles(Numbers):
    """Opens more files while it is unpickled than a low limit allows."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        opened: list[int] = []
        try:
            while len(opened) < 512:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        finally:
            for descriptor in opened:
                os.close(descriptor)


def exiting_collate(samples: list[Any]) -> Any:
    if 3 in samples:
        sys.exit("in collate_fn")
    return samples


def exiting_init(_: int) -> None:
    sys.exit("in worker_init_fn")


class Ending(Numbers):
    """Ends its process at sample 3; with a folder for its marker file, only the first time."""

    def __init__(self, code: int, once: Path | None = None) -> None:
        super().__init__()
        self.code = code
        self.once = None if once is None else str(once / "ended")

    def __getitem__(self, index: int) -> Any:
        if index == 3 and (self.once is None or not os.path.exists(self.once)):
            if self.once is not None:
                Path(self.once).touch()
            os._exit(self.code)
        return index


class EndingWithItsSupervisor(Numbers):
    """Ends all processes that could start another worker or report how this process ended."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            time.sleep(2)  # by then the trainer knows which batch the worker makes
            server = _parent_of(os.getppid())
            os.kill(_parent_of(server), signal.SIGKILL)
            os.kill(server, signal.SIGKILL)
            os._exit(0)
        return index


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class LeavingAChild(Numbers):
    """Ends its process once, and leaves a forked child with all its open descriptors."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def __getitem__(self, index: int) -> Any:
        left = Path(self.folder, "child")
        if index == 3 and not left.exists():
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                while True:
                    signal.pause()
            left.write_text(str(child))
            os._exit(0)
        return index


class StartingADaemon(Numbers):
    """Starts a process that leaves its session and its parent, like a daemon, and that only SIGKILL
    ends; writes its process id into the file "daemon" of the folder. Blocks at sample 3 until the
    file "go" exists."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            start_daemon(Path(self.folder, "daemon"))
        while index == 3 and not Path(self.folder, "go").exists():
            time.sleep(0.01)
        return index


def start_daemon(noted: Path) -> None:
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            part = noted.with_suffix(".part")
            part.write_text(str(os.getpid()))
            part.rename(noted)
            while True:
                time.sleep(1000)
        os._exit(0)
    os.waitpid(middle, 0)
    while not noted.exists():
        time.sleep(0.01)


class ForkingSample(Numbers):
    """Forks a child that exits as programs do; returns the child's exit code."""

    def __getitem__(self, index: int) -> Any:
        child = os.fork()
        if child == 0:
            sys.exit(40 + index)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)


class Leaky(Numbers):
    """Leaves files open until the limit is reached."""

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            while True:
                os.open(os.devnull, os.O_RDONLY)
        return index


class Opening(Numbers):
    """Opens as many files as a low limit allows, and closes them."""

    def __getitem__(self, index: int) -> Any:
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
        for descriptor in opened:
            os.close(descriptor)
        return index


class InheritedSockets(Numbers):
    """Returns the number of this process's sockets that a program started by it inherits."""

    def __getitem__(self, index: int) -> Any:
        listing = "import os; print([os.readlink(f'/proc/self/fd/{fd}') for fd in range(3, 64) "
        listing += "if os.path.exists(f'/proc/self/fd/{fd}')])"
        done = subprocess.run(
            [sys.executable, "-c", listing], close_fds=False, capture_output=True, check=True
        )
        own = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in range(3, 64)
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        sockets = [name for name in own if name.startswith("socket:")]
        assert sockets
        return sum(name.encode() in done.stdout for name in sockets)


class Hanging(Numbers):
    """Hangs in sample 3 until the file "go" exists in the folder: ``how`` is "sleep" for Python
    that releases the interpreter, or "call" for a C call that holds the interpreter's lock."""

    def __init__(self, how: str, folder: Path) -> None:
        super().__init__()
        self.how = how
        self.folder = str(folder)

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            Path(self.folder, "hangs").touch()
            while not Path(self.folder, "go").exists():
                if self.how == "call":
                    ctypes.PyDLL(None).pause()
                time.sleep(0.01)
        return index


class DeafToSigterm(Numbers):
    """Makes its process ignore the signals that end it, and blocks at sample 3 until the file "go"
    exists."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            Path(self.folder, "hangs").touch()
            while not Path(self.folder, "go").exists():
                time.sleep(0.01)
        return index


class HangingExit(Numbers):
    """Makes the interpreter hang at exit."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        atexit.register(_hang)


def _hang() -> None:
    while True:
        signal.pause()
