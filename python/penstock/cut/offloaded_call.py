# SPDX-License-Identifier: Apache-2.0
"""The interface of every callable that stands in the place of an offloaded model's call."""

from __future__ import annotations

from typing import Any

from penstock.cut.cut_context import CutContext
from penstock.graph.planning import CutOptions


class StandIn:
    """The part that does not depend on how the model is captured."""

    context: CutContext

    @property
    def options(self) -> CutOptions:
        """What the caller of `offload` asked for."""
        return self.context.options

    def __reduce__(self) -> Any:
        """A copy of the model is not offloaded, also where its class pickles all it has."""
        return _no_call, ()

    def close(self) -> None:
        """Ends cutting without a word; what workers run for this model is withdrawn."""
        self.context.close()


def _no_call() -> None:
    return None
