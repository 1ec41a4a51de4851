# SPDX-License-Identifier: Apache-2.0
"""The record of a plan: the calls that move, the calls that stay, the reasons, and the costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of the model's forward (or several that write to the same memory)."""

    index: int  # by which edges name it; calls are numbered in the order of the program
    operator: str  # as the program says it: "interpolate at model.py:14"
    place: str  # "worker", "trainer", or "both" for values that each side computes for itself
    reason: str
    worker_s: float  # per batch, where a worker runs it
    # Per batch, where the trainer runs it, on `device` by that device's events; 0 for calls that
    # cannot move.
    trainer_s: float
    made_bytes: int  # memory that it allocates per batch and other calls read; a view makes none
    # How far results that follow from it were from the device's own at most, as `cut_tolerance`
    # counts; None where it does not move by that.
    largest_difference: float | None = None
    device: str | None = None  # where the program has its results, if not on the CPU


@dataclass(frozen=True, slots=True)
class PlannedEdge:
    """Tensors that one call hands to another; parameters and constants are left out."""

    source: int | None  # `index` of the call that makes them; None: they come with the batch
    target: int | None  # `index` of the call that reads them; None: forward returns them
    tensor_bytes: int  # per batch, memory that tensors share counted once
    leaf: int | None  # which tensor of the batch, counted from 0, where `source` is None


@dataclass(frozen=True, slots=True)
class CutTotals:
    """The costs per batch of one way to cut, by the same measurement as the others."""

    cut: Literal["none", "maximal", "chosen", "exact"]
    worker_s: float  # a worker's seconds
    trainer_s: float  # the trainer's seconds on calls that could move and stay
    # Bytes that the trainer reads: of the workers' results, and of the raw batch.
    boundary_bytes: int
    # Bytes that a pool's workers send: the same, or of the whole raw batch where all of it crosses.
    # Tensors that the model is not given are not counted.
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RunningPrice:
    """How long a step takes with a plan, priced by measurements of the running loader.

    Seconds are per batch. `step_s` is that of the slowest side: the trainer, the workers, who share
    the batches, the link to a pool's workers or to the trainer's device, or the CPUs that all of
    them share.
    """

    times: int  # how often the plan was priced so
    changes: int  # and how often it was changed for it
    trainer_s: float  # the trainer at work, all of a step included
    worker_s: float  # a worker at work, the dataset included
    worker_count: int
    link_s: float  # the bytes of a batch on their way from a pool's workers, or to a device
    step_s: float
    is_held: bool  # a change made steps longer and was taken back: no other until loads shift


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A cut with its prices; bytes and seconds are per batch.

    `refused` is None, or the one sentence that says why the whole model stays in the trainer.
    """

    moved: tuple[PlannedCall, ...] = ()
    kept: tuple[PlannedCall, ...] = ()
    raw_bytes: int = 0  # the batch as the dataset makes it
    maximal_bytes: int = 0  # the boundary when everything that can move does
    boundary_bytes: int = 0  # bytes of it that the trainer reads with this plan
    worker_s: float = 0.0  # a worker's seconds per batch
    trainer_s: float = 0.0  # the trainer's seconds per batch on calls that could move and stay
    refused: str | None = None
    # Of no cut, the maximal cut and this one, in this order; where `cut_tolerance` moves something,
    # of what this one would be without it, too.
    totals: tuple[CutTotals, ...] = ()
    edges: tuple[PlannedEdge, ...] = ()
    # The link to a pool's workers, when the plan was made; None in one machine.
    link_bytes_per_s: float | None = None
    # From pinned memory to the device that the program has its batches on; None without one.
    copy_bytes_per_s: float | None = None
    priced: RunningPrice | None = None  # None: by the calibration on one batch alone
    # Workers of a pool that run only the part of it that is exact on every CPU, and why.
    workers_apart: tuple[str, ...] = ()
