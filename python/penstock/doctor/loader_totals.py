# SPDX-License-Identifier: Apache-2.0
"""Sums over the loaders that one line of a program makes, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.loader.field_sums import FieldSums
from penstock.loader.stats import LoaderStats
from penstock.loader.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class LoaderTotals(FieldSums):
    """``batches`` counts those of workers; ``ledger`` has the steps of all."""

    batches: int = 0
    inline_batches: int = 0
    copied_batches: int = 0
    dataset_s: float = 0.0
    collate_s: float = 0.0
    prefix_s: float = 0.0
    wire_s: float = 0.0
    ledger: StepTimes = StepTimes()

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
            ledger=stats.ledger,
        )
