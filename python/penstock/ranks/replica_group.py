# SPDX-License-Identifier: Apache-2.0
"""Ranks that need the same batches: the ranks of one model-parallel group.

One rank of the group, its *leader*, has batches made, by a pool or by its local workers. It hands
each on to the first rank of every other machine, and each of these to the other ranks of its
machine. So a batch is made once, and crosses to each machine once. For the receiving rank, the
sender is a worker of a pool (``csrc/replica/relay.h``). If the ranks read different leaves, a
sender leaves out what neither the receiver nor a rank behind it reads. The leader's machine
receives all leaves, so the leader is on the machine that reads most of them (:func:`leader_of`).

The ranks meet in the job's store when the first epoch starts: each writes its public key and its
batches' inputs there, and ranks that hand batches on write their listening addresses. A rank
accepts connections only from the ranks listed in the store.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock import _C
from penstock.errors import RankError
from penstock.ranks import job_store
from penstock.ranks.job_store import check_alike, read_of_ranks
from penstock.ranks.sharding import JobRank

LeafReaders = dict[str, tuple[int, ...]]  # by name, the ranks that read the leaf, ascending

_HELD_BYTES_MAX = 256 << 20  # of batches that wait for a slow rank


class Feed(NamedTuple):
    """Source of a rank's batches."""

    worker: tuple[int, str, str]  # its leader as a worker of a pool: id, endpoint, handover
    keys: _C.ReplicaKeys
    leader_key: str
    leader: int  # its rank


class ReplicaGroup:
    """Place of this process in its group. Constructed on all of its ranks at the same time, by the
    first epoch of a loader.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        facts: dict[str, Any],
        arena_bytes: int,
        leaves: LeafReaders | None = None,
    ) -> None:
        """Take ``facts``, the inputs of the batches, which have to be the same on all ranks,
        ``arena_bytes``, the maximum of shared memory per worker, and the ranks that read the
        ``leaves``.

        Waits for the other ranks. Raises ``RankError`` if one is missing or has other facts.
        """
        self.relay: _C.Relay | None = None
        self.feed: Feed | None = None  # None for the leader
        self._rank = JobRank.of(None, None).rank
        self._keys = _C.ReplicaKeys()
        self._arena_bytes = arena_bytes
        self._leaves = leaves or {}
        stores = job_store.stores_of_job() if len(ranks) > 1 else []
        if len(ranks) == 1:
            self.relay = self._start_relay([], {}, {}, "127.0.0.1") if leaves else None
            return
        if not stores:
            raise RankError(
                f"replica_group={list(ranks)} needs a process group or torchrun's store to find "
                f"the other ranks, and this process has neither; call init_process_group() before "
                f"the first epoch"
            )
        prefix = f"{job_store.restart_prefix()}/replicas {','.join(map(str, ranks))}"
        number = stores[0].add(f"{prefix}/loaders of rank {self._rank}", 1)
        self._store = dist.PrefixStore(f"{prefix}/{number}", stores[0])  # type: ignore[attr-defined]
        mine = {"host": _this_machine(), "key": self._keys.public_key, "facts": facts}
        self._store.set(f"rank {self._rank}", json.dumps(mine))
        members = self._read("rank", ranks, "start an epoch")
        check_alike(
            {rank: member["facts"] for rank, member in members.items()},
            (self._rank, facts),
            whose="a replica_group",
            remedy="these ranks must have the same batches, so create their loaders with the same "
            "arguments, and with the same seed or generator=",
        )
        self._connect(ranks, members)

    def _connect(self, ranks: tuple[int, ...], members: dict[int, Any]) -> None:
        """Listen for the ranks that receive batches from here, then look up the rank that sends
        them to this one."""
        hosts: dict[str, list[int]] = {}
        leader = leader_of({rank: members[rank]["host"] for rank in ranks}, self._leaves)
        for rank in sorted(ranks, key=lambda rank: (rank != leader, rank)):
            hosts.setdefault(members[rank]["host"], []).append(rank)
        here = hosts[members[self._rank]["host"]]
        followers = list(here[1:]) if here[0] == self._rank else []
        if self._rank == leader:
            followers += [there[0] for there in hosts.values() if there is not here]
        if followers:
            self._listen(followers, here, members, hosts)
        if self._rank == leader:
            return
        source = here[0] if here[0] != self._rank else leader
        places = self._read("relay of rank", (source,), "forward its batches")[source]
        worker_id, endpoint, handover = places[str(self._rank)]
        self.feed = Feed(
            worker=(worker_id, endpoint, handover),
            keys=self._keys,
            leader_key=members[source]["key"],
            leader=source,
        )

    def _listen(
        self,
        followers: list[int],
        here: list[int],
        members: dict[int, Any],
        hosts: dict[str, list[int]],
    ) -> None:
        is_local = set(followers) <= set(here)
        bind_host = "127.0.0.1" if is_local else _address_towards_others()
        keys = {rank: members[rank]["key"] for rank in followers}
        # A rank on another machine passes the batches on there.
        served = {
            rank: {rank} if rank in here else set(hosts[members[rank]["host"]])
            for rank in followers
        }
        self.relay = self._start_relay(here, keys, served, bind_host)
        places = dict(zip(map(str, followers), self.relay.addresses, strict=True))
        self._store.set(f"relay of rank {self._rank}", json.dumps(places))

    def _start_relay(
        self,
        here: list[int],
        keys: dict[int, str],
        served: dict[int, set[int]],
        bind_host: str,
    ) -> _C.Relay:
        """Start the relay for the followers with these ``keys``, and the ranks that each serves."""
        return _C.Relay(
            keys=self._keys,
            leader=f"rank {self._rank}",
            bind_host=bind_host,
            followers=[
                (
                    f"rank {rank}",
                    key,
                    f"penstock-{secrets.token_hex(16)}" if rank in here else "",
                )
                for rank, key in keys.items()
            ],
            arena_bytes=self._arena_bytes,
            held_bytes_max=_HELD_BYTES_MAX,
            leaves=[
                (
                    name,
                    self._rank in readers,
                    [not ranks.isdisjoint(readers) for ranks in served.values()],
                )
                for name, readers in self._leaves.items()
            ],
        )

    @property
    def has_leaves_by_rank(self) -> bool:
        """Return whether batches lack the values of leaves that only other ranks read."""
        return bool(self._leaves)

    def _read(self, what: str, ranks: Sequence[int], task: str) -> dict[int, Any]:
        keys = {rank: f"{what} {rank}" for rank in ranks}
        who = f"rank {self._rank}"
        return read_of_ranks(self._store, keys, who=who, task=f"{task} with replica_group")

    def check(self) -> None:
        """Raise ``RankError`` if a rank of the group takes no batches for long, so that this rank
        has none either.
        """
        awaited = None if self.relay is None else self.relay.awaited_follower
        if awaited is not None and awaited[1] > job_store.WAIT_S_MAX:
            name, seconds = awaited
            raise RankError(
                f"rank {self._rank} has waited {seconds:.0f} s for {name}, which takes the batches "
                f"of their replica_group too slowly: check whether that rank is alive, and where "
                f"it is blocked"
            )


def _this_machine() -> str:
    """Return the same text in processes that can connect by loopback and by Unix sockets."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _address_towards_others() -> str:
    """Return this machine's address on the network that reaches the job's store."""
    address = os.environ.get("MASTER_ADDR", socket.gethostname())
    family, _, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # it sends no packet
        return str(probe.getsockname()[0])


class FeedWatch:
    """Limits a rank's wait for the rank that sends its batches."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._lost_at: float | None = None

    def note(self, open_worker_count: int) -> None:
        """Raise ``RankError`` when the other rank has been absent for long."""
        if open_worker_count > 0:
            self._lost_at = None
            return
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if now - self._lost_at > job_store.WAIT_S_MAX:
            raise RankError(
                f"rank {self._feed.leader}, which sends this rank the batches of its "
                f"replica_group, has not answered for {now - self._lost_at:.0f} s: check whether "
                f"that rank is alive, and where it is blocked"
            )


def leader_of(hosts: Mapping[int, str], leaves: LeafReaders) -> int:
    """Return the rank of a group that has the batches made: the first one, unless ``leaves`` says
    otherwise. ``hosts`` is the machine of each rank.

    The leader's machine receives all leaves, even if only other machines read them. It is
    therefore a machine that reads the leaf named first, which should be the largest one; if several
    do, one of these that reads the leaf named second, and so on. A machine that reads all leaves is
    thus preferred to all others. The same rule chooses the rank on that machine, which saves a copy
    of the leaves that it reads itself; ranks that read the same leaves are equal, and the first is
    chosen.
    """
    ranks_of_host: dict[str, set[int]] = {}
    for rank, host in hosts.items():
        ranks_of_host.setdefault(host, set()).add(rank)

    def reads(ranks: set[int]) -> list[bool]:
        return [not ranks.isdisjoint(readers) for readers in leaves.values()]

    return max(hosts, key=lambda rank: (reads(ranks_of_host[hosts[rank]]), reads({rank}), -rank))


def named_ranks(replica_group: Any, argument: str = "replica_group") -> list[Any] | None:
    """Return the ranks that ``replica_group`` names, as it names them.

    Raises ``TypeError`` with the name of the ``argument`` if it is no group.
    """
    if replica_group is None:
        return None
    if isinstance(replica_group, Sequence) and not isinstance(replica_group, str):
        return list(replica_group)
    group = getattr(replica_group, "get_group", lambda: replica_group)()
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"{argument} must be a process group, a device mesh of one dimension or a list of "
            f"ranks, got {replica_group!r}"
        )
    return list(dist.get_process_group_ranks(group))


def ranks_of(replica_group: Any) -> tuple[int, ...] | None:
    """Return the ranks that ``replica_group`` names, in ascending order.

    Raises ``TypeError`` or ``ValueError`` if it names no group that this process is in.
    """
    ranks = named_ranks(replica_group)
    if ranks is None:
        return None
    place = JobRank.of(None, None)
    known = range(place.world_size)
    if not all(isinstance(rank, int) and rank in known for rank in ranks) or len(set(ranks)) != len(
        ranks
    ):
        raise ValueError(
            f"replica_group must be different ranks from 0 to {place.world_size - 1}, got {ranks}"
        )
    if place.rank not in ranks:
        raise ValueError(
            f"replica_group must include the rank of this process, {place.rank}, got {ranks}"
        )
    return tuple(sorted(ranks))
