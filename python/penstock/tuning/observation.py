# SPDX-License-Identifier: Apache-2.0
"""Observations of a loader and of the program that reads it: its options, its numbers, and their
wording for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

# The parts of waiting that end when a batch is made, by the names of the fields of StepTimes.
MAKING_PARTS = ("dataset_s", "collate_s", "prefix_s", "worker_s", "order_s")


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """One batch: the seconds that its worker took, and the seconds that the program then
    computed."""

    making_s: float
    compute_s: float = 0.0
    # Seconds that its slowest sample took beyond the usual time of a sample.
    slow_sample_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """Means over ``steps`` steps of one loader. Seconds of a step or of a batch.

    ``waiting`` has the seconds of a step by part, by the field names of StepTimes. Of a worker's
    seconds for a batch, ``dataset_s`` includes ``transform_s`` if that is known. ``worker_cpu_s``
    is the time that it is on a CPU for a batch, and ``worker_delay_s`` the time that it waits for
    one, as does the program's thread for ``trainer_delay_s`` of a step's ``compute_s`` at most. The
    seconds until the first batch of an epoch, ``start_s``, are in none of the others.
    ``waiting_share`` is the share of all the time, including these, if a report has it.
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
    batches: tuple[MadeBatch, ...] = ()  # in turn; none if only means are known
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
    movable_s: float | None = None  # of the trainer's for a step; None: not examined
    is_offloaded: bool = False

    @property
    def making_s(self) -> float:
        """Return a worker's seconds for a batch."""
        return self.dataset_s + self.collate_s + self.prefix_s

    @property
    def waiting_s(self) -> float:
        return sum(self.waiting.values())

    @property
    def start_share_s(self) -> float:
        """Return one step's share of the waiting at the start of an epoch."""
        return self.start_s / self.epoch_steps if self.epoch_steps else 0.0

    @property
    def whole_step_s(self) -> float:
        """Return the time of a step, with its share of the waiting at the start of the epoch."""
        return self.step_s + self.start_share_s

    @property
    def cpu_share(self) -> float | None:
        """Return the share of a worker's time for a batch on a CPU or waiting for one."""
        if self.worker_cpu_s is None or self.making_s <= 0:
            return None
        return min(1.0, (self.worker_cpu_s + self.worker_delay_s) / self.making_s)


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Settings of a loader. ``seeding`` and ``in_order`` change the random numbers of samples or
    the order of batches; the others do not change the batches of a map-style dataset."""

    num_workers: int = 0
    fetch_threads: int = 1
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    in_order: bool = True
    seeding: str | None = None
    offload: bool = False  # whether penstock.offload has moved a part of the model

    @property
    def ahead(self) -> int:
        """Return the number of batches requested ahead."""
        return self.num_workers * self.prefetch_factor

    def changes_from(self, before: LoaderSettings) -> dict[str, Any]:
        """Return the options, except ``offload``, whose values differ from ``before``, and the
        options that the new values need."""
        changed = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name != "offload" and getattr(self, one.name) != getattr(before, one.name)
        }
        if "num_workers" in changed and before.num_workers == 0:
            changed["prefetch_factor"] = self.prefetch_factor  # torch's is none without workers
        return changed

    def format_changes_from(self, before: LoaderSettings) -> str:
        """Return the changes as code: ``num_workers=2, prefetch_factor=4``."""
        words = [f"{name}={value!r}" for name, value in self.changes_from(before).items()]
        if self.offload and not before.offload:
            words.append("penstock.offload(model, loader)")
        return ", ".join(words) or "unchanged"

    @staticmethod
    def of(values: Mapping[str, Any]) -> LoaderSettings:
        """Return the settings in a loader's attributes, where ``prefetch_factor`` may be None."""
        given = {
            one.name: values[one.name]
            for one in fields(LoaderSettings)
            if values.get(one.name) is not None
        }
        return LoaderSettings(**given)


def format_time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def format_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def format_share(share: float) -> str:
    return f"{100 * share:.0f} %"
