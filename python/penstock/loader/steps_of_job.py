# SPDX-License-Identifier: Apache-2.0
"""Whether a loader's ranks have to agree on the steps of an epoch, and by way of what."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.loader.loader_face import LoaderFace
from penstock.loader.options import reads_shards_of_rank
from penstock.sampling.job_rank import JobRank

if TYPE_CHECKING:
    from penstock.loader.common_steps import CommonSteps


def steps_of_job(loader: LoaderFace) -> CommonSteps | None:
    """For the loader's next iterator; None where its rank ends by itself.

    The n-th loader of one rank that asks agrees with the n-th of the others.
    """
    if not reads_shards_of_rank(loader) or loader.remainder != "drop" or loader.world_size == 1:
        return None
    # Here, so that only jobs of several ranks need the private name that finds their store.
    from penstock.loader.common_steps import CommonSteps
    from penstock.loader.job_store import connection_of_threads, restart_prefix, stores_of_job
    from penstock.loader.step_agreement import StepAgreement

    if loader._step_agreement is None:
        stores = stores_of_job()
        if not stores:
            return None
        prefix, store = f"{restart_prefix()}/steps", stores[0]
        number = store.add(f"{prefix}/loaders of rank {loader.rank}", 1)
        job = JobRank(loader.rank, loader.world_size)
        connect = partial(connection_of_threads, store)
        loader._step_agreement = StepAgreement(connect, job, f"{prefix}/{number}")
    return CommonSteps(loader._step_agreement)
