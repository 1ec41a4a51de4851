# SPDX-License-Identifier: Apache-2.0
"""Trainers as separate processes, which can be killed, and the batches that they delivered."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import pool_datasets
from streams import Delivery, Stream
from training import TIMEOUT_S, Plan

PROGRAM = Path(__file__).with_name("training.py")
MODULES = Path(pool_datasets.__file__).parent
# A trainer without a batch for this long hangs: its loader should have raised before.
HANG_S = TIMEOUT_S + 20.0


class Trainer:
    """Runs until its stream is over, or it is killed."""

    def __init__(
        self,
        stream: Stream,
        options: Mapping[str, Any],
        folder: Path,
        environment: Mapping[str, str],
        *,
        within: Sequence[str] = (),
        is_resumed: bool = False,
    ) -> None:
        """``folder`` has the saved state; a process that resumes is given the same one."""
        folder.mkdir(exist_ok=True)
        plan_path = folder / "plan"
        Plan(asdict(stream), dict(options), str(folder / "state"), is_resumed=is_resumed).write(
            plan_path
        )
        paths = [str(MODULES), os.environ.get("PYTHONPATH", "")]
        self._log_path = folder / "said"
        with self._log_path.open("wb") as said:
            self.process = subprocess.Popen(
                [*within, sys.executable, str(PROGRAM), str(plan_path)],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        self.deliveries: list[Delivery] = []
        self.first_place: int | None = None
        self.is_complete = False
        self.began_at = time.monotonic()  # until it has a loader: since when it runs
        self.ended_at: float | None = None
        self._condition = threading.Condition()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            what, *words = line.split()
            with self._condition:
                if what == "begins":
                    self.first_place = int(words[0])
                    self.began_at = time.monotonic()
                elif what == "batch":
                    self.deliveries.append(Delivery(int(words[0]), float(words[1]), words[2]))
                elif what == "ends":
                    self.is_complete = True
                self._condition.notify_all()
        with self._condition:
            self.ended_at = time.monotonic()
            self._condition.notify_all()

    @property
    def said(self) -> str:
        """Warnings, and the error with which it ended."""
        return self._log_path.read_text(errors="replace")

    @property
    def digests(self) -> list[str]:
        return [one.digest for one in self.deliveries]

    @property
    def is_over(self) -> bool:
        return self.is_complete or self.ended_at is not None

    def runs_for(self, seconds: float) -> bool:
        """Waits this long; returns False as soon as the stream is over."""
        with self._condition:
            return not self._condition.wait_for(lambda: self.is_over, seconds)

    def wait_for_batches(self, count: int) -> bool:
        """Waits for this many more; returns False when that number will not be reached."""
        with self._condition:
            wanted = len(self.deliveries) + count
            has_come = self._condition.wait_for(
                lambda: self.is_over or len(self.deliveries) >= wanted, HANG_S
            )
            return has_come and not self.is_over

    def finish(self) -> int | None:
        """Waits for its end; returns its exit code, None if it hung and was killed."""
        with self._condition:
            while self.ended_at is None:
                count = len(self.deliveries)
                if not self._condition.wait_for(
                    lambda count=count: self.ended_at is not None or len(self.deliveries) > count,
                    HANG_S,
                ):
                    break
        if self.ended_at is None:
            self.kill()
            return None
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(HANG_S)

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
