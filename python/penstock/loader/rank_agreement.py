# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job compare what their loaders read, before the first batch.

Ranks that read different orders train on some samples twice and on others never, or wait for each
other for ever at the end of an epoch. Each rank writes what its order follows from to the job's
store, and reads what the others wrote. The store is that of the default process group, or the one
that torchrun serves; without either nothing is compared.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from penstock._version import __version__
from penstock.errors import RankError
from penstock.loader.loader_face import LoaderFace
from penstock.program_line import warn
from penstock.sampling.job_rank import JobRank
from penstock.seams.process_group import default_store

WAIT_S_MAX = 600.0
_WARN_AFTER_S = 30.0
_POLL_S = 2.0  # the longest wait without a look at the clock


def compare_ranks(loader: LoaderFace, facts: dict[str, Any]) -> None:
    """Raises RankError where another rank's loader reads another order, or a rank does not come.

    The n-th comparison of one rank is with the n-th of the others. Waits for them, for
    ``WAIT_S_MAX`` at most.
    """
    job = JobRank(loader.rank, loader.world_size)
    store = _store_of_job()
    if job.world_size == 1 or store is None:
        return
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a store may outlive its ranks
    prefix = f"penstock/{run}/{restart}"
    number = store.add(f"{prefix}/comparisons of rank {job.rank}", 1)
    store = dist.PrefixStore(f"{prefix}/{number}", store)  # type: ignore[attr-defined]
    store.set(str(job.rank), json.dumps(facts))
    _wait_for_all(store, job)
    others = {rank: json.loads(store.get(str(rank))) for rank in range(job.world_size)}
    for name, mine in facts.items():
        for rank, theirs in others.items():
            if theirs.get(name) != mine:
                raise RankError(
                    f"the loaders of the ranks differ: rank {job.rank} has {name} {mine!r} and "
                    f"rank {rank} has {name} {theirs.get(name)!r}; with shard_by_rank all ranks "
                    f"read one order, so build the loaders alike on all ranks"
                )


def facts_of(loader: LoaderFace, place: dict[str, Any]) -> dict[str, Any]:
    """What the order of a loader follows from. ``place`` is where its stream goes on."""
    state = loader.generator.get_state().numpy().tobytes()
    sampler = loader.batch_sampler
    return {
        "world_size": loader.world_size,
        "penstock": __version__,
        "torch": torch.__version__,
        "dataset": type(loader.dataset).__qualname__,
        "dataset length": len(loader.dataset),
        "sampler": type(sampler.sampler).__qualname__,
        "samples in an epoch": len(sampler.sampler),
        "samples of a step": sampler.step_size,
        "remainder": sampler.remainder,
        "generator state (SHA-256)": hashlib.sha256(state).hexdigest()[:16],
        **place,
    }


def _store_of_job() -> Any:
    if not dist.is_available():
        return None
    store = default_store()
    if store is not None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = datetime.timedelta(seconds=WAIT_S_MAX)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, timeout=timeout
    )


def _wait_for_all(store: Any, job: JobRank) -> None:
    began = time.monotonic()
    is_told = False
    missing = [rank for rank in range(job.world_size) if rank != job.rank]
    while missing:
        try:
            store.wait([str(missing[0])], datetime.timedelta(seconds=_POLL_S))
        except dist.DistStoreError:
            pass
        missing = [rank for rank in missing if not store.check([str(rank)])]
        waited_s = time.monotonic() - began
        spoken = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        if missing and waited_s > WAIT_S_MAX:
            raise RankError(
                f"rank {job.rank} has waited {waited_s:.0f} s for rank {spoken} of "
                f"{job.world_size} to begin an epoch of its loader with shard_by_rank; every rank "
                f"has to iterate over its loader: see whether these ranks live, and what they do"
            )
        if missing and waited_s > _WARN_AFTER_S and not is_told:
            is_told = True
            warn(
                f"rank {job.rank} waits for rank {spoken} of {job.world_size} to begin an epoch of "
                f"its loader with shard_by_rank, for {WAIT_S_MAX:.0f} s at most"
            )
