# SPDX-License-Identifier: Apache-2.0
"""What the captured graphs of one offloaded model share."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.plan import Plan
from penstock.planning import CutOptions, PlannedCut
from penstock.provenance import ProvenanceTable

if TYPE_CHECKING:
    from penstock.known_ids import KnownIds

logger = logging.getLogger(__name__)

# After so many calls in a row without a batch of the loader, the plan says so.
FOREIGN_CALLS_MAX = 16


class PrefixHost(Protocol):
    """What a cut needs of the loader."""

    _plan: Plan | None

    def _install_prefix(self, prefix: str, constants: list[torch.Tensor]) -> None: ...

    def _remove_prefixes(self, prefixes: set[str]) -> None: ...


@dataclass
class CutContext:
    """What the graphs of one offloaded model share."""

    model: torch.nn.Module
    host: weakref.ref[PrefixHost]
    provenance: ProvenanceTable
    options: CutOptions
    verify_every: int
    is_open: bool = True  # False once cutting was given up
    installed: set[str] = field(default_factory=set)
    known_ids: list[KnownIds] = field(default_factory=list)  # by cut that is in use
    foreign_calls: int = 0  # since the last call with a tensor of the loader
    reasons: set[str] = field(default_factory=set)  # refusals that were logged

    def install(self, cut: PlannedCut) -> None:
        host = self.host()
        if host is not None and cut.prefix not in self.installed:
            host._install_prefix(cut.prefix, list(cut.prefix_constants))
            self.installed.add(cut.prefix)

    def refuse_graph(self, reason: str) -> None:
        """Notes that one captured graph stays whole."""
        if reason not in self.reasons:
            self.reasons.add(reason)
            logger.warning("penstock: nothing moves for this graph: %s", reason)
        self.publish(Plan(refused=reason))

    def note_call(self, is_foreign: bool) -> None:
        """Counts calls without any tensor of the loader, so that a cut that never comes has a
        reason."""
        self.foreign_calls = self.foreign_calls + 1 if is_foreign else 0
        if self.foreign_calls == FOREIGN_CALLS_MAX:
            self.refuse_graph(
                f"{FOREIGN_CALLS_MAX} calls in a row were given no tensor of the loader as it came"
                " (a moved, converted or sliced batch is another tensor)"
            )

    def publish(self, plan: Plan) -> None:
        """Makes `plan` the loader's plan in force. A refusal never hides a plan that moves
        something."""
        host = self.host()
        if host is None:
            return
        if plan.refused is None or host._plan is None or host._plan.refused is not None:
            host._plan = plan

    def give_up(self, reason: str) -> None:
        """Stops cutting for good; training goes on with whole graphs."""
        if self.is_open:
            logger.warning("penstock: %s; the whole model runs in the trainer from here on", reason)
            self.close(Plan(refused=reason))

    def close(self, plan: Plan | None = None) -> None:
        """Stops cutting and withdraws what the workers run; `plan` is what the loader shows
        then."""
        self.is_open = False
        self.known_ids.clear()
        host = self.host()
        if host is not None:
            if self.installed:
                host._remove_prefixes(self.installed)
            host._plan = plan
