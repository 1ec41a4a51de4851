# SPDX-License-Identifier: Apache-2.0
"""Make torch's collate functions write batches directly into the slab that is sent."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Protocol

import torch

from penstock import _C
from penstock.compat.iterators import torch_collate
from penstock.compat.storages import new_shared, replace_new_shared
from penstock.stream.table_rows import is_collate_map_untouched
from penstock.worker.fetching import FetchSpec
from penstock.worker.map_fetchers import SampleRows
from penstock.worker.threaded_fetch import is_fetching_ahead


class SlabServer(Protocol):
    """The part of a worker's native server that has the slab of the current batch."""

    def collate(self, samples: list[Any], default_collate: Any) -> Any: ...

    def sample_rows(self) -> SampleRows: ...

    def fetch_clock(self) -> _C.FetchClock: ...

    def new_bytes(self, bytes: int) -> torch.Tensor | None: ...


def collating_into(server: SlabServer, fetch: FetchSpec) -> FetchSpec:
    """Return ``fetch`` with the native default_collate in place of torch's, and with samples that
    are copied into the batch one by one.
    """
    fetch = replace(fetch, clock=server.fetch_clock())
    if fetch.auto_collation and fetch.collate_fn is torch_collate.default_collate:
        return replace(fetch, collate_fn=_SlabCollate(server), rows=server.sample_rows())
    return fetch


class _SlabCollate:
    """Collates into the slab; uses torch's default_collate if the user has changed torch's registry
    or has torch create tensors on another device.
    """

    draws_nothing = True

    def __init__(self, server: SlabServer) -> None:
        self._server = server

    def __call__(self, samples: Any) -> Any:
        if (
            type(samples) is not list
            or not is_collate_map_untouched()
            or torch.get_default_device().type != "cpu"
        ):
            return torch_collate.default_collate(samples)
        return self._server.collate(samples, torch_collate.default_collate)


def collate_into_slabs(server: SlabServer) -> None:
    """Make torch's collate functions write into the slab.

    Inside a worker, torch's default_collate requests a new shared storage for each tensor, whose
    pages the kernel must clear first: most of the cost of a large batch. Here, the storage is in
    the slab of the current batch, so a collate_fn that calls default_collate is as fast as the
    plain one. Other uses of shared storages are unaffected.
    """
    owner_pid = os.getpid()
    shared_by_torch = new_shared()

    def _new_in_slab(cls: Any, size: int, *, device: Any = "cpu") -> Any:
        if torch.device(device).type == "cpu" and os.getpid() == owner_pid:
            block = None if is_fetching_ahead() else server.new_bytes(size)
            # Without room in the slab, or for a later batch, use private memory: it is copied into
            # the slab with the rest of the batch. Shared memory would be sent as it is, and the
            # kernel would clear its pages again for every batch.
            return torch.UntypedStorage(size) if block is None else block.untyped_storage()
        return shared_by_torch(size, device=device)

    replace_new_shared(_new_in_slab)
