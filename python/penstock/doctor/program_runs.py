# SPDX-License-Identifier: Apache-2.0
"""Runs the program in a separate process, with everything that it starts, and ends all of them.

`RunRequest` is the request for a run, and `RunResult` its report: JSON that is sent to the process
and back.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.tuning.observation import LoaderSettings, MadeBatch, Observation

# How long a program may take to end after enough measurements, and then after each signal.
_END_S = 20.0
_TERM_S = 5.0
_LEFT_S = 1.0  # for processes that outlive the program
_SHOWN_LINES = 8
_PR_SET_PDEATHSIG = 1
ORDERS_VARIABLE = "PENSTOCK_DOCTOR"


class NotExaminable(PenstockError):
    """The program cannot be examined; the message is the reason."""

    code = "not-examinable"


class ProgramRuns:
    """Confined to the main thread."""

    def __init__(
        self, command: Sequence[str], steps: int, seconds: float, timeout_s: float
    ) -> None:
        """Prepare runs. ``command`` runs the program by the orders in its environment."""
        self._command = list(command)
        self._steps = steps
        self._seconds = seconds
        self._timeout_s = timeout_s

    def run(
        self,
        loader: int | None = None,
        overrides: Mapping[str, Any] | None = None,
        offload: bool = False,
        asks_for_plan: bool = False,
    ) -> RunResult:
        """Run the program, and block until it and all processes that it started have ended. Raises
        PenstockError if it returned no result."""
        with tempfile.TemporaryDirectory(prefix="penstock-doctor-") as folder:
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            try:
                orders = RunRequest(
                    write_fd,
                    folder,
                    self._steps,
                    self._seconds,
                    loader,
                    dict(overrides or {}),
                    offload,
                    asks_for_plan,
                )
                output = Path(folder) / "output"
                process = self._start(orders, output, write_fd)
                write_fd = _closed(write_fd)
                text, is_unfinished = b"", True
                try:
                    text, is_unfinished = self._wait(process, read_fd)
                finally:
                    _end(process, is_unfinished)
            finally:
                os.close(read_fd)
                if write_fd >= 0:
                    os.close(write_fd)
            if not text.endswith(b"\n"):
                raise NotExaminable(self._without_result(process.returncode, is_unfinished, output))
            return RunResult.of_json(text.decode())

    def _start(self, orders: RunRequest, output: Path, write_fd: int) -> subprocess.Popen[bytes]:
        with open(output, "wb") as stream:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, ORDERS_VARIABLE: orders.to_json()},
                pass_fds=(write_fd,),
                # No terminal to prompt at, and a group that can be ended as a whole.
                start_new_session=True,
            )

    def _wait(self, process: subprocess.Popen[bytes], read_fd: int) -> tuple[bytes, bool]:
        """Return the line that the program's process writes, or the part of it written before the
        process ended; and whether the timeout expired before either."""
        deadline = time.monotonic() + self._timeout_s
        text = b""
        while not text.endswith(b"\n") and time.monotonic() < deadline:
            if select.select([read_fd], [], [], 0.2)[0]:
                piece = os.read(read_fd, 1 << 16)
                if not piece:
                    return text, False
                text += piece
            elif _has_ended(process) and not select.select([read_fd], [], [], 0)[0]:
                return text, False
        return text, not text.endswith(b"\n")

    def _without_result(self, code: int, is_late: bool, output: Path) -> str:
        lines = output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        printed = "".join(f"\n  {line}" for line in lines) or " none"
        if is_late:
            how = (
                f"did not deliver enough batches within {self._timeout_s:g} s and was ended; "
                "shorten the work before its first batch, or raise --timeout"
            )
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code} before its loaders were observed"
        return f"the program {how}; its last output:{printed}"


def end_with_parent() -> None:
    """Have this process receive SIGTERM when its parent ends, for any reason. Call in the program's
    process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes], is_unfinished: bool) -> None:
    """End the program and the processes of its session, and wait for them."""
    group = process.pid
    stages = ((0, _END_S), (signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S))
    if is_unfinished:
        stages = ((signal.SIGINT, _TERM_S), *stages[1:])
    try:
        for number, wait_s in stages:
            if number == signal.SIGINT:
                _signal([group], number)
            elif number:
                _signal([*_members(group), group], number)
            if _wait_until(lambda: _has_ended(process), wait_s):
                break
        # The program has not been waited for yet, so its number is still the session's.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            if number:
                _signal(_members(group), number)
            if _wait_until(lambda: not _members(group), _LEFT_S):
                break
    except BaseException:
        _signal([*_members(group), group], signal.SIGKILL)
        raise
    finally:
        process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    return found is not None


def _members(group: int) -> set[int]:
    """Return the live processes of the session, without the first one."""
    found = set()
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == group:
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if int(fields[3]) == group and fields[0] != "Z":
            found.add(int(entry))
    return found


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _wait_until(is_over: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _closed(descriptor: int) -> int:
    os.close(descriptor)
    return -1


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The orders for a run. ``loader`` is the number of the loader that the ``overrides`` apply to,
    in the order in which the program creates its loaders; None if there are no overrides, and any
    loader is measured."""

    result_fd: int
    folder: str  # for the run's temporary files
    steps: int
    seconds: float  # the maximum duration of the measurement
    loader: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    offload: bool = False
    asks_for_plan: bool = False  # ask for the movable calls of the model instead of measuring

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_environment() -> RunRequest:
        """Remove the orders from the environment, so that programs started by this one have none,
        and return them."""
        return RunRequest(**json.loads(os.environ.pop(ORDERS_VARIABLE)))


@dataclass(frozen=True, slots=True)
class ColumnUse:
    """Columns of a loader's table, the mean bytes of a sample in each, and the columns that no code
    was seen to read."""

    names: tuple[str, ...]
    sample_bytes: tuple[float, ...]
    unread: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.unread)

    @property
    def unread_share(self) -> float:
        """The share of a sample's bytes that are of unread columns."""
        pairs = zip(self.names, self.sample_bytes, strict=True)
        unread_bytes = sum(size for name, size in pairs if name in self.unread)
        return unread_bytes / max(1e-9, sum(self.sample_bytes))

    @staticmethod
    def of_json(record: dict[str, Any]) -> ColumnUse:
        names, unread = tuple(record["names"]), tuple(record["unread"])
        return ColumnUse(names, tuple(record["sample_bytes"]), unread)


@dataclass(frozen=True, slots=True)
class ObservedLoader:
    """A loader of the program: its number, its dataset's name, its observation, and the use of its
    columns, if these are known."""

    number: int
    dataset: str
    observation: Observation
    columns: ColumnUse | None = None


@dataclass(frozen=True, slots=True)
class MovableCall:
    """One call of the model that workers could make: ``seconds`` is its duration per batch where it
    runs now, on ``device`` by that device's events, or on the CPU."""

    operator: str
    seconds: float
    device: str | None = None


@dataclass(frozen=True, slots=True)
class RunResult:
    """The report of a run. ``error`` is the text of the exception that ended the program, and
    ``error_type`` its type. ``is_stopped`` is False for a program that ended by itself."""

    loaders: tuple[ObservedLoader, ...] = ()
    error_type: str = ""
    error: str = ""
    is_stopped: bool = False
    has_asked_input: bool = False
    movable_s: float | None = None
    movable_calls: tuple[MovableCall, ...] = ()  # the longest ones
    plan_refusal: str = ""

    @property
    def busiest(self) -> ObservedLoader | None:
        """Return the loader that took most of the time."""

        def seconds(one: ObservedLoader) -> float:
            return one.observation.steps * one.observation.whole_step_s

        return max(self.loaders, key=seconds, default=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> RunResult:
        record = json.loads(text)
        record["loaders"] = tuple(
            ObservedLoader(
                one["number"],
                one["dataset"],
                _observation(one["observation"]),
                None if one["columns"] is None else ColumnUse.of_json(one["columns"]),
            )
            for one in record["loaders"]
        )
        record["movable_calls"] = tuple(MovableCall(**one) for one in record["movable_calls"])
        return RunResult(**record)


def _observation(record: dict[str, Any]) -> Observation:
    record["settings"] = LoaderSettings(**record["settings"])
    record["batches"] = tuple(MadeBatch(**one) for one in record["batches"])
    record["slow_samples"] = tuple((seconds, name) for seconds, name in record["slow_samples"])
    return Observation(**record)
