# SPDX-License-Identifier: Apache-2.0
"""Steps per second of one training, in a separate process, slice by slice.

bench/cut.py starts one process for each kind, and has them train in turns: each line of standard
input is the seconds of one slice, which is answered by a line of JSON. The first line reports the
start of the training, and the last one the outcome of the plan. By hand it also prints the plan:

    echo 5 | python bench/cut_rate.py audio auto
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_tree
import torch
from cut_training import KINDS, choose_cores, endless, fresh, prepare_trainer, steps_of
from cut_workloads import WORKLOADS

from penstock import DataLoader, Pool, offload
from penstock.graph.plan import Plan

# The losses of this many steps from the first are returned for comparison. Batches that were
# requested before there was a plan arrive without the worker's part, up to 17 of them where they
# are small.
CHECKED_STEPS = 32
CHECKED_STEPS_OF_POOL = 96
BOUNDARY_BATCHES_MIN = 6
WARMUP_STEPS = 16
# At the head of a slice: the worker has had batches ready since the last one.
LEAD_STEPS, LEAD_S = 6, 0.1
QUICK_EPOCH_BATCHES = 12
HERE = Path(__file__).resolve().parent


class Waiting:
    """Adds up the seconds of waiting for `batches`."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Waiting:
        return self

    def __next__(self) -> Any:
        begin = time.perf_counter()
        batch = next(self._batches)
        self.seconds += time.perf_counter() - begin
        return batch


def serve(args: argparse.Namespace) -> None:
    workload = WORKLOADS[args.workload]
    cores = choose_cores()
    pin_worker = prepare_trainer(cores, args.seed)
    batch_count = QUICK_EPOCH_BATCHES if args.quick else workload.epoch_batches
    loader: DataLoader[Any] = DataLoader(
        workload.make_dataset(batch_count * workload.batch_size),
        batch_size=workload.batch_size,
        shuffle=True,
        **workers_of(args, pin_worker),
    )
    model = fresh(workload.make_model)
    if args.kind != "eager":
        model = offload(model, loader, cut=args.kind)
    batches = Waiting(endless(loader))
    steps = steps_of(model, batches, workload.loss)

    checked_steps = CHECKED_STEPS if args.pool is None else CHECKED_STEPS_OF_POOL
    losses = [next(steps) for _ in range(checked_steps)]
    if args.kind != "eager":
        check_plan(loader)
    advance(steps, WARMUP_STEPS, args.warmup)
    emit({"losses": [_bits(loss) for loss in losses], "cores": cores})
    plan = loader.plan
    for line in sys.stdin:
        advance(steps, LEAD_STEPS, LEAD_S)
        emit(measure_slice(loader, steps, batches, float(line)))
    if args.kind != "eager":
        changes_before, plan = _changes(plan), loader.plan
        print(plan, file=sys.stderr)
        emit(
            {
                "moved": [call.operator for call in plan.moved],
                "moved_calls": float(len(plan.moved)),
                "raw_bytes": float(plan.raw_bytes),
                "maximal_bytes": float(plan.maximal_bytes),
                "boundary_bytes": float(plan.boundary_bytes),
                "priced_worker_s": plan.worker_s,
                "priced_trainer_s": plan.trainer_s,
                "changes": float(_changes(plan)),
                "changes_while_timed": float(_changes(plan) - changes_before),
            }
        )


def workers_of(args: argparse.Namespace, pin_worker: Any) -> dict[str, Any]:
    """Options of the loader: a local worker, or a pool worker."""
    if args.pool is None:
        return {"num_workers": 1, "persistent_workers": True, "worker_init_fn": pin_worker}
    return {"pool": Pool(args.pool, keys=args.keys, code_paths=[str(HERE)]), "timeout": 120}


def advance(steps: Iterator[torch.Tensor], count: int, seconds: float) -> None:
    """At least this many steps, and at least for this long."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or count > 0:
        next(steps)
        count -= 1


def measure_slice(
    loader: DataLoader[Any], steps: Iterator[torch.Tensor], batches: Waiting, seconds: float
) -> dict[str, float]:
    sent_bytes = loader.stats().batch_bytes
    busy_s, used, waited_s = process_tree.machine_busy_s(), _usage(), batches.seconds
    begin = now = time.perf_counter()
    step_count = 0
    while now < begin + seconds:
        next(steps)
        step_count += 1
        now = time.perf_counter()
    seconds = now - begin
    used, waited_s = _usage() - used, batches.seconds - waited_s
    busy_s = process_tree.machine_busy_s() - busy_s
    return {
        "steps_per_s": step_count / seconds,
        "waiting_share": waited_s / seconds,  # of batches: high where the worker is the slower one
        "batch_bytes": (loader.stats().batch_bytes - sent_bytes) / step_count,
        "foreign_cores": max(0.0, busy_s - used.cpu_s) / seconds,
    }


def emit(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def check_plan(loader: DataLoader[Any]) -> None:
    """Ends the bench if an expected cut is missing."""
    plan: Plan = loader.plan
    if plan.refused is not None:
        raise SystemExit(f"cut: penstock refused this model: {plan.refused}")
    boundary_batch_count = loader.stats().boundary_batches
    if plan.moved and not _changes(plan) and boundary_batch_count < BOUNDARY_BATCHES_MIN:
        raise SystemExit(
            f"cut: the worker ran the moved calls for {boundary_batch_count} of the first "
            f"{CHECKED_STEPS} batches, expected {BOUNDARY_BATCHES_MIN}; raise CHECKED_STEPS"
        )


def _changes(plan: Plan) -> int:
    """How often the plan was changed because of measurements."""
    return plan.priced.changes if plan.priced is not None else 0


def _usage() -> process_tree.Usage:
    return process_tree.usage(os.getpid())


def _bits(loss: torch.Tensor) -> str:
    return loss.numpy().tobytes().hex()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=tuple(WORKLOADS))
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--warmup", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pool", help="address of a controller whose worker makes the batches")
    parser.add_argument("--keys", help="folder with the pool's keys")
    parser.add_argument("--quick", action="store_true")
    serve(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
