# SPDX-License-Identifier: Apache-2.0
"""torchft: replicas die, join and leave while the others train; each sample is trained on once.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000
python examples/ranks/torchft_replicas.py --lighthouse http://localhost:29510  # for each replica

The ranks of the loader are the replicas of torchft's quorum. When the quorum changes, the loader
continues as the rank in the new one, and its workers stay. A step that torchft refuses, because a
replica died in it, is repeated with the same samples.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from task import NoisyPoints, make_model, make_optimizer
from torch.nn import functional
from torchft import Manager, ProcessGroupGloo

from penstock import DataLoader, Ranks

STEP_SIZE = 12  # samples of all replicas together


class QuorumLoader:
    """A loader whose ranks are the replicas of a quorum.

    Its state is the place after the last step that was committed, for replicas that join.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.state = loader.state_dict()
        self.iterator = iter(loader)
        self._is_at_state = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
        self._is_at_state = False

    def next_batch(self, manager: Manager) -> Any:
        """Return the replica's batch of the next step. Call it after ``start_quorum()``."""
        job = (manager.participating_rank(), manager.num_participants())
        if job != (self.loader.rank, self.loader.world_size) or not self._is_at_state:
            self.loader.reshard(*job, state=self.state)
            self._is_at_state = True
        batch = next(self.iterator, None)
        if batch is None:  # the epoch is over, on all replicas
            self.iterator = iter(self.loader)
            batch = next(self.iterator)
        return batch

    def note(self, is_committed: bool) -> None:
        """Call it after each step, with the result of ``should_commit()``."""
        if is_committed:
            self.state = self.loader.state_dict()
        self._is_at_state = is_committed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lighthouse", required=True, help="its address")
    parser.add_argument("--steps", type=int, default=16, help="of the job")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--pause", type=Path, help="file; while it is there, a step takes 0.3 s")
    args = parser.parse_args()
    model = make_model()
    optimizer = make_optimizer(model)
    # Torchft's quorum gives the numbers before the first batch.
    ranks = Ranks(0, 1, global_batch_size=STEP_SIZE)
    data = QuorumLoader(
        DataLoader(NoisyPoints(), shuffle=True, num_workers=args.workers, ranks=ranks)
    )

    def state_dict() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "loader": data.state,
        }

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        data.load_state_dict(state["loader"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        use_async_quorum=False,  # the numbers must be known before the batch is taken
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        timeout=timedelta(seconds=10),
    )
    while manager.current_step() < args.steps:
        if args.pause is not None and args.pause.exists():
            time.sleep(0.3)
        optimizer.zero_grad()
        manager.start_quorum()
        batch = data.next_batch(manager)
        rank, size, step = data.loader.rank, data.loader.world_size, manager.current_step()
        report(step=step, rank=rank, size=size, x=batch["x"].tolist())
        # Torchft divides the sum of the gradients by the number of replicas.
        loss = functional.mse_loss(model(batch["x"]), batch["y"], reduction="sum")
        (loss * size / STEP_SIZE).backward()
        for work in [manager.allreduce(one.grad) for one in model.parameters()]:
            work.wait()
        is_committed = manager.should_commit()
        data.note(is_committed)
        if is_committed:
            optimizer.step()
            report(step=step, size=size, committed=True)
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    report(weights=weights.sum().item())
    data.loader.close()
    manager.shutdown(wait=False)


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
