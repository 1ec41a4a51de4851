# SPDX-License-Identifier: Apache-2.0
"""The iterator of ``pool=``: batches come from the workers of a pool, on this machine or others.

They come and go while it runs. The job (dataset, collate_fn and what belongs to them) is pickled
for each iterator, and workers that do not have it yet ask for it.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch

from penstock import _C
from penstock.errors import PenstockError, PoolWarning
from penstock.loader.descriptor_limit import check_can_connect
from penstock.loader.device import cuda_index
from penstock.loader.held_slabs import retire_at_forks
from penstock.loader.loader_face import LoaderFace
from penstock.loader.local_iterator import STANDING_COUNTS, LocalPoolIter
from penstock.loader.lookahead import NoBatch, Taken
from penstock.loader.native_thread import NativeThread
from penstock.loader.options import shard_count
from penstock.loader.own_workers import OwnWorkers
from penstock.loader.released_frames import release_frames
from penstock.loader.variable_pool import way_out
from penstock.pool.pool_job import Job, job_id, pack_job
from penstock.seams.iterators import DatasetKind
from penstock.worker.arena_cap import arena_bytes
from penstock.worker.fetching import FetchSpec

_WORKERS_OF_USE_MAX = 4096  # to a map-style dataset
_QUIET_S = 5.0  # without any worker, before the user is told what is waited for


class PoolIter(LocalPoolIter):
    """Batches from a pool's workers, and from ``num_workers`` of its own beside them."""

    _is_elastic = True

    def __init__(self, loader: LoaderFace) -> None:
        self._way_out = way_out(loader.pool)
        self._is_sound = False  # whether its client may serve another iterator
        self._has_failed = False  # the last that it gave was an error
        try:
            super().__init__(loader)
        except BaseException as error:
            self._has_failed = True
            self._shutdown_workers()
            if isinstance(error, (PenstockError, pickle.PicklingError)):
                self._blame_pool(error)
            raise

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            raise
        except BaseException as error:
            # Unless the program has the iterator in a variable, it ends here and leaves the pool.
            self._has_failed = True
            del self
            release_frames(error)
            raise

    def _settle_num_workers(self, loader: LoaderFace) -> None:
        self._shard_count = shard_count(loader)
        self._own_worker_count = int(self._num_workers)
        self._num_workers = 1  # what is asked for ahead follows from how many there are
        self._waiting_since: float | None = None
        self._is_waiting_told = False
        if self._dataset_kind == DatasetKind.Iterable and self._shard_count == 1:
            warnings.warn(
                f"{type(loader.dataset).__name__} is read in 1 shard, by one worker of the pool at "
                f"a time; pass shards=N to DataLoader to have up to N workers read it at once",
                PoolWarning,
                stacklevel=4,
            )

    def _open_pool(self, loader: LoaderFace) -> None:
        name = job_name(loader)
        job = Job(
            fetch=FetchSpec.of(self, loader.fetch_threads),
            init_fn=self._worker_init_fn,
            shard_count=self._shard_count,
            trust_workers=loader.trust_workers,
            name=name,
        )
        code = loader._travelling_code.packed(loader.code_paths)
        self._prefix_ids: list[bytes] = []
        self._own = OwnWorkers(loader.multiprocessing_context or torch.multiprocessing)
        self._workers = self._own.processes
        self._native_thread = NativeThread()
        self._parked_client = loader._parked_client
        options = self._client_options(loader, name)
        # A client knows its own workers from the beginning, so another number needs another client.
        standing = (self._own_worker_count, options)
        parked = None
        if not self._parked_client.is_empty:
            self._job_id = job_id(job, code)
            parked = self._parked_client.take((self._job_id, *standing))
        blobs: dict[bytes, bytes] = {}
        if parked is None:
            self._job_id, blobs = pack_job(job, code)
        self._purpose = (self._job_id, *standing)
        try:
            self._own.start(self._own_worker_count)
            self._client = self._pool_client = parked or _C.PoolClient(
                own_workers=self._own.addresses, **options
            )
        except BaseException:
            self._own.end()
            raise
        self._shutdown = False
        self._stream = self._make_stream()
        self._counted_before = super()._count()
        try:
            if parked is None:
                retire_at_forks(self._client)
                while blobs:  # the client copies each
                    self._pool_client.put_blob(*blobs.popitem())
            self._pool_client.use_blobs([self._job_id])
            for message in loader._prefixes.values():
                self._install_prefix(message)
            if parked is None:
                self._client.start()  # native threads start after the last fork
            self._is_sound = True
        except BaseException:
            self._shutdown_workers()
            raise

    def _client_options(self, loader: LoaderFace, name: str) -> dict[str, Any]:
        is_iterable = self._dataset_kind == DatasetKind.Iterable
        return {
            "controller": loader.pool,
            "key_folder": loader.keys,
            "job": name,
            "about": f"{socket.gethostname()}, process {os.getpid()}, torch {torch.__version__}",
            "worker_count_max": self._shard_count if is_iterable else _WORKERS_OF_USE_MAX,
            "arena_bytes": arena_bytes(),
            "is_iterable": is_iterable,
            "trust_workers": loader.trust_workers,
            "prefetch_factor": self._prefetch_depth,
            "prefetch_bytes": loader.prefetch_bytes or 0,
            "shard_count": self._shard_count,
            "in_order": bool(self._in_order),
            "keep_indices": self._timeout > 0,
            "pin_memory": bool(self._pin_memory and loader.device is None),
            "device_index": cuda_index(loader.device),
        }

    def _begin_requests(self) -> None:
        starts = self._progress.starts
        if self._dataset_kind == DatasetKind.Iterable and starts:
            self._pool_client.set_lanes(
                {
                    shard_id: (
                        start.batch_count,
                        b"" if start.state is None else _C.encode_value(start.state),
                    )
                    for shard_id, start in starts.items()
                }
            )
        super()._begin_requests()

    def _can_begin_early(self, loader: LoaderFace) -> bool:
        return False

    def _install_prefix(self, message: bytes) -> None:
        prefix_id = hashlib.sha256(message).digest()
        self._pool_client.put_blob(prefix_id, message)
        self._prefix_ids.append(prefix_id)
        self._pool_client.use_blobs([self._job_id, *self._prefix_ids])

    def _remove_prefixes(self) -> None:
        self._prefix_ids.clear()
        self._pool_client.use_blobs([self._job_id])

    def _take(self, ahead_count: int = 0) -> Taken:
        try:
            return super()._take(ahead_count)
        except BaseException as error:
            self._is_sound = False
            if isinstance(error, PenstockError):
                self._blame_pool(error)
            raise

    def _end_or_raise(self, taken: Taken) -> NoReturn:
        if taken is NoBatch.END:
            self._has_failed = False
        super()._end_or_raise(taken)

    def _blame_pool(self, error: Exception) -> None:
        if self._way_out:
            error.args = (f"{error}{self._way_out}",)

    def _count(self) -> dict[str, Any]:
        """The counters since this iterator began: its client may have served others before."""
        return {
            name: count - (0 if name in STANDING_COUNTS else self._counted_before[name])
            for name, count in super()._count().items()
        }

    def _end_client(self) -> None:
        silence_s = self._pool_client.controller_silence_s
        if silence_s is not None:
            self._parked_client.controller_heard_at = time.monotonic() - silence_s
        if self._own_worker_count > 0 or self._has_failed or not self._is_sound:
            super()._end_client()
            return
        # Nobody waits any more for what is on its way.
        self._client.drop_epoch()
        self._parked_client.park(self._pool_client, self._purpose)

    def _end_workers(self) -> None:
        self._own.end()

    def _check_workers(self) -> None:
        """Nothing came for a while: looks after workers, and says what is waited for."""
        if self._shutdown:
            raise AssertionError("Invalid iterator state: shutdown when fetching next data")
        for worker_id, process in self._own.take_dead().items():
            warnings.warn(
                f"DataLoader's own worker beside the pool, process {process.pid} on this host, "
                f"ended with {process.exitcode}; what it owed is made by others",
                PoolWarning,
                stacklevel=2,
            )
            self._pool_client.lose_own_worker(worker_id)
        if self._pool_client.open_worker_count > 0:
            self._waiting_since = None
            return
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < _QUIET_S:
            return
        check_can_connect()
        if not self._is_waiting_told:
            self._is_waiting_told = True
            warnings.warn(
                f"DataLoader waits for workers: {self._describe_pool()}",
                PoolWarning,
                stacklevel=2,
            )

    def _who_is_awaited(self) -> str:
        return f"\n{self._describe_pool()}"

    def _describe_pool(self) -> str:
        text = self._pool_client.describe_pool()
        heard_at = self._parked_client.controller_heard_at
        if self._pool_client.controller_silence_s is None and heard_at is not None:
            text += (
                f"; it answered an epoch before this one until {time.monotonic() - heard_at:.0f} s "
                f"ago, so it may have ended since"
            )
        return f"{text}{self._way_out}"

    def _sure_workers(self) -> tuple[int, str]:
        return 1, "a pool, which may have one worker"


def job_name(loader: LoaderFace) -> str:
    """The name of a job for people: the program and its dataset."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    program = Path(main).name if main else "python"
    return f"{program}: {type(loader.dataset).__name__}"
