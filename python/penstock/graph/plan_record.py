# SPDX-License-Identifier: Apache-2.0
"""The parts of a plan: calls, the tensors between them, and the costs of each way to cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of the model's forward, or several calls that write to the same memory.

    Attributes:
        index (int): Number of the call, by which edges refer to it, in the order of the program.
        operator (str): Operator and position as in the program: "interpolate at model.py:14".
        place (str): ``"worker"``, ``"trainer"``, or ``"both"`` for values that each side computes.
        reason (str): Reason for the place, as a sentence.
        worker_s (float): Seconds per batch if a worker runs it.
        trainer_s (float): Seconds per batch if the trainer runs it, on ``device``, measured by
            that device's events; 0 for calls that cannot move.
        made_bytes (int): Bytes of memory per batch that it allocates and other calls read; 0 for a
            view.
        largest_difference (float | None): Largest difference so far between results that depend on
            the call and the device's results, in the unit of ``cut_tolerance``; None if the call
            does not move because of that option.
        device (str | None): Device on which the program has the results; None for the CPU.
    """

    index: int
    operator: str
    place: str
    reason: str
    worker_s: float
    trainer_s: float
    made_bytes: int
    largest_difference: float | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedEdge:
    """Tensors that one call passes to another. Parameters and constants are left out.

    Attributes:
        source (int | None): ``index`` of the call that makes them; None for tensors of the batch.
        target (int | None): ``index`` of the call that reads them; None for results of forward.
        tensor_bytes (int): Bytes per batch; memory that tensors share is counted once.
        leaf (int | None): Number of the tensor in the batch, from 0, if ``source`` is None.
    """

    source: int | None
    target: int | None
    tensor_bytes: int
    leaf: int | None


@dataclass(frozen=True, slots=True)
class CutTotals:
    """Costs per batch of one way to cut, all from the same measurement.

    Attributes:
        cut (str): ``"none"``, ``"maximal"``, ``"chosen"`` (the plan), or ``"exact"`` (the plan
            without ``cut_tolerance``).
        worker_s (float): Seconds of a worker.
        trainer_s (float): Seconds of the trainer for the calls that could move and do not.
        boundary_bytes (int): Bytes that the trainer reads, of the workers' results and of the raw
            batch.
        sent_bytes (int): Bytes that a pool's workers send: the same, or with the whole raw batch
            if all of it is sent. Tensors that are not passed to the model are not counted.
    """

    cut: Literal["none", "maximal", "chosen", "exact"]
    worker_s: float
    trainer_s: float
    boundary_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class RunningPrice:
    """Duration of a step with a plan, by measurements of the running loader. Seconds per batch.

    Attributes:
        times (int): Number of times that the plan was priced in this way.
        changes (int): Number of times that the plan was changed as a result.
        trainer_s (float): Seconds of work in the trainer, for the whole step.
        worker_s (float): Seconds of work in a worker, including the dataset.
        worker_count (int): Number of workers that share the batches.
        link_s (float): Seconds of transfer from a pool's workers, or to a device.
        step_s (float): Seconds of the slowest side: the trainer, the workers together, the link to
            a pool's workers or to the trainer's device, or the CPUs that they share.
        is_held (bool): Whether a change made steps longer and was reverted; the plan then stays as
            it is until the loads change.
    """

    times: int
    changes: int
    trainer_s: float
    worker_s: float
    worker_count: int
    link_s: float
    step_s: float
    is_held: bool


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The fields of a `Plan`, which documents them, for the modules that display plans."""

    moved: tuple[PlannedCall, ...] = ()
    kept: tuple[PlannedCall, ...] = ()
    raw_bytes: int = 0
    maximal_bytes: int = 0
    boundary_bytes: int = 0
    worker_s: float = 0.0
    trainer_s: float = 0.0
    refused: str | None = None
    totals: tuple[CutTotals, ...] = ()
    edges: tuple[PlannedEdge, ...] = ()
    link_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    priced: RunningPrice | None = None
    workers_apart: tuple[str, ...] = ()
    sample: str = ""
