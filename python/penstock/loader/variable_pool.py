# SPDX-License-Identifier: Apache-2.0
"""Which loaders of a program get their batches from the pool that ``PENSTOCK_POOL`` names, or else
the one that a rank of its job has announced (:mod:`.announced_pool`).

The variable, or the announcement, speaks for a whole program, whose loaders were not written with
it in mind. A loader that the pool can serve is served. Another one works as without a pool, after a
warning that says why: one with ``num_workers=0``, which asks for batches of this process's own
dataset object; one with options that a pool has not; and one whose dataset cannot be sent.

A loader that is given ``pool=`` asks for a pool itself. It has all its batches from the pool with
``num_workers=0``, and options that a pool has not and a dataset that cannot be sent are errors.
"""

from __future__ import annotations

import os
import pickle

import torch.distributed as dist

from penstock.loader.loader_face import LoaderFace
from penstock.loader.pool_options import Obstacle, is_address, obstacle_to_pool
from penstock.program_line import warn
from penstock.worker.fetching import FetchSpec

POOL_VARIABLE = "PENSTOCK_POOL"


class VariablePool(str):
    """The address of a pool that the variable names and the program does not.

    A str to everybody who reads it. A framework that builds a loader anew from the attributes of
    another hands it on, so that the new one is still a loader that asked for no pool itself.
    """

    source = POOL_VARIABLE
    described = f"the environment variable {POOL_VARIABLE}"
    way_out = 'pass pool="" to this DataLoader, or unset the variable, to do without'


class AnnouncedPool(VariablePool):
    """The address of a pool that neither the program nor the variable names, but a rank."""

    source = described = "penstock.announce_pool()"
    way_out = 'pass pool="" to this DataLoader to do without'


def named_pool(pool: str | None) -> str | None:
    """The pool that the program itself asks for; "" names none."""
    return None if isinstance(pool, VariablePool) else pool or None


def use_variable(loader: LoaderFace, pool: str | None) -> None:
    """Gives ``loader``, which was constructed with ``pool``, the pool of the variable, or warns.

    To be called by the constructor. Raises ValueError when the variable holds no address.
    """
    if pool is not None and not isinstance(pool, VariablePool):
        return
    address = pool or _pool_of_variable() or _pool_of_job()
    if not address:
        return
    obstacle = _obstacle_of_program(loader) or obstacle_to_pool(loader)
    if obstacle is None:
        loader.pool = address
    else:
        _warn(loader, address, obstacle)


def leave_unsendable(loader: LoaderFace) -> None:
    """Takes the variable's pool from a loader whose dataset cannot be sent to it, and warns.

    Pickles the dataset once, into nothing, so that it is known before anything is drawn for an
    epoch.
    """
    if not isinstance(loader.pool, VariablePool) or loader._is_known_sendable:
        return
    try:
        from penstock.pool.pool_job import check_can_be_sent  # loaded by those who use a pool

        spec = FetchSpec(
            loader._dataset_kind,
            loader.dataset,
            loader._auto_collation,
            loader.collate_fn,
            loader.drop_last,
            loader.fetch_threads,
        )
        check_can_be_sent(spec, loader.worker_init_fn)
    except pickle.PicklingError as error:
        address, loader.pool = loader.pool, None
        _warn(loader, address, Obstacle(str(error), "do that"))
    else:
        loader._is_known_sendable = True


def way_out(pool: str | None) -> str:
    """The sentence to add to an error that the pool of a loader is to blame for."""
    if not isinstance(pool, VariablePool):
        return ""
    return f"; the pool is the one that {pool.described} names: {pool.way_out}"


def _pool_of_variable() -> VariablePool | None:
    address = os.environ.get(POOL_VARIABLE)
    if not address:
        return None
    if not is_address(address):
        raise ValueError(
            f"the environment variable {POOL_VARIABLE} is {address!r}; the address of a controller "
            f"is expected, as in 'tcp://host:7000'"
        )
    return VariablePool(address)


def _pool_of_job() -> AnnouncedPool | None:
    is_job = dist.is_available() and dist.is_initialized()
    if not is_job and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # Here, so that only jobs of several ranks need the private name that finds their store.
    from penstock.loader.announced_pool import announced_pool

    address = announced_pool()
    return None if address is None else AnnouncedPool(address)


def _obstacle_of_program(loader: LoaderFace) -> Obstacle | None:
    if loader.num_workers == 0:
        return Obstacle(
            "num_workers=0 asks for batches that this process makes of its own dataset object, "
            "where a pool's workers have copies",
            "pass num_workers=1 or more, or pool= with the address",
        )
    return None


def _warn(loader: LoaderFace, address: VariablePool, obstacle: Obstacle) -> None:
    where = "this process" if loader.num_workers == 0 else "workers of this process"
    warn(
        f"{address.source} names the pool {str(address)!r}, but batches of this DataLoader "
        f"({type(loader.dataset).__name__}) come from {where}: {obstacle.seen}; {obstacle.remedy} "
        f'to have them from the pool, or pass pool="" to have no warning',
    )
