# SPDX-License-Identifier: Apache-2.0
"""Source of an iterator whose batches are made by the workers of a pool.

Workers join and leave while it runs. The job (dataset, collate_fn and their companions) is pickled
for each source unless it is unchanged, and workers that do not have it yet request it.

In addition to the pool's workers, ``num_workers`` workers are the trainer's local ones
(:class:`OwnWorkers`). They serve as the pool's do, but in one process each, and are reached on
loopback with the keys that this user's processes share; they get the job in the same way. Their
batches are in shared memory, as with local workers. No controller knows them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock import _C, _pool
from penstock.errors import PenstockError
from penstock.loader.client_cache import Recaller
from penstock.loader.device import gpu_uuid
from penstock.loader.loader_run import LoaderRun
from penstock.loader.options import LoaderOptions
from penstock.loader.process_limits import check_can_connect, fork_lock, retire_at_forks
from penstock.loader.source import (
    GAUGES,
    NativeThread,
    StreamOptions,
    with_workers_apart,
)
from penstock.pool.job_code import CodeFolder
from penstock.pool.pool_job import Job, job_id, pack_job
from penstock.pool.pool_status import format_numerics
from penstock.pool.pool_worker import run_worker
from penstock.pool.process_settings import JobSettings
from penstock.pool.worker_spec import PoolWorkerSpec, arena_bytes
from penstock.program_line import warn
from penstock.ranks.job_store import job_identity
from penstock.ranks.replica_group import FeedWatch, ReplicaGroup
from penstock.ranks.sharding import JobRank
from penstock.stream.progress import Progress
from penstock.worker.fetching import FetchSpec
from penstock.worker.worker_start import DeferredInterrupt, release_in_child

if TYPE_CHECKING:
    from penstock.graph.plan import Plan

_PLAN_BYTES_MAX = 64 << 10  # wire::kPlanBytesMax
_WORKERS_OF_USE_MAX = 4096  # to a map-style dataset
_NO_JOB = hashlib.sha256(b"").digest()
_QUIET_S = 5.0  # without any worker, before the user is shown the reason of the wait
_START_S_MAX = 300.0  # spawn imports torch, on a busy machine one after the other
_END_S_MAX = 5.0


class PoolSource:
    """A `Source`: a pool's workers, and ``own_worker_count`` local ones in addition."""

    def __init__(
        self,
        options: LoaderOptions,
        run: LoaderRun,
        of_stream: StreamOptions,
        fetch: FetchSpec,
        own_worker_count: int,
        pool_remedy: str,
    ) -> None:
        """Take ``pool_remedy``, part of messages: how a program does without the pool."""
        self.may_be_cached = True  # False while the iterator's last result was an error
        self.is_sound = False  # whether the client may serve another iterator
        self._is_iterable = of_stream.is_iterable
        self._own_worker_count = own_worker_count
        self._pool_remedy = pool_remedy
        self._all_apart = run.workers_apart
        self._waiting_since: float | None = None
        self._is_wait_logged = False
        self._prefix_ids: list[bytes] = []
        self._shipment_ids: list[bytes] = []  # one at most
        self.native_thread = NativeThread()
        self._own = OwnWorkers(options.multiprocessing_context or torch.multiprocessing)
        self.processes = self._own.processes
        name = job_name(options)
        job = Job(
            fetch=fetch,
            init_fn=options.worker_init_fn,
            shard_count=of_stream.shard_count,
            trust_workers=options.trust_workers,
            name=name,
            settings=JobSettings.here(),
            may_be_kept=options.pool_record.keep,
        )
        replicas = run.replicas
        self._replicas = replicas
        self._feed_watch = None
        if replicas is not None and replicas.feed is not None:
            self._own_worker_count = own_worker_count = 0
            self._feed_watch = FeedWatch(replicas.feed)
        code = run.code_packer.packed(options.code_paths)
        self._client_cache = run.client_cache
        of_client = _client_options(options, run, of_stream, name)
        # A client knows its local workers from its start, so another number needs another client.
        standing = (own_worker_count, of_client)
        cached = None
        blobs: dict[bytes, bytes] = {}
        if self._feed_watch is not None:
            self._job_id = _NO_JOB  # another rank has the batches made
            cached = self._client_cache.take((self._job_id, *standing))
        elif not self._client_cache.is_empty:
            self._job_id = job_id(job, code, run.pickle_cache)
            cached = self._client_cache.take((self._job_id, *standing))
        if cached is None and self._feed_watch is None:
            self._job_id, blobs = pack_job(job, code, run.pickle_cache)
        self._purpose = (self._job_id, *standing)
        try:
            self._own.start(own_worker_count)
            of_client = {"own_workers": self._own.addresses, **of_client}
            self._client = cached or _C.PoolClient(**of_client)
        except BaseException:
            self._own.end()
            raise
        self.stream = of_stream.open_stream(self._client)
        self.recaller = recaller_of(options, of_stream, self._client, self.check)
        self._counted_before = self.stream.counters()
        try:
            if cached is None:
                retire_at_forks(self._client)
                while blobs:  # the client copies each
                    self._client.put_blob(*blobs.popitem())
            self._client.use_blobs([self._job_id])
            for message in run.prefixes.values():
                self.install_prefix(message)
            self.set_shipment(run.shipment)
            self.show_plan(run.plan, run.plan_changes)
            if cached is None:
                self._client.start()  # native threads start after the last fork
            self.is_sound = True
        except BaseException:
            self.close()
            raise

    def begin_epoch(self, progress: Progress) -> None:
        progress.decode_state = _C.decode_value  # data from a pool's worker is never unpickled
        if self._is_iterable and progress.starts:
            self._client.set_lanes(
                {
                    shard_id: (
                        start.batch_count,
                        b"" if start.state is None else _C.encode_value(start.state),
                    )
                    for shard_id, start in progress.starts.items()
                }
            )

    def want_states(self, every: int) -> None:
        """Ignore the interval: a pool's workers send states with each batch, so that others can
        continue a shard."""

    def ask_states(self) -> dict[int, Any]:
        return {}  # no dataset stays with a pool's workers

    def note(self, event: int, value: Any, extra: Any) -> None:
        """Ignore a shard's end: a pool's workers serve any shard."""

    def check(self) -> None:
        """Check the workers after a while without events, and name the awaited batch."""
        for worker_id, process in self._own.take_exited().items():
            warn(
                f"a local DataLoader worker, process {process.pid} on this host, ended with exit "
                f"code {process.exitcode}; other workers make its unfinished batches",
            )
            self._client.lose_own_worker(worker_id)
        if self._replicas is not None:
            self._replicas.check()
        if self._feed_watch is not None:
            self._feed_watch.note(self._client.open_worker_count)
        if self._client.open_worker_count > 0:
            self._waiting_since = None
            return
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < _QUIET_S:
            return
        check_can_connect()
        if not self._is_wait_logged:
            self._is_wait_logged = True
            warn(
                f"DataLoader waits for workers: {self._describe()}",
            )

    def end_epoch(self) -> None:
        """Skip the check: a pool's workers may end at any time, and check() reports local ones."""

    def timeout_details(self) -> str:
        return f"\n{self._describe()}"

    def _describe(self) -> str:
        text = self._client.describe_pool()
        heard_at = self._client_cache.controller_heard_at
        if self._client.controller_silence_s is None and heard_at is not None:
            text += (
                f"; it last answered {time.monotonic() - heard_at:.0f} s ago, in an earlier epoch, "
                f"so it may have ended since"
            )
        return f"{text}{self._pool_remedy}"

    def counters(self) -> dict[str, Any]:
        """Return the counters since this source was made: its client may have served others
        before."""
        return {
            name: count - (0 if name in GAUGES else self._counted_before[name])
            for name, count in self.stream.counters().items()
        }

    @property
    def workers_apart(self) -> dict[str, str]:
        return self._client.workers_apart

    def install_prefix(self, message: bytes) -> None:
        prefix_id = hashlib.sha256(message).digest()
        self._client.put_blob(prefix_id, message)
        self._prefix_ids.append(prefix_id)
        self._name_blobs()

    def remove_prefixes(self) -> None:
        self._prefix_ids.clear()
        self._name_blobs()

    def show_plan(self, plan: Plan | None, change_count: int) -> None:
        plan = with_workers_apart(plan, self.workers_apart)
        self._client.set_plan("" if plan is None else plan.told(_PLAN_BYTES_MAX), change_count)

    def set_shipment(self, message: bytes | None) -> None:
        self._shipment_ids.clear()
        if message is not None and self.recaller is not None:
            shipment_id = hashlib.sha256(message).digest()
            self._client.put_blob(shipment_id, message)
            self._shipment_ids.append(shipment_id)
        self._name_blobs()

    def _name_blobs(self) -> None:
        self._client.use_blobs([self._job_id, *self._prefix_ids, *self._shipment_ids])

    def close(self) -> None:
        """End this process's local workers. The client is kept for the next iterator of the same
        job, unless an error occurred."""
        self._all_apart.update(self.workers_apart)
        try:
            silence_s = self._client.controller_silence_s
            if silence_s is not None:
                self._client_cache.controller_heard_at = time.monotonic() - silence_s
            if self._own_worker_count > 0 or not self.may_be_cached or not self.is_sound:
                if self.recaller is not None and self.is_sound:
                    self.recaller.recall_all()
                self._client.stop()
            else:
                self._client.drop_epoch()  # batches in flight are no longer awaited
                self._client_cache.put(self._client, self._purpose, self.recaller)
            self.native_thread.ended.set()
        finally:
            self._own.end()


def recaller_of(
    options: LoaderOptions,
    of_stream: StreamOptions,
    client: _C.PoolClient,
    check: Callable[[], None],
) -> Recaller | None:
    """Return a recaller for ``client``; None if batches cannot be made again, or if other ranks
    have them, too."""
    if of_stream.is_iterable or options.replica_group is not None:
        return None
    return Recaller(client, check)


def _client_options(
    options: LoaderOptions, run: LoaderRun, of_stream: StreamOptions, name: str
) -> dict[str, Any]:
    return {
        "controller": options.pool or "",
        "key_folder": options.keys,
        "job": name,
        "about": f"{socket.gethostname()}, process {os.getpid()}, torch {torch.__version__}, "
        f"{format_numerics()}",
        "worker_count_max": of_stream.shard_count if of_stream.is_iterable else _WORKERS_OF_USE_MAX,
        "arena_bytes": arena_bytes(),
        "is_iterable": of_stream.is_iterable,
        "trust_workers": options.trust_workers,
        "gpu_uuid": gpu_uuid(options.device),
        **_rank_in_job(options),
        "shard_count": of_stream.shard_count,
        **of_stream.of_client(options, run.provenance),
        **_replica_options(run.replicas),
    }


def _replica_options(replicas: ReplicaGroup | None) -> dict[str, Any]:
    if replicas is None:
        return {}
    relay = {"relay": replicas.relay, "leaves_by_rank": replicas.has_leaves_by_rank}
    if replicas.feed is None:
        return relay
    worker, keys, leader_key, _ = replicas.feed
    return {
        **relay,
        "controller": "",
        "own_workers": [worker],
        "own_keys": (keys, leader_key),
    }


def _rank_in_job(options: LoaderOptions) -> dict[str, Any]:
    """Return the facts by which the controller knows the trainers of one job; empty for a job of
    one process."""
    rank, world_size = (options.rank, options.world_size) if options.shard_by_rank else (None, None)
    place = JobRank.of(rank, world_size)
    if place.world_size == 1:
        return {}
    return {"job_identity": job_identity(), "rank": tuple(place)}


def job_name(options: LoaderOptions) -> str:
    """Return the name of a job for people: the program, and the loader's name or dataset."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    program = Path(main).name if main else "python"
    return f"{program}: {options.title}"


class OwnWorkers:
    """Children of the trainer, or of its fork server. Confined to the trainer's thread."""

    def __init__(self, context: Any) -> None:
        """Take ``context``, a multiprocessing context."""
        self.processes: list[Any] = []
        # The id of each, its endpoint, and the name at which it hands over batches.
        self.addresses: list[tuple[int, str, str]] = []
        self._context = context
        self._code_folders: list[CodeFolder] = []
        self._dead: set[int] = set()

    def start(self, count: int) -> None:
        """Start ``count`` workers. Raises PenstockError when one of them does not start to
        listen."""
        if count == 0:
            return
        pipes = []
        names = []
        # Made before the workers start, since a killed worker could leave half of it. They get its
        # path as an argument: a fork server has the environment of its start.
        key_folder = _pool.shared_key_folder()
        for _ in range(count):
            receiver, sender = self._context.Pipe(duplex=False)
            code = CodeFolder()
            self._code_folders.append(code)
            handover = f"penstock-{secrets.token_hex(16)}"
            names.append(handover)
            process = self._context.Process(
                target=_run_own_worker,
                args=(sender, code.path, os.getpid(), handover, key_folder),
                daemon=True,
            )
            with fork_lock(), DeferredInterrupt():
                process.start()
                self.processes.append(process)
            sender.close()
            pipes.append(receiver)
        deadline = time.monotonic() + _START_S_MAX
        for receiver, process, handover in zip(pipes, self.processes, names, strict=True):
            with receiver:
                self.addresses.append((*self._address(receiver, process, deadline), handover))

    def _address(self, receiver: Any, process: Any, deadline: float) -> tuple[int, str]:
        try:
            if receiver.poll(max(0.0, deadline - time.monotonic())):
                worker_id, endpoint = receiver.recv()
                return worker_id, endpoint
        except EOFError:
            pass
        process.join(timeout=0.1)
        how = (
            "is still starting"
            if process.is_alive()
            else f"ended with exit code {process.exitcode}"
        )
        raise PenstockError(
            f"a local DataLoader worker (num_workers={len(self.processes)}) has not opened its "
            f"port and {how}; see its output on stderr"
        )

    def take_exited(self) -> dict[int, Any]:
        """Return the processes that have died since the last call, by their workers' ids."""
        dead = {
            worker_id: process
            for process, (worker_id, _, _) in zip(self.processes, self.addresses, strict=False)
            if worker_id not in self._dead and not process.is_alive()
        }
        self._dead.update(dead)
        return dead

    def end(self) -> None:
        """End the workers, after their trainer's goodbye message."""
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + _END_S_MAX
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(timeout=_END_S_MAX)
        for code in self._code_folders:
            code.remove()


def _run_own_worker(
    sender: Any, code_root: str, trainer_pid: int, handover: str, key_folder: str
) -> None:
    try:
        release_in_child()
    except KeyboardInterrupt:
        return  # the trainer raises it

    def started(server: _C.PoolServer) -> None:
        sender.send((server.worker_id, server.endpoint))
        sender.close()

    spec = PoolWorkerSpec.of_trainer(trainer_pid, handover, key_folder)
    run_worker(spec, code_root, started, lambda text: print(text, file=sys.stderr))
