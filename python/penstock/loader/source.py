# SPDX-License-Identifier: Apache-2.0
"""Workers behind an iterator, and the native stream of their batches.

An iterator has torch's class and gives batches to the program. The source behind it starts the
workers, or finds them in a pool, monitors them and ends them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock import _C
from penstock.compat.devices import module_in_use
from penstock.loader.client_cache import Recaller
from penstock.loader.device import names_device, staged_device
from penstock.loader.options import LoaderOptions
from penstock.stream.progress import Progress
from penstock.tracking.batch_origin import ProvenanceTable

if TYPE_CHECKING:
    from penstock.graph.plan import Plan

GAUGES = ("outstanding", "ready")  # of a stream's counters; the others only grow


class Source(Protocol):
    """Confined to the trainer's thread, from its construction until it is closed."""

    processes: list[Any]  # the workers that this process started
    stream: _C.Stream
    native_thread: NativeThread
    recaller: Recaller | None  # if leaves of batches may stay with the workers

    def begin_epoch(self, progress: Progress) -> None:
        """Call before the stream requests an epoch's batches."""

    def want_states(self, every: int) -> None:
        """Have batches requested from now on bring the states of datasets along, about every
        ``every`` steps."""

    def ask_states(self) -> dict[int, Any]:
        """Return the current states of all shards, by shard, without shards that have none. Waits
        for the workers to finish the requested batches; raises RuntimeError for one that died or,
        with the loader's ``timeout``, is late."""
        ...

    def note(self, event: int, value: Any, extra: Any) -> None:
        """Handle a stream event about workers. Raises torch's error for a death that the others
        cannot compensate for."""

    def check(self) -> None:
        """Call after a while without events. Raises for workers that died unnoticed."""

    def end_epoch(self) -> None:
        """Call when an epoch's last batch was taken. Warns of workers that died unnoticed and were
        not needed for it."""

    def timeout_details(self) -> str:
        """Return lines to append to the message of a timeout."""
        ...

    def counters(self) -> dict[str, Any]: ...

    @property
    def workers_apart(self) -> dict[str, str]:
        """Return the workers with other kernels than this process, as
        `PoolClient.workers_apart`."""

    def install_prefix(self, message: bytes) -> None: ...

    def remove_prefixes(self) -> None: ...

    def show_plan(self, plan: Plan | None, change_count: int) -> None:
        """Report to displays of the workers the plan in force (None: no plan), and how often the
        moved calls have changed."""

    def set_shipment(self, message: bytes | None) -> None:
        """Set the leaves that stay with the workers; None for none. For a source with a
        recaller."""

    def close(self) -> None:
        """End the workers that this process started, and the native part in the trainer."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Stream that an iterator requests from the workers behind it."""

    is_iterable: bool
    is_seeded_by_batch: bool
    overtaking_max: int  # as `LoaderOptions.overtaking_max`
    shard_count: int
    prefetch_depth: int  # batches requested ahead from each worker
    asks_while_room: bool  # also beyond that, while `prefetch_bytes` allows
    may_begin_early: bool  # the next epoch, before the trainer asks for it
    has_timeout: bool
    pins_memory: bool

    def of_client(
        self, options: LoaderOptions, provenance: ProvenanceTable | None
    ) -> dict[str, Any]:
        """Return the options that the clients of local workers and of a pool have in common."""
        device = staged_device(options.device)
        return {
            "prefetch_factor": self.prefetch_depth,
            "prefetch_bytes": options.prefetch_bytes or 0,
            "overtaking_max": self.overtaking_max,
            "keep_indices": self.has_timeout,  # to name the awaited batch
            "pin_memory": self.pins_memory and not names_device(options.device),
            "device": None if device is None else str(device),
            "ahead": _ahead_of(provenance) if device is None else None,
        }

    def open_stream(self, client: _C.Client) -> _C.Stream:
        return _C.Stream(
            client,
            is_iterable=self.is_iterable,
            asks_while_room=self.asks_while_room,
            may_begin_early=self.may_begin_early,
            is_seeded_by_batch=self.is_seeded_by_batch,
        )


def _ahead_of(provenance: ProvenanceTable | None) -> _C.AheadWishes | None:
    """Return the wishes for copies ahead to a device: for the loader's offloaded models in a
    process that uses a device, and with device="auto"."""
    if provenance is None:
        return None
    placements = provenance.placements
    return placements.wishes if placements.follows_leaves or module_in_use() is not None else None


def with_workers_apart(plan: Plan | None, workers_apart: dict[str, str]) -> Plan | None:
    """A plan, or none, that names the workers with other kernels."""
    if plan is None or not workers_apart:
        return plan
    named = tuple(f"{place} ({families})" for place, families in sorted(workers_apart.items()))
    return replace(plan, workers_apart=named)


class NativeThread:
    """Native threads that receive batches and pin them, with the interface of torch's Python
    pinning thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.ended.wait(timeout)
