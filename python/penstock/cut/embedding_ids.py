# SPDX-License-Identifier: Apache-2.0
"""Find the ids that an offloaded model will look up for a batch, before the model runs on it.

Often the batch does not contain the ids: the model computes them, by hashing or crossing columns.
The cut moves this computation into the workers, so the batch carries the ids, and they can be read
while the batch still waits to be trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.cut.cut_context import CutContext
from penstock.cut.offloaded_call import OffloadedCall
from penstock.cut.offloading import LoaderDispatch, offloaded_call
from penstock.tracking.leaves import flatten_batch


def embedding_ids(model: torch.nn.Module, table: str) -> Callable[[Any], torch.Tensor | None]:
    """Return a ``select`` for :meth:`penstock.DataLoader.lookahead` that finds embedding ids.

    Args:
        model (torch.nn.Module): Model offloaded by :func:`penstock.offload`.
        table (str): Name of an embedding of the model, or of a parameter.

    Returns:
        Callable[[Any], torch.Tensor | None]: Takes a batch of the loader and returns all ids that
        the model will look up in the table for it, as a tensor of shape (number of ids,). The ids
        are read from the batch, or from the results that the workers computed. For a batch that was
        sent before the workers had the computation, they are computed in the trainer. None if the
        ids are not known: before the model has run on a batch of this form (for example the smaller
        last one), if the plan leaves the computation of the ids to the trainer (least often with
        ``cut="maximal"``), and for a forward captured as several graphs.

    Raises:
        ValueError: If the model is not offloaded, or has no parameter of that name.

    Example::

        model = penstock.offload(model, loader)
        user_ids = penstock.embedding_ids(model, "users")
        for batch in loader:
            loss = criterion(model(batch), ...)
            for ids in loader.lookahead(8, user_ids):
                if ids is not None:
                    cache.prefetch(ids)
    """
    call = offloaded_call(model)
    if not any(isinstance(one, OffloadedCall) for one in _calls_of(call)):
        raise ValueError(
            f"embedding_ids() needs an offloaded model, got a {type(model).__name__} that is not "
            f"offloaded; call penstock.offload(model, loader) first, and see loader.plan if "
            f"offload() refused it"
        )
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameter = parameters.get(table, parameters.get(f"{table}.weight"))
    if parameter is None:
        raise ValueError(
            f"embedding_ids() needs the name of an embedding of {type(model).__name__}, got "
            f"{table!r}; pass one of {sorted(parameters)}"
        )

    def ids_of(batch: Any) -> torch.Tensor | None:
        leaves = flatten_batch(batch)
        context = _context_of(_calls_of(call), leaves)
        if not context.plan.is_one_graph:
            return None
        found = (context.provenance.lookup(leaf) for leaf in leaves)
        shipped = next((one.handle.boundary for one in found if one is not None), {})
        parts: list[torch.Tensor] = []
        seen: set[tuple[int, ...]] = set()
        for known in reversed(context.prefixes.known_ids):
            sources = [source for source in known.sources if source.table is parameter]
            # A call may have several cuts, for training and evaluation, for one size and any.
            if not sources or known.call in seen or not known.fits(leaves):
                continue
            seen.add(known.call)
            for source in sources:
                ids = known.ids(source, leaves, shipped)
                if ids is None:
                    return None
                parts.append(ids.reshape(-1))
        return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)

    return ids_of


def _calls_of(call: Any) -> tuple[Any, ...]:
    """Return the offloaded calls of a model: one for each of its loaders."""
    return call.calls if isinstance(call, LoaderDispatch) else (call,)


def _context_of(calls: tuple[Any, ...], leaves: Sequence[Any]) -> CutContext:
    """Return the context of the batch's loader; the first context if that is unknown."""
    contexts: list[CutContext] = [call.context for call in calls]
    known = (one for one in contexts if any(one.provenance.lookup(leaf) for leaf in leaves))
    return next(known, contexts[0])
