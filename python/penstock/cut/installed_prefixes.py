# SPDX-License-Identifier: Apache-2.0
"""The prefixes that a loader's workers run for one offloaded model."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

import torch

from penstock.cut.compiled_prefixes import CompiledPrefixes
from penstock.cut.known_ids import KnownIds
from penstock.cut.unused_cuts import CutsOfGraph, UnusedCuts
from penstock.graph.compiled_library import Library
from penstock.graph.planning import PlannedCut
from penstock.tracking.batch_origin import BatchHandle
from penstock.tracking.loader_use import LoaderUse


class PrefixHost(Protocol):
    """The part of a loader that gives prefixes to its workers."""

    def _install_prefix(
        self, prefix: str, constants: list[torch.Tensor], seed: int, library: Library
    ) -> None: ...

    def _remove_prefixes(self, prefixes: set[str]) -> None: ...


class InstalledPrefixes:
    """Confined to the training thread."""

    def __init__(self, user: int, host: Callable[[], PrefixHost | None], use: LoaderUse) -> None:
        """``user`` is the offloaded model, by the id of its context."""
        self.compiler: CompiledPrefixes | None = None  # if prefixes are to be compiled
        self.known_ids: list[KnownIds] = []  # by cut that is in use
        self._user = user
        self._host = host
        self._use = use
        self._installed: set[str] = set()
        self._unused = UnusedCuts()

    def compile(self) -> None:
        """Has prefixes compiled from now on."""
        self.compiler = CompiledPrefixes(self._send)

    def add_graph(self, cuts: CutsOfGraph) -> None:
        """Notes that a captured graph has cuts, which may come out of use."""
        self._unused.add(cuts)

    def install(self, cut: PlannedCut) -> None:
        """Has workers run the prefix of a cut, where it has one."""
        if cut.prefix and cut.prefix not in self._installed:
            self._installed.add(cut.prefix)
            if self._use.take_prefix(self._user, cut.prefix):
                self._send(cut)

    def _send(self, cut: PlannedCut) -> None:
        """Gives workers a prefix, or the compiled library of one that they have."""
        host = self._host()
        if host is not None and cut.prefix in self._installed:
            library = Library() if self.compiler is None else self.compiler.library_of(cut.prefix)
            host._install_prefix(cut.prefix, list(cut.prefix_constants), cut.seed, library)

    def withdraw(self, cut: PlannedCut) -> None:
        """Notes that a cut is in use no more. The workers stop running its prefix, unless another
        that is in use has the same."""
        self.known_ids[:] = [known for known in self.known_ids if known.planned is not cut]
        if all(known.planned.prefix != cut.prefix for known in self.known_ids):
            self._withdraw({cut.prefix})

    def note_call(self, batch: BatchHandle | None) -> None:
        """To be called after each call of the model: withdraws prefixes whose results nobody
        uses."""
        if batch is not None and self._unused.end_call(batch.boundary.keys()):
            self._withdraw(self._unused.orphans(self._installed))

    def close(self) -> None:
        """Withdraws all, and ends a compiler that is at work."""
        if self.compiler is not None:
            self.compiler.close()
        self.known_ids.clear()
        self._withdraw(self._installed)

    def _withdraw(self, prefixes: Set[str]) -> None:
        """Makes the workers stop running those of them that they were given."""
        host, given = self._host(), self._installed & prefixes
        if host is not None and given:
            unused = self._use.drop_prefixes(self._user, given)
            if unused:
                host._remove_prefixes(unused)
            self._installed -= given
            self.known_ids[:] = [
                known for known in self.known_ids if known.planned.prefix not in given
            ]
