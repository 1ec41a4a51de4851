# SPDX-License-Identifier: Apache-2.0
"""Decides which leaves of a pool's batches stay with the workers.

A leaf that the offloaded model does not need beside the boundary tensors, and that the program does
not read either, need not cross. The program is watched first: for some calls the leaves in question
are given out as lazy tensors that have their values, which notice when they are read. Those that
nobody read stay with the workers from then on. If one is read after all, the batch is recalled and
the value is right; a leaf for which that happens more than once in a while is sent again.

Workers on the trainer's own machine send every leaf. They collate in memory that the trainer reads,
so a leaf that is left out would save no copy.

Nothing is withheld while a plan is new: until its boundary tensors were compared and its calls
timed, whole batches are needed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Protocol

from penstock import _C
from penstock.cut.model_call import UsedCut
from penstock.graph.link import Link
from penstock.tracking.batch_origin import BatchHandle

logger = logging.getLogger(__name__)

# A smaller leaf costs less on its way than a recall would.
LEAF_BYTES_MIN = 16 << 10
# For how many calls the program is watched.
WATCHED_CALLS = 8
# A leaf that is recalled for so many of the newest batches is sent again.
RECALLS_MAX = 1
RECALLS_WINDOW = 64


class ShipmentHost(Protocol):
    """The part of a loader that tells workers what to send."""

    def _set_shipment(self, message: bytes | None) -> None: ...

    def _link(self) -> Link | None: ...


class LeafWithholding:
    """The decision for one loader, whatever models are offloaded to it. Confined to the training
    thread."""

    def __init__(
        self, host: Callable[[], ShipmentHost | None], changed: Callable[[], None]
    ) -> None:
        """`changed` is called when batches begin to carry other leaves than before."""
        self.lazy_leaves: Set[int] = frozenset()
        self._host = host
        self._changed = changed
        self._verify_every: dict[int, int] = {}  # by model
        self._cuts: dict[int, tuple[UsedCut, ...]] = {}  # of each model's newest call
        self._read: set[int] = set()  # leaves that the program reads
        self._watched_calls = 0
        self._is_withholding = False
        self._recalls: deque[int] = deque()  # leaves, with the numbers of batches beside
        self._recalled_at: deque[int] = deque()
        self._batch_count = 0

    def take(self, user: int, verify_every: int) -> None:
        """Notes an offloaded model, whose results are compared for one batch in `verify_every`."""
        self._verify_every[user] = verify_every

    def forget(self, user: int) -> None:
        """Notes that a model is offloaded no more."""
        self._verify_every.pop(user, None)
        self._cuts.pop(user, None)
        self.send_whole()

    def note_call(self, user: int, batch: BatchHandle | None, cuts: Sequence[UsedCut]) -> None:
        """To be called after each call of a model, whose graphs ran with these cuts."""
        self._batch_count += 1
        if batch is None or self._is_withholding or not self._is_possible():
            return
        self._read |= batch.read_leaves
        self._cuts[user] = tuple(cuts)
        wanted = self._unread(batch)
        if wanted != self.lazy_leaves:
            self.lazy_leaves = wanted
            self._watched_calls = 0
        elif wanted and batch.is_watched and all(cut.is_settled for cut in cuts):
            self._watched_calls += 1
            if self._watched_calls >= WATCHED_CALLS:
                self._withhold(wanted)

    def send_whole(self) -> None:
        """Has batches come whole from the next on that is asked for, and watches the program anew:
        a plan has changed."""
        self.lazy_leaves = frozenset()
        self._watched_calls = 0
        self._cuts.clear()
        if not self._is_withholding:
            return
        self._is_withholding = False
        host = self._host()
        if host is not None:
            host._set_shipment(None)
        self._changed()

    def note_recall(self, leaf: int) -> None:
        """A leaf that had stayed with its worker was read."""
        while self._recalled_at and self._batch_count - self._recalled_at[0] > RECALLS_WINDOW:
            self._recalled_at.popleft()
            self._recalls.popleft()
        self._recalled_at.append(self._batch_count)
        self._recalls.append(leaf)
        if self._recalls.count(leaf) > RECALLS_MAX and leaf not in self._read:
            self._read.add(leaf)
            logger.info("penstock: tensor %d of the batch is read time and again; it is sent", leaf)
            self.send_whole()

    def _is_possible(self) -> bool:
        host = self._host()
        link = None if host is None else host._link()
        return link is not None and not link.sends_whole

    def _unread(self, batch: BatchHandle) -> frozenset[int]:
        """The leaves that neither the models' suffixes nor the program read, as far as is known."""
        cuts = [cut for cuts in self._cuts.values() for cut in cuts]
        if not cuts or not all(cut.keys for cut in cuts):
            return frozenset()
        needed = self._read.union(*(cut.raw_leaves for cut in cuts))
        return frozenset(
            leaf
            for leaf, leaf_bytes in enumerate(batch.leaf_bytes)
            if leaf_bytes >= LEAF_BYTES_MIN and leaf not in needed
        )

    def _withhold(self, leaves: Set[int]) -> None:
        host = self._host()
        if host is None:
            return
        # The boundary tensors of all graphs together stand for the leaves.
        keys = {key for cuts in self._cuts.values() for cut in cuts for key in cut.keys}
        whole_every = min(self._verify_every.values(), default=1)
        host._set_shipment(
            _C.encode_shipment([sorted(keys)], sorted(leaves), whole_every=whole_every)
        )
        self._is_withholding = True
        self._changed()
        logger.debug("leaves %s stay with the workers", sorted(leaves))
