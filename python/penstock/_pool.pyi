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

# engines

class EngineWorker:
    def __init__(self, name: str, state: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> int: ...

class ScaleReport:
    adapter_id: int
    engine: str
    worker_count_min: int
    worker_count_max: int
    idle_ms: int
    start_allowance_ms: int
    price_micros_per_hour: int
    has_budget: bool
    budget_micros: int
    spent_worker_ms: int
    refusal_count: int
    refusal: str
    trouble: str
    workers: list[EngineWorker]
    def __init__(self) -> None: ...

class ScaleOrders:
    @property
    def wanted_count(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def is_to_end(self) -> bool: ...
    @property
    def stops(self) -> list[str]: ...

def report_scale(
    endpoint: str, key_folder: str | None, report: ScaleReport, timeout_s: float
) -> ScaleOrders: ...
def end_pool(endpoint: str, key_folder: str | None, timeout_s: float) -> bool: ...
def draw_identity() -> int: ...
