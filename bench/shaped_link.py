# SPDX-License-Identifier: Apache-2.0
"""Network namespaces as machines: two with a cable between them that carries at most a given rate,
or several on one switch, each with such a cable."""

from __future__ import annotations

import contextlib
import json
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
        return inside(namespace)

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


class ShapedSwitch:
    """A context manager like :class:`ShapedLink`, for a pool and several trainers on a switch."""

    def __init__(self, rate: str, trainer_count: int) -> None:
        self._rate = rate
        self._switch = f"penstock-{os.getpid()}-s"
        self.device = "cable"
        self.addresses = {  # by namespace
            f"penstock-{os.getpid()}-{number}": f"10.214.0.{number + 1}"
            for number in range(trainer_count + 1)
        }
        *self.trainer_sides, self.pool_side = self.addresses

    def __enter__(self) -> ShapedSwitch:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        _run(["ip", "netns", "add", self._switch])
        _run(["ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge"])
        _run(["ip", "-n", self._switch, "link", "set", "bridge", "up"])
        for number, (namespace, address) in enumerate(self.addresses.items()):
            port = f"port{number}"
            _run(["ip", "netns", "add", namespace])
            _run(["ip", "link", "add", self.device, "netns", namespace, "type", "veth",
                  "peer", "name", port, "netns", self._switch])  # fmt: skip
            _run(["ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up"])
            _run(["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", self.device])
            for device in ("lo", self.device):
                _run(["ip", "-n", namespace, "link", "set", device, "up"])
            for place, device in ((namespace, self.device), (self._switch, port)):
                _run(["tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf",
                      "rate", self._rate, "burst", "256kb", "latency", "20ms"])  # fmt: skip

    def close(self) -> None:
        for namespace in (*self.addresses, self._switch):
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def inside(namespace: str) -> list[str]:
    """The prefix that runs a command in a namespace."""
    return ["ip", "netns", "exec", namespace]


def received_bytes(namespace: str, device: str) -> int:
    """The bytes that a namespace has received through a device, with all headers."""
    command = ["ip", "-n", namespace, "-j", "-s", "link", "show", device]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count: int = json.loads(done.stdout)[0]["stats64"]["rx"]["bytes"]
    return count


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NoLinkError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoLinkError(f"`{' '.join(command)}`: {reason[-1]}")
