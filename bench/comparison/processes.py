# SPDX-License-Identifier: Apache-2.0
"""A job in the environment of a system, with a time limit, after which nothing of it is left.

Every process that a job starts inherits a mark in its environment. Daemons that leave the job's
process group, such as Ray's, are found by it. Temporary files lie in a folder that is removed.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("job.py")
MARK = "PENSTOCK_COMPARISON_JOB"
END_S_MAX = 10.0
QUIET_LOOKS = 5
_POLL_S = 0.02


@dataclass
class Outcome:
    """The answers of a job, and how it ended if it did not as it should."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    missing: str = ""  # the system has no interface for it
    error: str = ""
    has_ended: bool = False

    @property
    def is_complete(self) -> bool:
        return self.has_ended and not self.error and not self.missing

    def get(self, name: str) -> Any:
        """The last answer of this name; None if there is none."""
        found = [answer[name] for answer in self.answers if name in answer]
        return found[-1] if found else None

    def all(self, name: str) -> list[Any]:
        """All elements of the answers of this name, which are lists."""
        return [part for answer in self.answers for part in answer.get(name, ())]


class JobProcess:
    """A running job; a context manager that ends it and all that it started."""

    def __init__(
        self,
        python: Path,
        system: str,
        question: str,
        options: dict[str, Any],
        *,
        log: Path,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._mark = secrets.token_hex(16)
        self._unread = b""
        self._has_answered = False  # all, so that it may end by itself
        self._temporary = tempfile.mkdtemp(prefix="cmp-")  # short: it is part of socket names
        variables = {**(environment or {}), MARK: self._mark, "TMPDIR": self._temporary}
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [str(python), str(JOB), system, question, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"},
            cwd=log.parent,
            start_new_session=True,
        )

    def __enter__(self) -> JobProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def order(self, **order: Any) -> None:
        """Send a line to the job's standard input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # read() reports how it ended

    def read(self, deadline: float) -> dict[str, Any] | None:
        """The next answer; None after the last one. Raises TimeoutError after the deadline."""
        assert self.process.stdout is not None
        stdout = self.process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            read = os.read(stdout, 1 << 16)
            if not read:
                return None
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def outcome(self, limit_s: float) -> Outcome:
        """Read to the job's last answer."""
        outcome = Outcome()
        deadline = time.monotonic() + limit_s
        try:
            while (answer := self.read(deadline)) is not None:
                outcome.answers.append(answer)
                self._has_answered = any(name in answer for name in ("end", "missing", "error"))
                if answer.get("end"):
                    outcome.has_ended = True
                    return outcome
                if "missing" in answer or "error" in answer:
                    outcome.missing = answer.get("missing", "")
                    outcome.error = answer.get("error", "")
                    return outcome
        except TimeoutError:
            outcome.error = f"did not end within {limit_s:.0f} s"
        else:
            outcome.error = f"the trainer's process ended with exit status {self.process.wait()}"
        return outcome

    def finish(self) -> None:
        """Have a job that takes orders end by itself."""
        assert self.process.stdin is not None
        self._has_answered = True
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def close(self) -> None:
        """End every process of the job, and return when they are gone.

        A job that has given its last answer has some seconds to end by itself, so that its system
        removes its shared memory.
        """
        if self._has_answered:
            try:
                self.process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                pass
        deadline = time.monotonic() + END_S_MAX
        quiet = 0
        # A process that is being started shows no environment for a moment: look several times.
        while quiet < QUIET_LOOKS and time.monotonic() < deadline:
            pids = marked(self._mark)
            quiet = 0 if pids else quiet + 1
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.process.poll()
            time.sleep(_POLL_S)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self._log.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
        if pids:
            raise RuntimeError(f"processes {pids} of a job are left after {END_S_MAX:.0f} s")


def marked(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended, or is another user's
            if wanted in variables:
                found.append(int(entry.name))
    return found
