# SPDX-License-Identifier: Apache-2.0
"""A pool's client between two iterators of the same job, and recalls through it.

Torch ends its workers after each epoch and starts others for the next. The workers of a pool keep
running, and so does the client: a loader keeps it (:class:`ClientCache`), and it stays connected
to the workers, so that the next epoch starts immediately, even while there is no controller. After
two seconds without a request, other jobs may have the workers.

Batches outlive the iterator as well. A :class:`Recaller` has a pool send the whole of a batch that
arrived without some of its leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from penstock import _C
from penstock.errors import ClosedError, PenstockError
from penstock.tracking.batch_origin import BatchHandle

_LAST_RECALLS_S = 5.0  # for all batches together
_CHECK_INTERVAL_S = 1.0  # how often a waiting trainer looks after its workers

_is_exiting = threading.Event()  # the process: its messages will not be read
atexit.register(_is_exiting.set)


class _CachedClient(NamedTuple):
    client: _C.PoolClient
    purpose: Any
    owner_pid: int
    recaller: Recaller | None


class ClientCache:
    """Place for one client, which ends with the loader, or when the program exits."""

    def __init__(self) -> None:
        self._place: list[_CachedClient] = []
        # Time of the controller's last answer to a client of this loader, by time.monotonic().
        self.controller_heard_at: float | None = None
        weakref.finalize(self, _end_all, self._place)

    def put(self, client: _C.PoolClient, purpose: Any, recaller: Recaller | None) -> None:
        """Park ``client``, which must have no other use from now on, except recalls. Ends the
        client parked before."""
        _end_all(self._place)
        self._place.append(_CachedClient(client, purpose, os.getpid(), recaller))

    def end(self) -> None:
        """Ends the client that is here, if there is one."""
        _end_all(self._place)

    @property
    def is_empty(self) -> bool:
        return not self._place

    def take(self, purpose: Any) -> _C.PoolClient | None:
        """Return the client if one was parked here with the same ``purpose``; end any other."""
        if not self._place:
            return None
        cached = self._place[0]
        if cached.purpose != purpose or cached.owner_pid != os.getpid():
            _end_all(self._place)
            return None
        self._place.clear()
        return cached.client


def _end_all(place: list[_CachedClient]) -> None:
    while place:
        cached = place.pop()
        if cached.owner_pid == os.getpid():  # a forked child does not have the thread
            if cached.recaller is not None and not _is_exiting.is_set():
                cached.recaller.recall_all()
            cached.client.stop()


class Recaller:
    """Connection to the workers that made a loader's batches. Batches keep it. Confined to the
    trainer's process."""

    def __init__(self, client: _C.Client, check: Callable[[], None]) -> None:
        """Take ``check``, a method that checks workers, and raises if none is left."""
        self._client = client
        self._check = weakref.WeakMethod(check)
        self._owner_pid = os.getpid()
        self._deadline = math.inf
        self._handles: weakref.WeakSet[BatchHandle] = weakref.WeakSet()

    def note(self, handle: BatchHandle) -> None:
        """Note that leaves of this batch stayed with the workers."""
        self._handles.add(handle)

    def recall_all(self) -> None:
        """Fetch the leaves that the program still has tensors for, before the workers leave. Leaves
        that do not arrive within some seconds raise an error when they are read."""
        if not self._handles:
            return
        from penstock.tracking.lazy_value import values_of  # it loads Dynamo

        self._deadline = time.monotonic() + _LAST_RECALLS_S
        for handle in list(self._handles):
            for value in values_of(handle):
                with contextlib.suppress(Exception):
                    value.materialise()

    def recall(
        self, origin: _C.BatchOrigin, name: str
    ) -> tuple[Sequence[torch.Tensor], Mapping[str, torch.Tensor]]:
        """Return all leaves and boundary tensors of the batch, shown to people as `name`. Blocks.

        Raises PenstockError if no worker can be asked any more, and the dataset's error if the
        batch had to be made again and could not be.
        """
        if os.getpid() != self._owner_pid:
            raise PenstockError(
                f"a tensor of {name} was not sent and was read in another process than the "
                f"loader's; read it before the process forks, for instance by tensor.clone()"
            )
        try:
            self._client.recall(origin)
            while True:
                recalled = self._client.recalled(origin, _CHECK_INTERVAL_S)
                if recalled is not None:
                    leaves, boundary, *_ = recalled
                    return leaves, boundary
                if time.monotonic() > self._deadline:
                    raise ClosedError("no worker has sent it")
                check = self._check()
                if check is not None:
                    check()
        except ClosedError as error:
            raise PenstockError(
                f"a tensor of {name} was not sent, and the loader released its workers before the "
                f"program read it ({error}); read it while the loader exists, or pass "
                f'cut="none" to penstock.offload'
            ) from error
        except BaseException:
            self._client.forget_recall(origin)
            raise
