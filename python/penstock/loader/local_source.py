# SPDX-License-Identifier: Apache-2.0
"""The source of an iterator whose workers this process starts."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import torch

from penstock import _C
from penstock.loader.freedoms import any_worker_serves
from penstock.loader.held_slabs import retire_at_forks
from penstock.loader.loader_face import LoaderFace
from penstock.loader.local_workers import LocalWorkers, sleep_if_python_exits
from penstock.loader.recall import Recaller
from penstock.loader.source import NativeThread, StreamOptions
from penstock.program_line import warn
from penstock.stream.progress import Progress
from penstock.worker.arena_cap import arena_bytes
from penstock.worker.fetching import FetchSpec
from penstock.worker.stuck_worker import spoken_debt
from penstock.worker.worker_main import WorkerSpec

_SHARD_ENDED = int(_C.Client.Event.SHARD_ENDED)
_WORKER_LOST = int(_C.Client.Event.WORKER_LOST)

_STRETCH = 4  # as kStretch of the native stream
_SLABS_MAX = 64
_LOOK_INTERVAL_S = 1.0  # after workers that died instead of an answer


class LocalSource:
    """A `Source`: ``worker_count`` children of this process, or of its fork server."""

    def __init__(
        self,
        loader: LoaderFace,
        options: StreamOptions,
        fetch: FetchSpec,
        progress: Progress,
        worker_count: int,
        base_seed: int,
    ) -> None:
        self._any_worker = any_worker_serves(loader, worker_count)
        self._is_iterable = options.is_iterable
        # A worker may have made all the batches that the trainer has, while another makes one.
        slab_count = options.prefetch_depth
        if self._any_worker:
            slab_count = min(_SLABS_MAX, _STRETCH * options.prefetch_depth * worker_count)
        self._workers = LocalWorkers(
            loader.multiprocessing_context or torch.multiprocessing,
            ends_trainer=not self._any_worker,
        )
        self.processes = self._workers.processes
        self._gone: set[int] = set()  # workers that died and that the others do without
        self._is_active: list[bool] = []  # by worker: it has not ended its part of the epoch
        self._client = _C.Client(
            worker_count=worker_count,
            shard_count=1 if self._any_worker else options.shard_count,
            slab_count=slab_count,
            any_worker=self._any_worker,
            keep_workers=bool(loader.persistent_workers),
            **options.of_client(loader),
        )
        self.stream = options.open_stream(self._client)
        retire_at_forks(self._client)
        self.native_thread = NativeThread()
        self.recaller: Recaller | None = None
        spec = WorkerSpec(
            slab_count,
            arena_bytes(),
            self._any_worker,
            os.getpid(),
            options.shard_count,
            options.is_seeded_by_batch,
            progress.starts,
            dict(enumerate(progress.states_before)),
            options.may_begin_early,
            progress.state_interval,
        )
        self._question = 0  # the last one about states
        self._timeout_s = float(loader.timeout)  # 0: without a bound
        self._state_interval = progress.state_interval
        try:
            self._workers.start(
                worker_count, base_seed, fetch, loader.worker_init_fn, spec, self._client
            )
            self._client.start()  # native threads start after the last fork
        except BaseException:
            self.close()
            raise
        for message in loader._prefixes.values():
            self.install_prefix(message)

    def begin_epoch(self, progress: Progress) -> None:
        self._is_active = [place not in self._gone for place in range(len(self.processes))]

    def want_states(self, every: int) -> None:
        if every != self._state_interval:
            self._state_interval = every
            self._client.want_states(every, 0)

    def ask_states(self) -> dict[int, Any]:
        self._question += 1
        self._client.want_states(self._state_interval or 1, self._question)
        states: dict[int, bytes | None] = {}
        missing = set(range(len(self.processes))) - self._gone
        began_at = time.monotonic()
        while missing:
            answer = self._client.worker_states(_LOOK_INTERVAL_S)
            if answer is None:
                self._check_unanswered(missing, time.monotonic() - began_at)
                continue
            # A child of this process wrote it.
            question, worker_id, of_worker = pickle.loads(answer)
            if question == self._question:  # one before it was interrupted
                missing.discard(worker_id)
                states.update(of_worker)
        return {
            shard_id: pickle.loads(state) for shard_id, state in states.items() if state is not None
        }

    def _check_unanswered(self, missing: set[int], waited_s: float) -> None:
        """Of workers that owe an answer: those that died will not give one."""
        dead = [place for place in missing if not self.processes[place].is_alive()]
        if dead and (not self._any_worker or len(self._gone) + len(dead) == len(self.processes)):
            self._workers.raise_lost([self.processes[place] for place in dead])
        for place in dead:
            self._tell_of(place)
            missing.discard(place)
        if missing and 0 < self._timeout_s < waited_s:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout_s:g} seconds, in which workers "
                f"{sorted(missing)} did not tell the state of their dataset, which the next epoch "
                f"begins with; see what they do with the dataset"
            )

    def note(self, event: int, value: Any, extra: Any) -> None:
        if event == _SHARD_ENDED:
            if extra:  # it was the worker's last
                self._is_active[value] = False
            return
        sleep_if_python_exits()
        if event == _WORKER_LOST:
            self._workers.raise_lost([self.processes[value]])
        self._tell_of(value)

    def end_epoch(self) -> None:
        # Nothing waits for a worker whose last batch another has made as well.
        for place, process in enumerate(self.processes):
            if self._any_worker and self._is_active[place] and not process.is_alive():
                self._tell_of(place)

    def _tell_of(self, place: int) -> None:
        """Warns of a death that the others make up for, once."""
        if place in self._gone:
            return
        self._gone.add(place)
        self._is_active[place] = False
        process = self.processes[place]
        warn(
            f"DataLoader worker {place} (pid {process.pid}) "
            f"{self._workers.how_it_ended(process)}; the others make the batches "
            f"that it owed, and are {sum(self._is_active)} now",
        )

    def check(self) -> None:
        dead = [
            process
            for process, is_active in zip(self.processes, self._is_active, strict=True)
            if is_active and not process.is_alive()
        ]
        # Where any worker may make any batch, the native side tells of those that are missed.
        if dead and (not self._any_worker or len(dead) == sum(self._is_active)):
            self._workers.raise_lost(dead)

    def who_is_awaited(self) -> str:
        awaited = self._client.awaited()
        if awaited is None:
            return ""
        worker_id, sequence, indices, is_pickled = awaited
        samples = ""
        if not self._is_iterable:
            samples = repr(pickle.loads(indices) if is_pickled else indices)
        return "\n" + spoken_debt(worker_id, self.processes[worker_id].pid, sequence, samples)

    def counters(self) -> dict[str, Any]:
        return self.stream.counters()

    @property
    def workers_apart(self) -> dict[str, str]:
        return {}  # they are of this machine, and compare themselves with each prefix

    def install_prefix(self, message: bytes) -> None:
        self._client.install_prefix(message)

    def remove_prefixes(self) -> None:
        self._client.remove_prefixes()

    def show_plan(self, plan: Any, change_count: int) -> None:
        """Nobody looks at workers that are the trainer's own."""

    def set_shipment(self, message: bytes | None) -> None:
        """Leaves lie in shared memory anyway, so there is nothing to gain."""

    def close(self) -> None:
        try:
            self._client.stop()
            self.native_thread.ended.set()
        finally:
            self._workers.end()
