# SPDX-License-Identifier: Apache-2.0
"""Agreement between the loaders of a job's ranks.

Ranks that read different orders train on some samples twice and on others never, or deadlock at the
end of an epoch. So they compare their loaders' inputs before the first batch: each rank writes the
inputs of its order to the job's store, and reads the other ranks' inputs. The store belongs to the
default process group, or is the one that torchrun serves; without either, no comparison is made.

A dataset is identified by a short text, which distinguishes datasets of one class and length
(:func:`penstock.loader.data_version.dataset_fingerprint`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from penstock._version import __version__
from penstock.errors import UnsupportedError
from penstock.loader.data_version import dataset_fingerprint
from penstock.loader.loader_run import LoaderRun, place_of
from penstock.loader.options import LoaderOptions
from penstock.loader.variable_pool import AnnouncedPool
from penstock.ranks.job_store import (
    check_alike,
    connection_of_threads,
    read_of_ranks,
    restart_prefix,
    stores_of_ranks,
)
from penstock.ranks.steps import CommonSteps, StepAgreement


def compare_ranks(options: LoaderOptions, run: LoaderRun, facts: dict[str, Any]) -> None:
    """Raise RankError if another rank's loader reads another order, or if a rank is missing.

    The n-th comparison of one rank is with the n-th of the others. Waits for them, for
    ``job_store.WAIT_S_MAX`` at most.
    """
    job = options.job_rank
    stores = stores_of_ranks(job.world_size) if job.world_size > 1 else []
    if not stores:
        return
    prefix, store = _prefix_of(run), stores[0]
    number = store.add(f"{prefix}/comparisons of rank {job.rank}", 1)
    folder = run.resize_past.folder = f"{prefix}/{number}"
    store = dist.PrefixStore(folder, store)  # type: ignore[attr-defined]
    store.set(str(job.rank), json.dumps(facts))
    keys = {rank: str(rank) for rank in range(job.world_size)}
    task = f"start an epoch of its loader with {options.sharding_words}"
    who = f"rank {job.rank} of {job.world_size}"
    check_alike(
        read_of_ranks(store, keys, who=who, task=task),
        (job.rank, facts),
        whose="the ranks",
        remedy=f"with {options.sharding_words}, all ranks share one order, so create the loaders "
        f"with the same arguments on all ranks",
    )


def facts_of_replica(options: LoaderOptions, place: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that determine the batches of a rank in a replica group."""
    leaves = options.leaf_readers
    return {
        "rank of its group": options.rank,
        "number of groups": options.world_size,
        **_dataset_facts(options),
        "sampler": type(options.sampler).__qualname__,
        "batch_sampler": type(options.batch_sampler).__qualname__,
        "batch_size": options.batch_size,
        "on_error": options.on_error,
        "max_skipped": options.max_skipped,
        "leaves": None if leaves is None else str(leaves),  # their order determines the leader
        "generator state (SHA-256)": _digest(options.generator),
        **place,
    }


def facts_of(options: LoaderOptions, place: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that determine a loader's order. ``place`` is where its stream continues."""
    sampler = options.batch_sampler
    return {
        "world_size": options.world_size,
        **_dataset_facts(options),
        "sampler": type(sampler.sampler).__qualname__,
        "samples in an epoch": len(sampler.sampler),
        "samples of a step": sampler.step_size,
        "remainder": sampler.remainder,
        "share": "run" if sampler.owned_count is None else "by_cache",
        "generator state (SHA-256)": _digest(options.generator),
        "announced pool": str(options.pool) if isinstance(options.pool, AnnouncedPool) else None,
        **place,
    }


def facts_of_shards(options: LoaderOptions, place: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that determine the batches of shards. ``place`` is where a loader
    continues."""
    return {
        "world_size": options.world_size,
        **_dataset_facts(options),
        "shards": options.shards,
        "batch_size": options.batch_size,
        "drop_last": options.drop_last,
        "remainder": options.remainder,
        "generator state (SHA-256)": _digest(options.generator),
        "announced pool": str(options.pool) if isinstance(options.pool, AnnouncedPool) else None,
        **place,
    }


def check_replicable(options: LoaderOptions) -> None:
    """Raise ``UnsupportedError`` for a loader whose batches cannot be handed on."""
    if not options.is_map:
        raise UnsupportedError(
            f"replica_group={options.replica_group} requires a map-style dataset, got the "
            f"IterableDataset {type(options.dataset).__name__}, whose batches cannot be forwarded "
            f"to other ranks because the length of its shards is unknown; leave replica_group out"
        )


def steps_of_job(options: LoaderOptions, run: LoaderRun) -> CommonSteps | None:
    """Return the common steps for the loader's next iterator; None if its rank ends by itself.

    The n-th loader of one rank that asks agrees with the n-th of the others.
    """
    if not options.reads_shards_of_rank or options.remainder != "drop" or options.world_size == 1:
        return None
    if run.step_agreement is None:
        stores = stores_of_ranks(options.job_rank.world_size)
        if not stores:
            return None
        prefix, store = f"{_prefix_of(run)}/steps", stores[0]
        number = store.add(f"{prefix}/loaders of rank {options.rank}", 1)
        connect = partial(connection_of_threads, store)
        run.step_agreement = StepAgreement(connect, options.job_rank, f"{prefix}/{number}")
    return CommonSteps(run.step_agreement)


def _prefix_of(run: LoaderRun) -> str:
    """Return the prefix of the ranks' keys. After a resize, ranks that joined have not counted the
    meetings before it."""
    return restart_prefix() if run.resize_folder is None else run.resize_folder


def facts_of_resize(options: LoaderOptions, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that ranks have to have in common at another size. ``options`` are for that
    size; ``state`` is where the stream continues."""
    facts = (facts_of_shards if options.reads_shards_of_rank else facts_of)(options, {})
    # The generator may have been drawn from since the epoch's start.
    del facts["generator state (SHA-256)"]
    own = json.dumps(state["generators"]["own"], sort_keys=True)
    return {
        **facts,
        **place_of(state),
        "base seed": state["base_seed"],
        "generator state (SHA-256)": hashlib.sha256(own.encode()).hexdigest()[:16],
    }


def _dataset_facts(options: LoaderOptions) -> dict[str, Any]:
    """Return facts about the dataset, and the software versions. Only a map-style dataset has a
    length and content.
    """
    dataset = options.dataset
    facts = {
        "penstock": __version__,
        "torch": torch.__version__,
        "dataset": type(dataset).__qualname__,
    }
    if not options.is_map:
        return facts
    content = dataset_fingerprint(dataset)
    return {**facts, "dataset length": len(dataset), "dataset fingerprint": content}


def _digest(generator: torch.Generator | None) -> str:
    generator = generator or torch.default_generator
    return hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest()[:16]
