# SPDX-License-Identifier: Apache-2.0
"""Has leaves of a pool's batches stay with the workers. Which ones, and when, is decided in
``csrc/loader/leaf_withholding.h``.

While the program is watched, the leaves in question are given out as lazy tensors that have their
values, which notice when they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from penstock import _C
from penstock.cut.model_call import UsedCut
from penstock.graph.link import Link
from penstock.tracking.batch_origin import BatchHandle

logger = logging.getLogger(__name__)


class ShipmentHost(Protocol):
    """The part of a loader that tells workers what to send."""

    def _set_shipment(self, message: bytes | None) -> None: ...

    def _link(self) -> Link | None: ...


class LeafWithholding:
    """For one loader, whatever models are offloaded to it. Confined to the training thread."""

    def __init__(
        self, host: Callable[[], ShipmentHost | None], changed: Callable[[], None]
    ) -> None:
        """`changed` is called when batches begin to carry other leaves than before."""
        self.lazy_leaves: Set[int] = frozenset()
        self._host = host
        self._changed = changed
        self._native = _C.LeafWithholding()

    def take(self, user: int, verify_every: int) -> None:
        """Notes an offloaded model, whose results are compared for one batch in `verify_every`."""
        self._native.take(user, verify_every)

    def forget(self, user: int) -> None:
        """Notes that a model is offloaded no more."""
        self._obey(self._native.forget(user))

    def note_call(self, user: int, batch: BatchHandle | None, cuts: Sequence[UsedCut]) -> None:
        """To be called after each call of a model, whose graphs ran with these cuts."""
        if batch is None or self._native.is_withholding or not self._is_possible():
            self._native.note_call(user, None, [])
            return
        seen = (batch.leaf_bytes, batch.read_leaves, batch.is_watched)
        self._obey(self._native.note_call(user, seen, cuts))

    def send_whole(self) -> None:
        """Has batches come whole from the next on that is asked for, and watches the program anew:
        a plan has changed."""
        self._obey(self._native.send_whole())

    def note_recall(self, leaf: int) -> None:
        """A leaf that had stayed with its worker was read."""
        order = self._native.note_recall(leaf)
        if order is not None:
            logger.info("penstock: tensor %d of the batch is read time and again; it is sent", leaf)
        self._obey(order)

    def _is_possible(self) -> bool:
        host = self._host()
        link = None if host is None else host._link()
        return link is not None and not link.sends_whole

    def _obey(self, order: _C.ShipmentOrder | None) -> None:
        self.lazy_leaves = self._native.watched_leaves
        if order is None:
            return
        host = self._host()
        if host is not None:
            host._set_shipment(order.message)
        self._changed()
        if order.message is not None:
            logger.debug("leaves %s stay with the workers", sorted(self.lazy_leaves))
