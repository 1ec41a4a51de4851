# SPDX-License-Identifier: Apache-2.0
"""Pools of loaders that name none: the pool of ``PENSTOCK_POOL``, or else the one that a rank of
the job has announced.

The variable, or the announcement, applies to a whole program, whose loaders were not written with
it in mind. A loader that the pool can serve is served. Another one works as without a pool, after a
warning that gives the reason: a loader with ``num_workers=0`` whose random numbers are drawn in
this process, and would differ with a pool (``seeding="batch"`` makes them the same); one with
options that a pool does not have; one whose dataset cannot be sent; and one whose batches cannot be
sent back, which the answer to its first request shows.

A loader with ``pool=`` asks for a pool itself. It gets all its batches from the pool with
``num_workers=0``, and options that a pool does not have, and a dataset or a batch that cannot be
sent, are errors.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from penstock.compat.iterators import BaseIterator
from penstock.errors import RankError, UnsentBatchError
from penstock.loader.grouped_arguments import is_address, pool_in_use
from penstock.loader.loader_run import RunSnapshot, run_of
from penstock.loader.options import LoaderOptions
from penstock.loader.options_check import Obstacle, obstacle_to_pool
from penstock.program_line import warn
from penstock.ranks.job_store import key_prefix, stores_of_job
from penstock.stream.shard_state import is_stateful
from penstock.worker.fetching import FetchSpec

POOL_VARIABLE = "PENSTOCK_POOL"


class VariablePool(str):
    """Address of a pool that the variable names and the program does not.

    It reads as a plain str. A framework that rebuilds a loader from another's attributes passes it
    on, so that the new loader still counts as one that asked for no pool itself.
    """

    source = POOL_VARIABLE
    described = f"the environment variable {POOL_VARIABLE}"
    pool_remedy = 'pass pool="" to this DataLoader, or unset the variable, to use no pool'


class AnnouncedPool(VariablePool):
    """Address of a pool that a rank names, and neither the program nor the variable."""

    source = described = "penstock.announce_pool()"
    pool_remedy = 'pass pool="" to this DataLoader to use no pool'


def announce_pool(address: str) -> None:
    """Set the pool for every rank of this job.

    The address is written to the job's store: the store of the default process group, and the one
    served by torchrun. A loader made afterwards, on any rank, uses the pool as if ``PENSTOCK_POOL``
    named it; the argument ``pool=`` and that variable take precedence. If ranks make their loaders
    at about the same time as this call, let them meet in a barrier first.

    Args:
        address (str): Address of the pool's controller, such as ``"tcp://host:7000"``, reachable
            from all ranks.

    Raises:
        ValueError: If ``address`` is not the address of a controller.
        RankError: If the process has no such store.

    Example::

        if dist.get_rank() == 0:
            penstock.announce_pool(os.environ["HEAD"])
        dist.barrier()
        loader = penstock.DataLoader(dataset, num_workers=2, ranks=penstock.Ranks())
    """
    if not is_address(address):
        raise ValueError(
            f"announce_pool() requires the address of a controller, such as 'tcp://host:7000', got "
            f"{address!r}"
        )
    stores = stores_of_job()
    if not stores:
        raise RankError(
            "announce_pool() requires other ranks, got a process without a process group that "
            "torchrun did not start; call init_process_group() first, or pass pool= to the loader"
        )
    for store in stores:
        store.set(_announcement_key(), address)


def announced_pool() -> str | None:
    """Return the address that a rank of this job has announced. Does not wait."""
    for store in stores_of_job():
        if store.check([_announcement_key()]):
            address: bytes = store.get(_announcement_key())
            return address.decode()
    return None


def named_pool(pool: str | None) -> str | None:
    """Return the pool that the program itself asks for; "" names none."""
    return None if isinstance(pool, VariablePool) else pool or None


def use_variable(loader: DataLoader[Any], pool: str | None) -> None:
    """Give ``loader``, which was constructed with ``pool``, the variable's pool, or warn.

    The constructor calls it. Raises ValueError when the variable holds no address.
    """
    if pool is not None and not isinstance(pool, VariablePool):
        return
    address = pool or _pool_of_variable() or _pool_of_job()
    if not address:
        return
    options = LoaderOptions.of(loader)
    obstacle = _obstacle_of_program(options) or obstacle_to_pool(options)
    if obstacle is None:
        loader.pool = address
    else:
        _warn(options, address, obstacle)


def drop_pool_if_unsendable(loader: DataLoader[Any]) -> None:
    """Take the variable's pool from a loader whose dataset cannot be sent to it, and warn.

    For a state before the first ``iter()``, which belongs to one stream or the other: pickles the
    dataset once, without keeping the result.
    """
    address, run = pool_in_use(loader).address, run_of(loader)
    if not isinstance(address, VariablePool) or run.is_known_sendable:
        return
    options = LoaderOptions.of(loader)
    try:
        from penstock.pool.pool_job import check_can_be_sent  # loaded if a pool is used

        spec = FetchSpec(
            options.dataset_kind,
            options.dataset,
            options.auto_collation,
            options.collate_fn,
            options.drop_last,
            options.fetch_threads,
        )
        check_can_be_sent(spec, options.worker_init_fn)
    except pickle.PicklingError as error:
        _drop_pool(loader, _obstacle_of(error, address))
    else:
        run.is_known_sendable = True


def _obstacle_of(error: pickle.PicklingError, address: VariablePool) -> Obstacle:
    return Obstacle(str(error).removesuffix(pool_remedy(address)), "do that")


def _drop_pool(loader: DataLoader[Any], obstacle: Obstacle) -> None:
    """Take the variable's pool from a loader, and warn."""
    options = LoaderOptions.of(loader)
    assert isinstance(options.pool, VariablePool)
    loader.pool = None
    _warn(options, options.pool, obstacle)


def begin_sendable(loader: DataLoader[Any], begin: Callable[[], BaseIterator]) -> BaseIterator:
    """Make the loader's next iterator by ``begin``; if the dataset cannot be pickled, warn, and
    make it without the variable's pool from the same draws."""
    address, run = pool_in_use(loader).address, run_of(loader)
    if not isinstance(address, VariablePool) or run.is_known_sendable:
        return begin()
    before = RunSnapshot.take(run, loader)
    try:
        iterator = begin()
    except pickle.PicklingError as error:
        _restore(loader, before)
        _drop_pool(loader, _obstacle_of(error, address))
        return begin()
    run.is_known_sendable = True
    return iterator


def _restore(loader: DataLoader[Any], before: RunSnapshot) -> None:
    loader._iterator = None
    before.restore(run_of(loader))
    before.generators.restore_globals()
    before.generators.restore_own(loader)


def drop_pool_if_state_has_none(loader: DataLoader[Any], state: dict[str, Any]) -> None:
    """Take the variable's pool from a loader that is to continue from the state of a loader without
    a pool: that state belongs to another stream."""
    built = state.get("built")
    seeding = built.get("seeding") if isinstance(built, dict) else None
    if isinstance(pool_in_use(loader).address, VariablePool) and seeding == "worker":
        seen = "load_state_dict() received the state of a loader without a pool"
        _drop_pool(loader, Obstacle(seen, "start without that state"))


def begin_on_trial(loader: DataLoader[Any], begin: Callable[[], BaseIterator]) -> BaseIterator:
    """Make the loader's next iterator by ``begin``; if the pool's workers do not send the batches,
    make it without the pool, from the draws by which the first batch was requested."""
    if not is_on_trial(loader):
        return begin()
    before = RunSnapshot.take(run_of(loader), loader)
    iterator = begin()
    if not is_on_trial(loader) or has_sent_batch(loader, iterator):
        return iterator
    _restore(loader, before)
    return begin()


def is_on_trial(loader: DataLoader[Any]) -> bool:
    """Return whether the workers of the variable's pool have yet to show that they send batches."""
    if not isinstance(pool_in_use(loader).address, VariablePool):
        return False
    options, run = LoaderOptions.of(loader), run_of(loader)
    return (
        not run.are_batches_sent
        and not options.trust_workers
        and bool(options.in_order)
        and options.replica_group is None
        # A sampler's state, and a loaded state, would have to be put back.
        and run.loaded_state is None
        and not is_stateful(options.sampler)
        and not is_stateful(options.batch_sampler)
    )


def has_sent_batch(loader: DataLoader[Any], iterator: Any) -> bool:
    """Wait for the first batch of ``iterator``, which then waits for next().

    Return False if a worker refused to send it: the iterator is ended, and the loader left without
    the pool, with a warning.
    """
    options, run = LoaderOptions.of(loader), run_of(loader)
    first = iterator.first_answer()
    if not isinstance(first, UnsentBatchError):
        run.are_batches_sent = not isinstance(first, Exception)
        return True
    if iterator._recipe is None and options.is_map:
        # The program's sampler is not restarted: its next order may differ.
        run.begun_order = itertools.chain([*iterator._unanswered()], iterator._sampler_iter)
    iterator.source.may_be_cached = False
    iterator._shutdown_workers()
    seen, _, remedy = first.refusal.partition("; ")
    _drop_pool(loader, Obstacle(seen, remedy.partition(" to accept ")[0]))
    return False


def pool_remedy(pool: str | None) -> str:
    """Return the sentence to append to an error caused by a loader's pool."""
    if not isinstance(pool, VariablePool):
        return ""
    return f"; the pool is named by {pool.described}: {pool.pool_remedy}"


def _pool_of_variable() -> VariablePool | None:
    address = os.environ.get(POOL_VARIABLE)
    if not address:
        return None
    if not is_address(address):
        raise ValueError(
            f"the environment variable {POOL_VARIABLE} must be the address of a controller, such "
            f"as 'tcp://host:7000', got {address!r}"
        )
    return VariablePool(address)


def _pool_of_job() -> AnnouncedPool | None:
    is_job = dist.is_available() and dist.is_initialized()
    if not is_job and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address = announced_pool()
    return None if address is None else AnnouncedPool(address)


def _announcement_key() -> str:
    return f"{key_prefix()}/pool"


def _obstacle_of_program(options: LoaderOptions) -> Obstacle | None:
    if options.num_workers == 0 and not options.is_seeded_by_batch:
        return Obstacle(
            "num_workers=0 requests batches that this process makes with its random numbers, which "
            "differ from the random numbers of a pool's workers",
            "pass seeding='batch', with which they are the same, num_workers=1 or more, or pool= "
            "with the address",
        )
    return None


def _warn(options: LoaderOptions, address: VariablePool, obstacle: Obstacle) -> None:
    where = "this process" if options.num_workers == 0 else "workers of this process"
    warn(
        f"{address.source} names the pool {str(address)!r}, but batches of this DataLoader "
        f"({type(options.dataset).__name__}) are made by {where}: {obstacle.seen}; "
        f"{obstacle.remedy} "
        f'to have them made by the pool, or pass pool="" to silence this warning',
    )
