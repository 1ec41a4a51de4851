# SPDX-License-Identifier: Apache-2.0
"""The key-value store that the ranks of this process's job share.

It carries small messages before training starts: the inputs of the ranks' orders
(:func:`check_alike`), the address of the job's pool, and the job's identity for the pool
(:func:`job_identity`). While an iterable dataset is read, the ranks agree on their steps through it
(:mod:`.steps`).
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock import _C
from penstock.errors import RankError
from penstock.program_line import warn
from penstock.ranks.sharding import JobRank

WAIT_S_MAX = 600.0
WARN_AFTER_S = 30.0
_POLL_S = 2.0  # the longest wait without a look at the clock

_agent_stores: dict[tuple[int, str, int], Any] = {}  # by process, address and port
# Connections for the threads of each process, by the store that they connect to.
_connections: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()
_connecting = threading.Lock()


def stores_of_job() -> list[Any]:
    """Return the store of the default process group and the one that torchrun serves, if they
    exist. A process that works for a loader has none: its parent has the connection.
    """
    if not dist.is_available() or torch.utils.data.get_worker_info() is not None:
        return []
    stores = [_default_store(), _agent_store()]
    return [store for store in stores if store is not None]


def stores_of_ranks(world_size: int) -> list[Any]:
    """Return the stores in which ``world_size`` ranks can meet: none if they are more than the
    processes that share the store, as the replicas of torchft are."""
    return stores_of_job() if world_size <= JobRank.of(None, None).world_size else []


def key_prefix() -> str:
    """Return the prefix of every penstock key, since a store may serve several runs in turn."""
    return f"penstock/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"


def restart_prefix() -> str:
    """Return the prefix of keys for this start of the ranks: a store may outlive them."""
    return f"{key_prefix()}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def job_identity() -> str:
    """Return a text that all ranks of the job have, and no other job; empty without a job.

    A process group may exist without a launcher, so its ranks agree on a text: the first of them
    writes it to their store. No rank waits for another.
    """
    store = _default_store() if dist.is_available() else None
    if store is None:
        return _C.identity_of_launched_job()
    text: bytes = store.compare_set(f"{restart_prefix()}/identity", "", secrets.token_hex(16))
    return text.decode()


def connection_of_threads(store: Any) -> Any:
    """Return another connection to ``store``, for short requests from threads other than the
    trainer's.

    All loaders of a process share it: torch takes 5 s for some of the connections that several
    ranks make at the same time, and a program may make a loader for each epoch. Blocks meanwhile.
    """
    with _connecting:
        pid, connection = _connections.get(store, (0, None))
        if pid != os.getpid():
            connection = store.clone()
            _connections[store] = (os.getpid(), connection)
        return connection


def format_ranks(ranks: Sequence[int]) -> str:
    """Format the numbers of ranks for a message, of which there may be many."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def read_of_ranks(
    store: Any,
    keys: Mapping[int, str],
    *,
    who: str,
    task: str,
    duty: str = "iterate over its loader",
) -> dict[int, Any]:
    """Return the JSON values that the ranks have written, each under its key.

    Waits for them, for ``WAIT_S_MAX`` at most. who, task, duty: for messages: who waits, the
    action expected from the others, and the call that takes it. Raises RankError.
    """
    began = time.monotonic()
    has_warned = False
    missing = [rank for rank, key in keys.items() if not store.check([key])]
    while missing:
        try:
            store.wait([keys[missing[0]]], datetime.timedelta(seconds=_POLL_S))
        except dist.DistStoreError:
            pass
        missing = [rank for rank in missing if not store.check([keys[rank]])]
        waited_s = time.monotonic() - began
        listed = format_ranks(missing)
        if missing and waited_s > WAIT_S_MAX:
            raise RankError(
                f"{who} has waited {waited_s:.0f} s for rank {listed} to {task}; every rank must "
                f"{duty}: check whether these ranks are alive, and where they are "
                f"blocked"
            )
        if missing and waited_s > WARN_AFTER_S and not has_warned:
            has_warned = True
            warn(f"{who} waits for rank {listed} to {task}, for at most {WAIT_S_MAX:.0f} s")
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def check_alike(
    of_ranks: Mapping[int, Mapping[str, Any]],
    mine: tuple[int, Mapping[str, Any]],
    *,
    whose: str,
    remedy: str,
) -> None:
    """Raise RankError for the first fact of mine, a rank and its facts, that differs on another
    rank. whose, remedy: for its message.
    """
    my_rank, my_facts = mine
    for name, my_fact in my_facts.items():
        for rank, facts in of_ranks.items():
            if facts.get(name) != my_fact:
                raise RankError(
                    f"the loaders of {whose} differ: rank {my_rank} has {name} {my_fact!r} and "
                    f"rank {rank} has {name} {facts.get(name)!r}; {remedy}"
                )


def differing_fact(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return the name of the first fact of mine that another rank has differently, if any."""
    return next((name for name, fact in mine.items() if theirs.get(name) != fact), None)


def _default_store() -> Any:
    # Here, so that only jobs of several ranks need the private name that finds their store.
    from penstock.compat.process_group import default_store

    return default_store()


def _agent_store() -> Any:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    where = os.getpid(), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if where not in _agent_stores:
        _, address, port = where
        timeout = datetime.timedelta(seconds=WAIT_S_MAX)
        _agent_stores[where] = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=False, timeout=timeout
        )
    return _agent_stores[where]
