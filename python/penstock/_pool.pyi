# SPDX-License-Identifier: Apache-2.0
"""The Python interface of penstock's native part that does not need torch. A test compares it with
the module."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

# transport

def zmq_version() -> str: ...
def make_key_folder(folder: str) -> None: ...
def make_user_keys(folder: str, user: str, user_folder: str) -> None: ...
def make_machine_keys(folder: str, machine: str, machine_folder: str) -> None: ...
def rotate_keys(folder: str) -> None: ...
def finish_rotation(folder: str) -> None: ...
def warning_of_workers_keys(folder: str) -> str:
    """Return a warning about secrets of other roles in a worker's folder; "" without any."""

def shared_key_folder() -> str: ...

# The least number of files that a serving process should be able to have open.
DESCRIPTOR_LIMIT_LEAST: int

def raise_descriptor_limit() -> list[str]:
    """Raise this process's soft limit of open files to its hard limit, to at most 2**20.

    Return lines for the log: that the limit has changed, and that it is still too low. Call it only
    in penstock's server processes; a training program keeps the limit that it was given.
    """

def close_memory() -> None:
    """Let only root read or trace this process from now on; it leaves no core dump."""

# controller

class Controller:
    @staticmethod
    def start(
        endpoint: str,
        key_folder: str | None,
        policy: Literal["gpu-progress", "max-min"] = "gpu-progress",
        terms: Mapping[str, tuple[float, int | None]] = {},
        user_terms: Mapping[str, tuple[float, int | None]] = {},
        keep_bytes: int = 0,
    ) -> Controller: ...
    @property
    def endpoint(self) -> str: ...
    def run(self, stop_fd: int, log: Callable[[str, bool], object] | None = None) -> None:
        """Serve until ``stop_fd`` is readable. Call ``log`` with a line for each worker and trainer
        that joins or leaves, and whether it has left without announcing it."""

def pool_status(endpoint: str, key_folder: str | None, timeout_s: float) -> str: ...
def pool_plan(endpoint: str, key_folder: str | None, trainer_id: int, timeout_s: float) -> str: ...
def pool_costs(
    endpoint: str,
    key_folder: str | None,
    timeout_s: float,
    *,
    price_per_hour: float | None = None,
    energy_price_per_kwh: float | None = None,
    gco2_per_kwh: float | None = None,
) -> str: ...
def drain_worker(
    endpoint: str, key_folder: str | None, worker_id: int, timeout_s: float
) -> bool: ...

# how workers end

_ExitWord = Literal["serving", "drained", "useless", "failed"]

def write_exit_line(fd: int, word: _ExitWord, text: str = "") -> None: ...

class ExitPipe:
    @staticmethod
    def open() -> ExitPipe: ...
    @property
    def read_fd(self) -> int: ...
    @property
    def write_fd(self) -> int: ...
    def close_write(self) -> None: ...
    def read(self) -> bool: ...
    @property
    def has_served(self) -> bool: ...
    @property
    def left(self) -> set[int]: ...
    @property
    def end(self) -> Literal["drained", "useless", "failed"] | None: ...
    @property
    def text(self) -> str: ...

# isolation of jobs

def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 without Landlock."""

class JobSeparation:
    """Restrictions of a job process; csrc/base/job_separation.h describes each of them."""

    def __init__(
        self,
        *,
        hiding: Literal["mounts", "rules", ""] = "",
        hidden: Sequence[str] = (),
        private_tmp: str = "",
        kept: Sequence[str] = (),
        are_writes_bounded: bool = False,
        writable: Sequence[str] = (),
        no_network: Literal["namespace", "filter", ""] = "",
        has_loopback: bool = False,
        uid: int | None = None,
        data_bytes: int | None = None,
        descriptor_count: int | None = None,
        process_count: int | None = None,
    ) -> None: ...
    def separate(self) -> None:
        """Separate this process, which has one thread, permanently. Raise UnsupportedError."""
    def refusal(self, needed: Sequence[str] = ()) -> str:
        """Return why it is impossible here, or with the folders ``needed``; "" if possible."""

_Hiding = Literal["mounts", "rules", ""]

def choose_key_hiding(
    folder: str,
    *,
    needed: Sequence[str],
    is_demanded: bool,
    way_to_demand: str,
    refusal: Callable[[_Hiding], str],
) -> tuple[_Hiding, str, str]:
    """Choose how keys are hidden from jobs. Return the method, a notice of its cost for jobs, and
    the reason if keys are not hidden."""

class StrayProcesses:
    def __init__(self) -> None:
        """Make this process the parent of descendants whose own parents have ended."""
    def end_all_but(self, own: Sequence[int], timeout_s: float) -> bool:
        """Kill and await all children except ``own``. Return False if some are still alive."""

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

# records of visits

VISIT_HASHED_KEYS: int
VISIT_MAY_REPEAT: int
VISIT_HAS_NO_PLACE: int
VISIT_SAME_PROCESS: int
VISIT_IN_ORDER: int

def visit_file_name(rank: int, world_size: int) -> str: ...

class VisitSession:
    def __init__(
        self,
        *,
        time_ns: int,
        loader: str,
        dataset: str,
        sampler: str,
        job: str,
        dataset_size: int,
        samples_per_epoch: int,
        flags: int,
    ) -> None: ...

class VisitRecorder:
    def __init__(self, path: str, rank: int, world_size: int, session: VisitSession) -> None: ...
    def set_order(self, order: object) -> None:
        """Keep a contiguous buffer of 64-bit integers, of which `append_order` records parts."""

    def append_order(self, epoch: int, step: int, first: int, count: int) -> None: ...
    def append(self, epoch: int, step: int, indices: list[Any], flags: int = 0) -> bool:
        """Record a batch, unless an item of the list is not an int of 64 bits. Return whether it
        was recorded."""

    def append_run(self, epoch: int, step: int, first: int, count: int) -> None: ...
    def append_unknown(self, epoch: int, step: int, count: int) -> None: ...
    def end_epoch(self, epoch: int, steps: int) -> None: ...
    def append_session(self, session: VisitSession) -> None: ...
    def close(self) -> None: ...
    @property
    def repair(self) -> str: ...
    @property
    def last_epoch(self) -> int: ...
    @property
    def has_last_ended(self) -> bool: ...
    @property
    def bytes(self) -> int: ...

class VisitFolder:
    @staticmethod
    def open(folder: str) -> VisitFolder: ...
    def roots(self) -> list[dict[str, Any]]: ...
    def audit(self) -> dict[str, Any]: ...
    @staticmethod
    def compare(a: VisitFolder, b: VisitFolder) -> dict[str, Any]: ...
