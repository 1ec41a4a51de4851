# SPDX-License-Identifier: Apache-2.0
"""Ranks that are to have the same batches: those of one model-parallel group.

The first rank of the group, its *leader*, has batches made, by a pool or by workers of its own. It
hands each on to the first rank of every other machine, and each of these to the other ranks of its
machine. So a batch is made once, and crosses to each machine once. To the rank that it comes to,
the one that it comes from is a worker of a pool (``csrc/replica/relay.h``).

The ranks meet in the job's store when the first epoch begins: there each leaves its public key and
what its batches follow from, and those that hand batches on leave where they listen. A rank lets in
nobody but the ranks that the store has told it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock import _C
from penstock.errors import RankError
from penstock.ranks import job_store
from penstock.ranks.job_store import check_alike, read_of_ranks
from penstock.ranks.sharding import JobRank

_HELD_BYTES_MAX = 256 << 20  # of batches that wait for a slow rank


class Feed(NamedTuple):
    """From where a rank has its batches."""

    worker: tuple[int, str, str]  # its leader as a worker of a pool: id, endpoint, handover
    keys: _C.ReplicaKeys
    leader_key: str
    leader: int  # its rank


class ReplicaGroup:
    """The place of this process in its group. Made on all of its ranks at once, by the first
    epoch of a loader.
    """

    def __init__(self, ranks: tuple[int, ...], facts: dict[str, Any], arena_bytes: int) -> None:
        """``facts`` is what the batches follow from, which has to be the same on all ranks.
        ``arena_bytes`` is the most shared memory of a worker.

        Waits for the other ranks. Raises ``RankError`` where one does not come or has other facts.
        """
        self.relay: _C.Relay | None = None
        self.feed: Feed | None = None  # None for the leader
        self._rank = JobRank.of(None, None).rank
        self._keys = _C.ReplicaKeys()
        self._arena_bytes = arena_bytes
        stores = job_store.stores_of_job() if len(ranks) > 1 else []
        if len(ranks) == 1:
            return
        if not stores:
            raise RankError(
                f"replica_group is {list(ranks)}, and this process has neither a process group nor "
                f"a store of torchrun's to find the other ranks by; call init_process_group() "
                f"before the first epoch"
            )
        prefix = f"{job_store.restart_prefix()}/replicas {','.join(map(str, ranks))}"
        number = stores[0].add(f"{prefix}/loaders of rank {self._rank}", 1)
        self._store = dist.PrefixStore(f"{prefix}/{number}", stores[0])  # type: ignore[attr-defined]
        mine = {"host": _this_machine(), "key": self._keys.public_key, "facts": facts}
        self._store.set(f"rank {self._rank}", json.dumps(mine))
        members = self._read("rank", ranks, "begin an epoch")
        check_alike(
            {rank: member["facts"] for rank, member in members.items()},
            (self._rank, facts),
            whose="a replica_group",
            remedy="these ranks are to have the same batches, so build their loaders alike, and "
            "seed them alike or pass generator=",
        )
        self._connect(ranks, members)

    def _connect(self, ranks: tuple[int, ...], members: dict[int, Any]) -> None:
        """Listens for the ranks that have their batches from here, then looks for the other way."""
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(members[rank]["host"], []).append(rank)
        leader = ranks[0]
        here = hosts[members[self._rank]["host"]]
        followers = list(here[1:]) if here[0] == self._rank else []
        if self._rank == leader:
            followers += [there[0] for there in hosts.values() if there is not here]
        if followers:
            self._listen(followers, here, members)
        if self._rank == leader:
            return
        source = here[0] if here[0] != self._rank else leader
        places = self._read("relay of rank", (source,), "hand its batches on")[source]
        worker_id, endpoint, handover = places[str(self._rank)]
        self.feed = Feed(
            worker=(worker_id, endpoint, handover),
            keys=self._keys,
            leader_key=members[source]["key"],
            leader=source,
        )

    def _listen(self, followers: list[int], here: list[int], members: dict[int, Any]) -> None:
        is_local = set(followers) <= set(here)
        self.relay = _C.Relay(
            keys=self._keys,
            leader=f"rank {self._rank}",
            bind_host="127.0.0.1" if is_local else _address_towards_others(),
            followers=[
                (
                    f"rank {rank}",
                    members[rank]["key"],
                    f"penstock-{secrets.token_hex(16)}" if rank in here else "",
                )
                for rank in followers
            ],
            arena_bytes=self._arena_bytes,
            held_bytes_max=_HELD_BYTES_MAX,
        )
        places = dict(zip(map(str, followers), self.relay.addresses, strict=True))
        self._store.set(f"relay of rank {self._rank}", json.dumps(places))

    def _read(self, what: str, ranks: Sequence[int], deed: str) -> dict[int, Any]:
        keys = {rank: f"{what} {rank}" for rank in ranks}
        who = f"rank {self._rank}"
        return read_of_ranks(self._store, keys, who=who, deed=f"{deed} with replica_group")

    def check(self) -> None:
        """Raises ``RankError`` where a rank of the group takes no batches for long, so that this
        one has none either.
        """
        awaited = None if self.relay is None else self.relay.awaited_follower
        if awaited is not None and awaited[1] > job_store.WAIT_S_MAX:
            name, seconds = awaited
            raise RankError(
                f"rank {self._rank} has waited {seconds:.0f} s for {name}, which takes the batches "
                f"of their replica_group too slowly: see whether that rank lives, and what it does"
            )


def _this_machine() -> str:
    """The same for processes that can reach each other by loopback and by Unix sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _address_towards_others() -> str:
    """This machine's address on the network by which it reaches the job's store."""
    address = os.environ.get("MASTER_ADDR", socket.gethostname())
    family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # which sends nothing
        return str(probe.getsockname()[0])


class FeedWatch:
    """Bounds the wait of a rank for the one that it has its batches from."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._lost_at: float | None = None

    def note(self, open_worker_count: int) -> None:
        """Raises ``RankError`` when the other rank has not been there for long."""
        if open_worker_count > 0:
            self._lost_at = None
            return
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if now - self._lost_at > job_store.WAIT_S_MAX:
            raise RankError(
                f"rank {self._feed.leader}, from which this rank has the batches of its "
                f"replica_group, has not answered for {now - self._lost_at:.0f} s: see whether "
                f"that rank lives, and what it does"
            )


def ranks_of(replica_group: Any) -> tuple[int, ...] | None:
    """The ranks that ``replica_group`` names, in ascending order.

    Raises ``TypeError`` or ``ValueError`` for what names no group that this process is in.
    """
    if replica_group is None:
        return None
    if isinstance(replica_group, Sequence) and not isinstance(replica_group, str):
        ranks = list(replica_group)
    else:
        group = getattr(replica_group, "get_group", lambda: replica_group)()
        if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                f"replica_group is {replica_group!r}; a process group, a device mesh of one "
                f"dimension or a list of ranks is expected"
            )
        ranks = dist.get_process_group_ranks(group)
    place = JobRank.of(None, None)
    known = range(place.world_size)
    if not all(isinstance(rank, int) and rank in known for rank in ranks) or len(set(ranks)) != len(
        ranks
    ):
        raise ValueError(
            f"replica_group is {ranks}; different ranks from 0 to {place.world_size - 1} are "
            f"expected"
        )
    if place.rank not in ranks:
        raise ValueError(
            f"replica_group is {ranks} and this process is rank {place.rank}; a rank names the "
            f"group that it is in"
        )
    return tuple(sorted(ranks))


def check_place(replica_group: tuple[int, ...] | None, rank: int | None) -> None:
    """Raises ``ValueError`` where ``shard_by_rank`` would count ranks in the place of groups."""
    if replica_group is not None and rank is None:
        raise ValueError(
            f"shard_by_rank and replica_group={list(replica_group)} were given without rank and "
            f"world_size; with a replica_group they count groups, so pass both, as in "
            f"rank=mesh.get_local_rank('dp'), world_size=mesh['dp'].size()"
        )
