# SPDX-License-Identifier: Apache-2.0
"""Sums over the loaders that one line of a program makes, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.loader.stats import LoaderStats
from penstock.loader.step_times import PARTS


@dataclass(frozen=True, slots=True)
class LoaderTotals:
    """``batches`` counts those of workers. Waiting and the loader's own work are by the names of
    StepTimes, with ``step_`` before them."""

    batches: int = 0
    inline_batches: int = 0
    copied_batches: int = 0
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    wire_s: float = 0.0
    steps: int = 0
    step_compute_s: float = 0.0
    step_dataset_s: float = 0.0
    step_collate_s: float = 0.0
    step_prefix_s: float = 0.0
    step_worker_s: float = 0.0
    step_wire_s: float = 0.0
    step_device_s: float = 0.0
    step_order_s: float = 0.0
    step_ranks_s: float = 0.0
    step_loader_s: float = 0.0

    def __add__(self, other: LoaderTotals) -> LoaderTotals:
        return LoaderTotals(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(self))
        )

    def __sub__(self, other: LoaderTotals) -> LoaderTotals:
        return LoaderTotals(
            *(getattr(self, one.name) - getattr(other, one.name) for one in fields(self))
        )

    @staticmethod
    def of(stats: LoaderStats) -> LoaderTotals:
        return LoaderTotals(
            batches=stats.batches,
            inline_batches=stats.inline_batches,
            copied_batches=stats.copied_batches,
            dataset_s=stats.dataset_s,
            collate_s=stats.collate_s,
            prefix_s=stats.prefix_s,
            wire_s=stats.wire_s,
            steps=stats.ledger.steps,
            **{f"step_{name}": getattr(stats.ledger, name) for name in PARTS},
        )
