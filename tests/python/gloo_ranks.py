# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job as separate processes, for tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pool_processes import SECONDS_MAX
from warm_programs import WarmProgram


class GlooRanks:
    """``world_size`` runs of a program with the environment that torchrun would set."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        world_size: int,
        given: dict[str, Any],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = folder
        self.ranks = [
            WarmProgram(
                [program, folder, json.dumps(given)],
                {
                    **environment,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONFAULTHANDLER": "1",
                },
            )
            for rank in range(world_size)
        ]

    def lines(self, rank: int) -> list[Any]:
        """Return the rank's output so far, one JSON value per line."""
        try:
            text = (self.folder / f"rank-{rank}").read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def finish(self, rank: int, seconds_max: float = SECONDS_MAX) -> tuple[int, str]:
        """Return the exit code of the rank, and its standard error.

        If the rank is late, ends all ranks, and raises an error with each rank's position.
        """
        try:
            _, text = self.ranks[rank].communicate(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} is late.{self._places()}") from None
        return self.ranks[rank].returncode, text

    def finish_all(self) -> None:
        """Wait for all ranks, which have to succeed. None is left running."""
        try:
            for rank in range(len(self.ranks)):
                code, text = self.finish(rank)
                assert code == 0, text
        finally:
            self.kill()

    def _places(self) -> str:
        """Return the number of lines of each rank, and the stacks of the ranks that still run."""
        late = [process for process in self.ranks if process.poll() is None]
        for process in late:
            process.send_signal(signal.SIGABRT)  # on which a fault handler writes the stacks
        text = ""
        for rank, process in enumerate(self.ranks):
            stacks = process.communicate(timeout=SECONDS_MAX)[1] if process in late else "ended"
            text += f"\n\nRank {rank}, {len(self.lines(rank))} lines: {stacks}"
        return text

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate()
