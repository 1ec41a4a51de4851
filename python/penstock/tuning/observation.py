# SPDX-License-Identifier: Apache-2.0
"""What was seen of a loader and of the program that reads it: numbers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.tuning.loader_settings import LoaderSettings

# The parts of waiting that end with a batch being made, by the names of the fields of StepTimes.
MAKING_PARTS = ("dataset_s", "collate_s", "prefix_s", "worker_s", "order_s")


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """One batch: the seconds that its worker took, and for how long the program then computed."""

    making_s: float
    compute_s: float = 0.0
    # Seconds that its slowest sample took beyond what the samples take as a rule.
    slow_sample_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """Means over ``steps`` steps of one loader. Seconds of a step or of a batch.

    ``waiting`` has the seconds of a step by part, as StepTimes names them. Of a worker's seconds
    for a batch, ``dataset_s`` includes ``transform_s`` where that is known. ``worker_cpu_s`` is
    how long it is on a CPU for a batch, and ``worker_delay_s`` how long it waits for one, as does
    the program's thread for ``trainer_delay_s`` of a step's ``compute_s`` at most. The
    seconds until the first batch of an epoch, ``start_s``, are in none of the others.
    ``waiting_share`` is the part of all the time, these included, where a report tells it.
    """

    settings: LoaderSettings
    steps: int
    step_s: float
    compute_s: float = 0.0
    loader_s: float = 0.0
    waiting: Mapping[str, float] = field(default_factory=dict)
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    wire_s: float = 0.0
    transform_s: float | None = None
    worker_cpu_s: float | None = None
    worker_delay_s: float = 0.0
    trainer_cpu_s: float | None = None
    trainer_delay_s: float = 0.0
    cpus: int = 1
    batches: tuple[MadeBatch, ...] = ()  # in turn; none where only means are known
    start_s: float = 0.0
    waiting_share: float | None = None
    epoch_steps: float | None = None  # of an epoch; None: without end, or unknown
    batch_bytes: float = 0.0
    batch_samples: int = 1
    delivered: int = 0  # batches since the loader was made, and of them:
    inline_batches: int = 0
    copied_batches: int = 0
    memory_free_bytes: int | None = None
    memory_reads_per_s: float = 0.0  # pages that had to be read from a disk
    slow_samples: tuple[tuple[float, str], ...] = ()  # seconds, and a name for people
    takes_threads: bool = True  # whether fetch_threads may be more than 1
    order_of_workers: bool = False  # whether the batches depend on the number of workers
    has_pool: bool = False
    pool_workers: int = 0
    is_on_gpu: bool = False
    movable_s: float | None = None  # of the trainer's for a step; None: nobody has looked
    is_offloaded: bool = False

    @property
    def making_s(self) -> float:
        """A worker's seconds for a batch."""
        return self.dataset_s + self.collate_s + self.prefix_s

    @property
    def waiting_s(self) -> float:
        return sum(self.waiting.values())

    @property
    def start_share_s(self) -> float:
        """Of the waiting at the beginning of an epoch, the part of one step."""
        return self.start_s / self.epoch_steps if self.epoch_steps else 0.0

    @property
    def whole_step_s(self) -> float:
        """A step, with its part of the waiting at the beginning of the epoch."""
        return self.step_s + self.start_share_s

    @property
    def cpu_share(self) -> float | None:
        """Of the time that a worker makes a batch, the part on a CPU or waiting for one."""
        if self.worker_cpu_s is None or self.making_s <= 0:
            return None
        return min(1.0, (self.worker_cpu_s + self.worker_delay_s) / self.making_s)
