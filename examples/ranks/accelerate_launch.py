# SPDX-License-Identifier: Apache-2.0
"""accelerate: the loader is not prepared, but saved with the rest of the job.

    accelerate launch --multi_gpu --num_processes 2 examples/ranks/accelerate_launch.py \
        --checkpoint job --stop-after 4

With --cpu it would start one process, or mpirun. Accelerator(cpu=True) trains on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accelerate import Accelerator
from task import EPOCHS, loss_of, make_loader, make_model, make_optimizer, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="folder; if it is there, go on from it")
    parser.add_argument("--stop-after", type=int, help="the number of a step, then saved")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    loader = make_loader()  # prepare() would shard its batches again
    model = make_model()
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    accelerator.register_for_checkpointing(loader)
    step, losses = 0, []
    if args.checkpoint is not None and args.checkpoint.exists():
        accelerator.load_state(args.checkpoint)
        step = accelerator.step
    while step < EPOCHS * len(loader) and step != args.stop_after:
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == args.stop_after:
                accelerator.step = step
                accelerator.save_state(args.checkpoint)
                break
    report(accelerator.process_index, losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
