# SPDX-License-Identifier: Apache-2.0
"""A job of real gloo ranks whose loader is saved in checkpoints of torch.distributed.checkpoint.

    rank_checkpoints.py FOLDER '{"sizes": [4, 2], "steps": 2, "workers": 1, "order": "mixture"}'

The job runs once with each number of ranks in "sizes". Each run makes some steps, saves
`{"loader": loader}` and ends; the last run makes the rest of the epoch. With "commit", the first
and the third step of a run that saves are not committed, and do not count. Prints as JSON the steps
over all ranks, the same steps of one uninterrupted loader, and the names of the loader's state in
the first checkpoint.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_ranks import run_ranks

from penstock import DataLoader, MixtureSampler, Ranks

COUNT, STEP_SIZE = 60, 12


class Points(torch.utils.data.Dataset[torch.Tensor]):
    """Returns a sample's index and its augmentation."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([torch.tensor([float(index)]), torch.rand(2)])


def make_loader(order: str, workers: int, commit: str | None = None) -> Any:
    options: dict[str, Any] = {"shuffle": True}
    if order == "mixture":
        sampler = MixtureSampler([20, 40], [1, 1], when_exhausted="leave_out")
        options = {"sampler": sampler}
    ranks = Ranks(global_batch_size=STEP_SIZE)
    return DataLoader(Points(), num_workers=workers, ranks=ranks, commit=commit, **options)


def run_rank(rank: int, given: dict[str, Any], folder: Path, number: int, is_last: bool) -> None:
    torch.set_num_threads(1)
    commit = "manual" if given.get("commit") else None
    loader = make_loader(given["order"], given["workers"], commit)
    if number > 0:
        dcp.load({"loader": loader}, checkpoint_id=folder / f"checkpoint-{number - 1}")
    taken = [*_first(loader, None if is_last else given["steps"])]
    if commit is not None:
        if not is_last:
            del taken[0:3:2]  # in flight
        for batch in taken:
            loader.commit(batch)
    batches = [batch.tolist() for batch in taken]
    (folder / f"run-{number}-rank-{rank}").write_text(json.dumps(batches))
    if not is_last:
        dcp.save({"loader": loader}, checkpoint_id=folder / f"checkpoint-{number}")
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, json.dumps(loader.state_dict(), sort_keys=True))
    assert len(set(states)) == 1, "the state is the job's"


def _first(loader: Any, count: int | None) -> Any:
    """Return some batches without requesting one more: the state is the state after the last of
    them."""
    batches = iter(loader)
    for _ in range(len(loader) if count is None else count):
        batch = next(batches, None)
        if batch is None:
            return
        yield batch


def main() -> int:
    folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
    folder.mkdir()
    steps: list[list[list[float]]] = []
    for number, world_size in enumerate(given["sizes"]):
        log, is_last = folder / f"run-{number}.log", number == len(given["sizes"]) - 1
        options = {"given": given, "folder": folder, "number": number, "is_last": is_last}
        codes = run_ranks(world_size, functools.partial(run_rank, **options), log)
        if any(codes):
            print(f"the ranks ended with {codes}", log.read_text(), file=sys.stderr)
            return 1
        paths = [folder / f"run-{number}-rank-{rank}" for rank in range(world_size)]
        of_ranks = [json.loads(path.read_text()) for path in paths]
        steps += [sum(step, []) for step in zip(*of_ranks, strict=True)]
    stored = dcp.FileSystemReader(folder / "checkpoint-0").read_metadata().storage_data
    whole = [batch.tolist() for batch in make_loader(given["order"], 0)]
    print(json.dumps({"steps": steps, "whole": whole, "stored": [one.fqn for one in stored]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
