# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job compare what their loaders read, before the first batch.

Ranks that read different orders train on some samples twice and on others never, or wait for each
other for ever at the end of an epoch. Each rank writes what its order follows from to the job's
store, and reads what the others wrote. The store is that of the default process group, or the one
that torchrun serves; without either nothing is compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from penstock._version import __version__
from penstock.errors import RankError
from penstock.loader.dataset_fingerprint import dataset_fingerprint
from penstock.loader.job_store import restart_prefix, stores_of_job
from penstock.loader.loader_face import LoaderFace
from penstock.loader.ranks_waiting import read_of_ranks
from penstock.loader.variable_pool import AnnouncedPool
from penstock.sampling.job_rank import JobRank
from penstock.seams.iterators import DatasetKind


def compare_ranks(loader: LoaderFace, facts: dict[str, Any]) -> None:
    """Raises RankError where another rank's loader reads another order, or a rank does not come.

    The n-th comparison of one rank is with the n-th of the others. Waits for them, for
    ``job_store.WAIT_S_MAX`` at most.
    """
    job = JobRank(loader.rank, loader.world_size)
    stores = stores_of_job() if job.world_size > 1 else []
    if not stores:
        return
    prefix, store = restart_prefix(), stores[0]
    number = store.add(f"{prefix}/comparisons of rank {job.rank}", 1)
    store = dist.PrefixStore(f"{prefix}/{number}", store)  # type: ignore[attr-defined]
    store.set(str(job.rank), json.dumps(facts))
    keys = {rank: str(rank) for rank in range(job.world_size)}
    deed = "begin an epoch of its loader with shard_by_rank"
    who = f"rank {job.rank} of {job.world_size}"
    check_alike(
        read_of_ranks(store, keys, who=who, deed=deed),
        (job.rank, facts),
        whose="the ranks",
        remedy="with shard_by_rank all ranks read one order, so build the loaders alike on all "
        "ranks",
    )


def check_alike(
    of_ranks: Mapping[int, Mapping[str, Any]],
    mine: tuple[int, Mapping[str, Any]],
    *,
    whose: str,
    remedy: str,
) -> None:
    """Raises RankError for the first fact of mine, a rank and its facts, that another rank has
    differently. whose, remedy: for its message.
    """
    my_rank, my_facts = mine
    for name, my_fact in my_facts.items():
        for rank, facts in of_ranks.items():
            if facts.get(name) != my_fact:
                raise RankError(
                    f"the loaders of {whose} differ: rank {my_rank} has {name} {my_fact!r} and "
                    f"rank {rank} has {name} {facts.get(name)!r}; {remedy}"
                )


def facts_of_replica(loader: LoaderFace, place: dict[str, Any]) -> dict[str, Any]:
    """What the batches of a rank in a replica group follow from."""
    generator = torch.default_generator if loader.generator is None else loader.generator
    return {
        "rank of its group": loader.rank,
        "number of groups": loader.world_size,
        **_what_is_read(loader),
        "sampler": type(loader.sampler).__qualname__,
        "batch_sampler": type(loader.batch_sampler).__qualname__,
        "batch_size": loader.batch_size,
        "generator state (SHA-256)": _digest(generator),
        **place,
    }


def facts_of(loader: LoaderFace, place: dict[str, Any]) -> dict[str, Any]:
    """What the order of a loader follows from. ``place`` is where its stream goes on."""
    sampler = loader.batch_sampler
    return {
        "world_size": loader.world_size,
        **_what_is_read(loader),
        "sampler": type(sampler.sampler).__qualname__,
        "samples in an epoch": len(sampler.sampler),
        "samples of a step": sampler.step_size,
        "remainder": sampler.remainder,
        "generator state (SHA-256)": _digest(loader.generator),
        "announced pool": str(loader.pool) if isinstance(loader.pool, AnnouncedPool) else None,
        **place,
    }


def facts_of_shards(loader: LoaderFace, place: dict[str, Any]) -> dict[str, Any]:
    """What the batches of shards follow from. ``place`` is where a loader goes on."""
    return {
        "world_size": loader.world_size,
        **_what_is_read(loader),
        "shards": loader.shards,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "remainder": loader.remainder,
        "generator state (SHA-256)": _digest(loader.generator),
        "announced pool": str(loader.pool) if isinstance(loader.pool, AnnouncedPool) else None,
        **place,
    }


def _what_is_read(loader: LoaderFace) -> dict[str, Any]:
    """The dataset, and by what software. Only a map-style dataset has a length and content."""
    dataset = loader.dataset
    facts = {
        "penstock": __version__,
        "torch": torch.__version__,
        "dataset": type(dataset).__qualname__,
    }
    if loader._dataset_kind != DatasetKind.Map:
        return facts
    content = dataset_fingerprint(dataset)
    return {**facts, "dataset length": len(dataset), "dataset fingerprint": content}


def _digest(generator: torch.Generator) -> str:
    return hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:16]
