# SPDX-License-Identifier: Apache-2.0
"""Interface of the native part, which needs no torch. A test compares it with the module."""

CPU_POLICIES: list[str]
# The policy constants of a pool: a fraction of an even share, and seconds.
POOL_FLOOR_SHARE: float
POOL_MOVE_COST_S: float
POOL_HORIZON_S: float

class JobTable:
    @staticmethod
    def parse(
        file: str,
        text: str,
        *,
        vc: str,
        duration_min_s: float,
        gpus_max: int,
        job_skip_count: int,
        job_count_max: int,
    ) -> JobTable: ...
    @staticmethod
    def synthetic(*, job_count: int, gpu_count: int, load: float, seed: int) -> JobTable: ...
    def __len__(self) -> int: ...

class ProfileTable:
    @staticmethod
    def parse(file: str, text: str) -> ProfileTable: ...
    def __len__(self) -> int: ...

class SimulationReport:
    @property
    def completion_mean_s(self) -> float: ...
    @property
    def completion_median_s(self) -> float: ...
    @property
    def completion_p99_s(self) -> float: ...
    @property
    def waiting_mean_s(self) -> float: ...
    @property
    def running_mean_s(self) -> float: ...
    @property
    def makespan_s(self) -> float: ...
    @property
    def gpu_allocated_share(self) -> float: ...
    @property
    def gpu_busy_share(self) -> float: ...
    @property
    def cpu_used_share(self) -> float: ...
    @property
    def operations_per_job_minute(self) -> float: ...
    @property
    def moved_bytes(self) -> float: ...
    @property
    def completions_s(self) -> list[float]: ...

class PairedSpeedup:
    @property
    def mean(self) -> float: ...
    @property
    def least(self) -> float: ...
    @property
    def most(self) -> float: ...
    @property
    def interval_low(self) -> float | None: ...
    @property
    def interval_high(self) -> float | None: ...

def simulate(
    jobs: JobTable,
    profiles: ProfileTable,
    *,
    server_count: int,
    gpus_per_server: int,
    cpus_per_gpu: int,
    link_bytes_per_s: float,
    split: tuple[float, float, float],
    order: str,
    preempts: bool,
    policy: str,
    start_delay_s: float,
    move_cost_s: float,
    interval_s: float,
    horizon_s: float,
    floor_share: float,
    noise: float,
    seed: int,
) -> SimulationReport: ...
def paired_speedup(other_s: list[float], own_s: list[float]) -> PairedSpeedup: ...
def gain_parts(other: SimulationReport, own: SimulationReport) -> tuple[float, float]: ...
