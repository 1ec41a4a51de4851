# SPDX-License-Identifier: Apache-2.0
"""What a loader reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tuning.worker_choice import WorkerChoice


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Counts over the iterators that a loader has made, the live ones included.

    ``iterator`` is "penstock", "pool", "torch" (num_workers=0: torch's own in-process iterator) or
    "fallback" (torch's iterator in the place of ours, for ``fallback_reason``); None before the
    first ``iter()``. Seconds are wall-clock: ``wait_s`` is how long the trainer waited for batches,
    ``fetch_s`` how long workers took to make those delivered, ``prefix_s`` how much of that went
    into what :func:`penstock.offload` moved. ``outstanding`` batches are asked for and not here
    yet, ``ready`` ones are here and not taken. ``early_batches`` were asked for before their epoch
    began, ``stale_batches`` came and were dropped because their epoch was left. ``worker_choice``
    is that of ``num_workers="auto"``, once there is one.
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
    arenas: int = 0
    waits: int = 0
    wait_s: float = 0.0
    fetch_s: float = 0.0
    prefix_s: float = 0.0
    outstanding: int = 0
    ready: int = 0
    worker_choice: WorkerChoice | None = None
