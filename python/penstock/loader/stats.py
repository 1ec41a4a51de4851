# SPDX-License-Identifier: Apache-2.0
"""The statistics of a loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock import _C
from penstock.loader.agreed_steps import EpochEnd
from penstock.loader.step_times import SlowSample, StepTimes, WorkerTimes
from penstock.tuning.observation import spoken_share


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts over the iterators that a loader has made, the live ones included.

    ``print(loader.stats())`` shows them in words. A parallel loader counts; with num_workers=0 the
    numbers are 0.

    ``iterator`` is "penstock", "pool", "torch" (num_workers=0: torch's own in-process iterator) or
    "fallback" (torch's iterator in the place of ours, for ``fallback_reason``); None before the
    first ``iter()``.

    Seconds are wall-clock: ``epochs_s`` is the time from the beginning of each epoch to its last
    batch, ``wait_s`` how long of it the trainer waited for batches, in ``waits`` times, ``fetch_s``
    how long workers took to make those delivered. Of that they spent ``dataset_s`` on samples,
    ``collate_s`` on making batches of them and writing these to shared memory, and ``prefix_s`` on
    calls that :func:`penstock.offload` moved. Batches were on the wire for ``wire_s``, added up.

    ``ledger`` says where each second of the steps went; it counts with ``num_workers=0``, too.
    ``workers`` has what each worker took, by its number, or in a pool by its identity, and
    ``slow_samples`` the samples that took longest, the slowest first.

    ``batches`` were delivered, with ``batch_bytes`` of tensors. Of them ``copied_batches`` were
    copied out of shared memory because the program holds many others, ``inline_batches`` came
    through a socket because no shared memory could be had, ``early_batches`` were asked for before
    their epoch began, ``boundary_batches`` carried results of calls that :func:`penstock.offload`
    moved, ``compiled_batches`` of these were made by compiled code, and ``unrepeatable_batches``
    have random numbers that ``fetch_threads`` drew in no certain order. Tensors of
    ``withheld_bytes`` that nobody read stayed with a pool's workers, and ``recalled_batches`` were
    sent once more since the program read such a tensor after all. Of ``device_widened_batches``
    tensors that a pool sent in fewer bytes were copied so and widened on the device; without
    ``device=``, and where penstock was built without nvcc, the CPU widens them. ``stale_batches``
    came and were dropped because their epoch was left. ``arenas`` of shared memory were mapped.
    ``outstanding`` batches are asked for and not here yet, ``ready`` ones are here and not taken.

    Of a pool, workers of the trainer's own apart: its workers made ``pool_samples`` in
    ``pool_bytes`` of batches, served for ``pool_worker_s`` together in ``pool_tenancies``, and were
    on CPUs for ``pool_cpu_s`` of it. ``pool_energy_j`` is what they have used, or None where a
    worker does not know; ``pool_metered_energy_j`` is that of the ``pool_metered_tenancies`` in
    which one does. The pauses between two iterators, for which workers may be kept, are in
    ``penstock costs`` alone.

    ``epoch_end`` says how the last epoch ended that all ranks ended together, with
    ``shard_by_rank`` and an iterable dataset: after how many steps, with the batches of which
    rank, and what was dropped on this one.

    ``worker_choice`` is that of ``num_workers="auto"``, once there is one.
    """

    iterator: str | None = None
    fallback_reason: str | None = None
    batches: int = 0
    batch_bytes: int = 0
    copied_batches: int = 0
    inline_batches: int = 0
    stale_batches: int = 0
    early_batches: int = 0
    boundary_batches: int = 0
    compiled_batches: int = 0
    unrepeatable_batches: int = 0
    withheld_bytes: int = 0
    recalled_batches: int = 0
    device_widened_batches: int = 0
    arenas: int = 0
    waits: int = 0
    epochs_s: float = 0.0
    wait_s: float = 0.0
    fetch_s: float = 0.0
    prefix_s: float = 0.0
    outstanding: int = 0
    ready: int = 0
    pool_tenancies: int = 0
    pool_metered_tenancies: int = 0
    pool_samples: int = 0
    pool_bytes: int = 0
    pool_worker_s: float = 0.0
    pool_cpu_s: float = 0.0
    pool_metered_energy_j: float = 0.0
    worker_choice: _C.WorkerChoice | None = None
    epoch_end: EpochEnd | None = None
    dataset_s: float = 0.0
    collate_s: float = 0.0
    wire_s: float = 0.0
    ledger: StepTimes = StepTimes()
    workers: Mapping[int, WorkerTimes] = field(default_factory=dict)
    slow_samples: tuple[SlowSample, ...] = ()

    @property
    def pool_energy_j(self) -> float | None:
        """Joules that a pool's workers have used for this loader; None where that is not known."""
        is_known = self.pool_tenancies == self.pool_metered_tenancies
        return self.pool_metered_energy_j if is_known else None

    def __str__(self) -> str:
        if self.iterator is None:
            return "DataLoader has not been iterated over"
        end = "" if self.epoch_end is None else f"\n  {self.epoch_end}"
        if not self.batches:
            steps = f"; {self.ledger}" if self.ledger.steps else ""
            return f"DataLoader ({self.iterator}) has counted no batch{steps}{end}"
        moved = (
            f", {1e3 * self.prefix_s / self.batches:.3g} ms of it on calls that offload() moved, "
            f"in {self.boundary_batches} batches"
            if self.boundary_batches
            else ""
        )
        lines = [
            f"DataLoader ({self.iterator}) delivered {self.batches} batches of "
            f"{self.batch_bytes / self.batches / 1e6:.3g} MB in {self.ledger.total_s:.3g} s, and "
            f"the trainer waited {spoken_share(self.ledger.waiting_share)} of that time",
            f"workers spent {1e3 * self.fetch_s / self.batches:.3g} ms on a batch{moved}",
            f"{self.ready} batches are here and {self.outstanding} are asked for",
        ]
        if self.ledger.steps:
            lines.append(str(self.ledger))
        notable = {
            "were copied, because the program holds many others": self.copied_batches,
            "came through a socket, for want of shared memory": self.inline_batches,
            "came after their epoch was left, and were dropped": self.stale_batches,
            "were made before their epoch began": self.early_batches,
            "were sent once more, for a tensor that had stayed behind": self.recalled_batches,
            "had tensors that the device widened": self.device_widened_batches,
            "have random numbers that cannot be repeated": self.unrepeatable_batches,
        }
        lines += [f"{count} {what}" for what, count in notable.items() if count]
        if self.worker_choice is not None:
            lines.append(str(self.worker_choice))
        return "\n  ".join(lines) + end
