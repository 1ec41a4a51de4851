# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a cable between them that carries at most a given rate."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence

TRAINER_ADDRESS, POOL_ADDRESS = "10.213.0.1", "10.213.0.2"


class NoLinkError(Exception):
    """This machine or user cannot have one; the message gives the reason."""


class ShapedLink:
    """A context manager: the namespaces are removed when it ends. Needs root, ``ip`` and ``tc``."""

    def __init__(self, rate: str) -> None:
        """``rate`` as tc reads it, such as 1gbit."""
        self._rate = rate
        self.trainer_side = f"penstock-{os.getpid()}-t"
        self.pool_side = f"penstock-{os.getpid()}-p"
        self.device = "cable"  # its end in each of the two

    def __enter__(self) -> ShapedLink:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, namespace: str) -> list[str]:
        """The prefix that runs a command in it."""
        return ["ip", "netns", "exec", namespace]

    def _make(self) -> None:
        for namespace in (self.trainer_side, self.pool_side):
            _run(["ip", "netns", "add", namespace])
        _run(["ip", "link", "add", self.device, "netns", self.trainer_side, "type", "veth",
              "peer", "name", self.device, "netns", self.pool_side])  # fmt: skip
        for namespace, address in (
            (self.trainer_side, TRAINER_ADDRESS),
            (self.pool_side, POOL_ADDRESS),
        ):
            _run(["ip", "-n", namespace, "address", "add", f"{address}/30", "dev", self.device])
            for device in ("lo", self.device):
                _run(["ip", "-n", namespace, "link", "set", device, "up"])
            _run(["tc", "-n", namespace, "qdisc", "add", "dev", self.device, "root", "tbf",
                  "rate", self._rate, "burst", "256kb", "latency", "20ms"])  # fmt: skip

    def close(self) -> None:
        for namespace in (self.trainer_side, self.pool_side):
            with contextlib.suppress(FileNotFoundError):  # without `ip` there is none to remove
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NoLinkError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoLinkError(f"`{' '.join(command)}`: {reason[-1]}")
