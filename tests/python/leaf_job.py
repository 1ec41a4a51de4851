# SPDX-License-Identifier: Apache-2.0
"""A rank of a job in which the ranks of one replica group read different leaves, for tests.

    leaf_job.py FOLDER '{"leaves": {"pixels": [0, 1], "labels": [3]}, "pool": "tcp://..."}'

All ranks are one group. Each rank appends a line of JSON per step to FOLDER/rank-R: the epoch and,
for each leaf, a digest of its values, or its shape and type if it is a placeholder. The last lines
are the state after "state_after" steps of the first epoch, and the bytes of the batches that the
rank has received. "workers" are the local workers of one rank. "machines" lists the ranks of each
machine; ranks of other machines are reached through encrypted connections, as if there were no
shared memory. "other_leaves" is a rank with other leaves. With "visits", FOLDER/visits is the
record of the samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import penstock
from penstock import DataLoader, Ranks
from penstock.ranks import replica_group

LENGTH, BATCH_SIZE = 48, 4
PIXELS = (3, 32, 32)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Boxes:
    corners: torch.Tensor
    scores: torch.Tensor


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return {
            "pixels": torch.rand(PIXELS),
            "labels": index,
            "text": {"ids": torch.randint(1000, (16,)), "mask": torch.rand(16) > 0.5},
            "pair": Pair(torch.rand(2), torch.rand(3)),
            "name": f"sample {index}",
        }


def collate(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples)
    batch["boxes"] = Boxes(torch.rand(BATCH_SIZE, 8), torch.rand(BATCH_SIZE))
    batch["array"] = np.arange(BATCH_SIZE)
    return batch


def leaves_of(value: Any, name: str = "") -> dict[str, Any]:
    """Return the content of each leaf for a rank, by name."""
    if isinstance(value, Boxes):
        value = vars(value)
    if isinstance(value, (list, tuple)) and not isinstance(value[0], str):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, one in value.items():
            found |= leaves_of(one, f"{name}.{key}" if name else str(key))
        return found
    if isinstance(value, torch.Tensor) and value.is_meta:
        return {name: placeholder(value)}
    content = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
    return {name: hashlib.sha256(content).hexdigest()}


def placeholder(value: torch.Tensor) -> list[Any]:
    return ["meta", list(value.shape), list(value.stride()), str(value.dtype)]


def loader_of(given: dict[str, Any], ranks: Ranks) -> DataLoader[Any]:
    penstock.register_batch_type(Boxes)
    return DataLoader(
        Samples(),
        BATCH_SIZE,
        shuffle=True,
        num_workers=given.get("workers", 0),
        collate_fn=collate,
        ranks=ranks,
        pool=given.get("pool"),
        seeding="batch" if ranks.rank is None else "sample",
        device=given.get("device"),
    )


def main() -> None:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    machine = next((n for n, ranks in enumerate(given.get("machines", [])) if rank in ranks), 0)
    if machine > 0:
        here = replica_group._this_machine()
        replica_group._this_machine = lambda: f"{here} {machine}"
    leaves = given["leaves"]
    if given.get("other_leaves") == rank:
        leaves = dict(reversed(leaves.items()))
    group = list(range(dist.get_world_size()))
    loader = loader_of(given, Ranks(0, 1, replica_group=group, leaves=leaves))
    if "state" in given:
        loader.load_state_dict(given["state"])
    if given.get("visits"):
        loader.record_visits(folder / "visits")
    state: Any = None
    with (folder / f"rank-{rank}").open("a", buffering=1) as file:
        for epoch in range(2):
            for step, batch in enumerate(loader):
                file.write(json.dumps([epoch, leaves_of(batch)]) + "\n")
                if (epoch, step + 1) == (0, given.get("state_after")):
                    state = loader.state_dict()
        file.write(json.dumps(state) + "\n")
        file.write(json.dumps(loader.stats().batch_bytes) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
