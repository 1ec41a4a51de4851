# SPDX-License-Identifier: Apache-2.0
"""Takes back prefixes whose results nobody uses.

A program may leave captured graphs behind: a number that changed made Dynamo capture another, or a
pattern of calls does not come again. Their prefixes would run for every batch that fits them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from penstock.cut.live_cut import LiveCut

# A cut that was not used in this many calls, while batches brought all that it needs, is forgotten.
# If its calls come again it is planned again, at most once in as many calls: planning runs
# operators.
UNUSED_CALLS_MAX = 64
FORGOTTEN_MAX = 2


class CutsOfGraph(Protocol):
    """The cuts in use of one captured graph, which owns them: they are gone with it."""

    @property
    def cuts(self) -> Sequence[LiveCut]: ...

    def forget_unused(self, cut: LiveCut) -> None:
        """Stops using a cut, and has its prefix withdrawn."""


class UnusedCuts:
    """Finds the unused cuts of one offloaded model. Confined to the training thread."""

    def __init__(self) -> None:
        self._of_graphs: weakref.WeakSet[CutsOfGraph] = weakref.WeakSet()
        self._call_count = 0

    def add(self, cuts: CutsOfGraph) -> None:
        self._of_graphs.add(cuts)

    def end_call(self, shipped: Set[str]) -> bool:
        """To be called after each call of the model, whose batch came with the boundary tensors
        `shipped`, by key. Returns whether it is a call after which something was looked for."""
        self._call_count += 1
        if self._call_count < UNUSED_CALLS_MAX:
            return False
        self._call_count = 0
        cuts = [
            (owner, cut)
            for owner in list(self._of_graphs)
            for cut in owner.cuts
            if cut.suffix is not None
        ]
        wanted = {key for _, cut in cuts if cut.is_used for key in _keys(cut)}
        for owner, cut in cuts:
            if not cut.is_used and shipped & _keys(cut) - wanted:
                owner.forget_unused(cut)
            cut.is_used = False
        return True

    def orphans(self, installed: Iterable[str]) -> set[str]:
        """The prefixes of graphs that are gone, as they are after `torch._dynamo.reset()`."""
        owned = {cut.planned.prefix for owner in list(self._of_graphs) for cut in owner.cuts}
        return set(installed) - owned


def _keys(cut: LiveCut) -> set[str]:
    return set(cut.keys)
