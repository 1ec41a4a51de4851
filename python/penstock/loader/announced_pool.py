# SPDX-License-Identifier: Apache-2.0
"""A pool that one rank announces to the others of its job."""

from __future__ import annotations

from penstock.errors import RankError
from penstock.loader.job_store import key_prefix, stores_of_job
from penstock.loader.pool_options import is_address


def announce_pool(address: str) -> None:
    """Gives every rank of this job the pool whose controller is at ``address``.

    The address is written to the job's store: that of the default process group, and the one that
    torchrun serves. A loader that is made after that, on any rank, uses the pool as if
    ``PENSTOCK_POOL`` named it; the argument ``pool=`` and that variable come first. Ranks that make
    their loaders at once with the one that announces should meet in a barrier before.

    address: that of a controller, as in "tcp://host:7000". All ranks have to reach it there.

    Raises ``ValueError`` for anything else, and ``RankError`` in a process that has no such store.

    Example::

        if dist.get_rank() == 0:
            penstock.announce_pool(os.environ["HEAD"])
        dist.barrier()
        loader = penstock.DataLoader(dataset, num_workers=2, shard_by_rank=True)
    """
    if not is_address(address):
        raise ValueError(
            f"announce_pool() was given {address!r}; the address of a controller is expected, as "
            f"in 'tcp://host:7000'"
        )
    stores = stores_of_job()
    if not stores:
        raise RankError(
            "announce_pool() was called in a process without a process group that torchrun has not "
            "started either, so there are no other ranks to tell; call init_process_group() "
            "before, or pass pool= to the loader"
        )
    for store in stores:
        store.set(_key(), address)


def announced_pool() -> str | None:
    """The address that a rank of this job has announced. Waits for nobody."""
    for store in stores_of_job():
        if store.check([_key()]):
            address: bytes = store.get(_key())
            return address.decode()
    return None


def _key() -> str:
    return f"{key_prefix()}/pool"
