# SPDX-License-Identifier: Apache-2.0
"""The cost of an offloaded model when no operation moves: seconds of alternated training steps with
it and without, in one process. bench/cut.py --overhead starts this and reads the last line.

Each side has a separate model, optimizer and loader with the same parameters and the same batches,
so that offload's additions to the loader are in the step, too: a step is the fetching of its batch
and all of training.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import process_tree
import torch
from cut_training import PinTo, choose_cores, fresh, prepare_trainer, steps_of
from cut_workloads import OVERHEAD_MODELS, class_loss
from torch import nn
from torch.utils.data import RandomSampler, TensorDataset

from penstock import DataLoader, offload

STEP_S = 5e-3
TUNING_STEPS = 12
IMAGE_COUNT = 512
BATCHES_BEYOND = 8  # in the epoch, so that its end lies outside of the timing


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cores = choose_cores()
    pin_worker = prepare_trainer(cores, args.seed)
    make_model = OVERHEAD_MODELS[args.model]
    row_count = _rows_of_a_step(make_model)
    step_count = args.warmup_steps + args.steps

    def make_side(is_offloaded: bool) -> tuple[Any, Iterator[torch.Tensor]]:
        loader = _make_loader(row_count, step_count, pin_worker, args.seed)
        model = fresh(make_model)
        if is_offloaded:
            model = offload(model, loader, cut="none")
        return loader, steps_of(model, iter(loader), class_loss)

    # The side that is made second has other addresses in memory, so processes take turns at that.
    order = (False, True) if args.seed % 2 == 0 else (True, False)
    sides = {is_offloaded: make_side(is_offloaded) for is_offloaded in order}
    draw = random.Random(args.seed)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    gc.collect()
    for step in range(step_count):
        if step == args.warmup_steps:
            begun, busy_s = time.perf_counter(), process_tree.machine_busy_s()
            used = process_tree.usage(os.getpid())
        losses = []
        for is_offloaded in draw.sample((False, True), 2):
            begin = time.perf_counter()
            loss = next(sides[is_offloaded][1])
            end = time.perf_counter()
            losses.append(loss)
            if step >= args.warmup_steps:
                seconds[is_offloaded].append(end - begin)
        if not torch.equal(*losses):
            raise SystemExit(f"cut: the losses of step {step} differ: {losses}")
    used = process_tree.usage(os.getpid()) - used
    busy_s = process_tree.machine_busy_s() - busy_s
    foreign_cores = max(0.0, busy_s - used.cpu_s) / (time.perf_counter() - begun)
    plan = sides[True][0].plan
    if plan is None or plan.refused is not None or plan.moved:
        raise SystemExit(
            f"cut: no call of the offloaded model should move, but its plan is: {plan}"
        )
    return {
        "eager_s": seconds[False],
        "offloaded_s": seconds[True],
        "foreign_cores": foreign_cores,
        "cores": cores,
        "rows": row_count,
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    }


def _make_loader(row_count: int, step_count: int, pin_worker: PinTo, seed: int) -> DataLoader[Any]:
    """A loader whose one epoch is the whole training."""
    images, labels = _images(IMAGE_COUNT)
    sampler = RandomSampler(
        range(IMAGE_COUNT),
        replacement=True,
        num_samples=row_count * (step_count + BATCHES_BEYOND),
        generator=torch.Generator().manual_seed(seed),
    )
    return DataLoader(
        TensorDataset(images, labels),
        batch_size=row_count,
        sampler=sampler,
        num_workers=1,
        worker_init_fn=pin_worker,
    )


def _rows_of_a_step(make_model: type[nn.Module]) -> int:
    """How many images make a step of the model alone take STEP_S here."""
    row_count = 16
    for _ in range(3):
        batch = _images(row_count)
        steps = steps_of(fresh(make_model), iter([batch] * TUNING_STEPS), class_loss)
        next(steps)
        seconds = []
        begin = time.perf_counter()
        for _ in steps:
            end = time.perf_counter()
            seconds.append(end - begin)
            begin = end
        median_s = sorted(seconds)[len(seconds) // 2]
        row_count = min(IMAGE_COUNT, max(1, round(row_count * STEP_S / median_s)))
    return row_count


def _images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 48, 48), dtype=torch.uint8, generator=draw)
    return pixels, torch.randint(10, (count,), generator=draw)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=tuple(OVERHEAD_MODELS))
    parser.add_argument("--steps", type=int, default=1000, help="timed steps per side")
    parser.add_argument("--warmup-steps", type=int, default=30, help="untimed steps per side")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(measure(parser.parse_args())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
