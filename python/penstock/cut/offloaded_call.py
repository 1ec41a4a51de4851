# SPDX-License-Identifier: Apache-2.0
"""The callables that stand in the place of an offloaded model's call.

A model that is used with several loaders, such as one for training and one for validation, has an
offloaded call of its own for each of them, with its own plans. A call of the model belongs to the
loader that its tensors came from, and to the one that delivered last where that does not show.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.cut.cut_context import CutContext
from penstock.graph.planning import CutOptions
from penstock.seams.trees import tree_leaves


class StandIn:
    """The part that does not depend on how the model is captured."""

    context: CutContext

    @property
    def options(self) -> CutOptions:
        """The options of `offload`, as its caller gave them."""
        return self.context.options

    def __reduce__(self) -> Any:
        """A copy of the model is not offloaded, also where its class pickles all it has."""
        return _no_call, ()

    def close(self) -> None:
        """Ends cutting in silence; prefixes that workers run for this model are withdrawn."""
        self.context.close()


class SeveralLoaders(StandIn):
    """Stands in the place of the model's call. Confined to the training thread."""

    def __init__(self, first: Any) -> None:
        self._calls = [first]  # OffloadedCall or OffloadedScript, by loader
        self.call_impl = first.call_impl
        self.former = first.former

    @property
    def context(self) -> Any:  # type: ignore[override]
        """That of the loader that delivered last."""
        return self._newest().context

    @property
    def calls(self) -> tuple[Any, ...]:
        return tuple(self._calls)

    def call_for(self, loader: Any) -> Any:
        """The call that belongs to a loader, or None."""
        return next((call for call in self._calls if call.context.host() is loader), None)

    def add(self, call: Any) -> None:
        """Loaders that are gone leave nothing behind."""
        for old in [old for old in self._calls if old.context.host() is None]:
            self._calls.remove(old)
            old.close()
        self._calls.append(call)

    def remove(self, call: Any) -> None:
        self._calls.remove(call)
        call.close()

    def close(self) -> None:
        for call in self._calls:
            call.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_of((args, kwargs))(*args, **kwargs)

    def _call_of(self, arguments: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        for call in self._calls:
            provenance = call.context.provenance
            if any(provenance.lookup(tensor) is not None for tensor in tensors):
                return call
        return self._newest()

    def _newest(self) -> Any:
        return max(self._calls, key=lambda call: call.context.provenance.delivered_at)


def _no_call() -> None:
    return None
