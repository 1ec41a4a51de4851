# SPDX-License-Identifier: Apache-2.0
"""The native part of penstock that needs no torch, as Python sees it. Compared with the module by a
test."""

from collections.abc import Mapping
from typing import Literal

# transport

def zmq_version() -> str: ...
def make_key_folder(folder: str) -> None: ...
def shared_key_folder() -> str: ...

# controller

class Controller:
    @staticmethod
    def start(
        endpoint: str,
        key_folder: str | None,
        policy: Literal["gpu-progress", "max-min"] = "gpu-progress",
        terms: Mapping[str, tuple[float, int | None]] = {},
    ) -> Controller: ...
    @property
    def endpoint(self) -> str: ...
    def run(self, stop_fd: int) -> None: ...

def pool_status(endpoint: str, key_folder: str | None, timeout_s: float) -> str: ...
def drain_worker(
    endpoint: str, key_folder: str | None, worker_id: int, timeout_s: float
) -> bool: ...
