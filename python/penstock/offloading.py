# SPDX-License-Identifier: Apache-2.0
"""`offload`: moves what a model computes from the batch alone into the loader's workers.

It installs a Dynamo backend of our own by way of `model.compile`, so the model keeps its class, its
parameters, its hooks and its state_dict. Whatever cannot be handled leaves the model running as it
did before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from penstock.capture import first_sentence, read_placeholders
from penstock.cut_context import CutContext
from penstock.cut_graph import CutGraph
from penstock.lowering import refuse_by_construction
from penstock.plan import Plan
from penstock.planning import CutMode, CutOptions
from penstock.provenance import ProvenanceTable
from penstock.sizes import Unlowerable
from penstock.surroundings import refuse_by_surroundings

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=torch.nn.Module)


def offload(
    model: M,
    loader: Any,
    *,
    cut: CutMode = "auto",
    allow_random: bool = False,
    verify_every: int = 1000,
) -> M:
    """Lets the workers of `loader` run the part of `model` that depends on the batch alone; returns
    `model`.

    The cut is found at the first forward with a batch of `loader`, and `loader.plan` tells it.
    `cut` is "auto" (by price), "maximal" (everything that may move) or "none". With `allow_random`,
    random draws may move, and then come from the workers' generators. The first batch made by
    workers and one in `verify_every` is also computed in the trainer and compared. What cannot be
    handled is refused: one warning is logged, `loader.plan.refused` has the reason, and training
    goes on as it would have.

        model = penstock.offload(model, loader)
        for inputs, target in loader:
            loss = criterion(model(inputs), target)
    """
    options = CutOptions(cut, allow_random, max(1, int(getattr(loader, "num_workers", 0) or 0)))
    if verify_every < 1:
        raise ValueError(
            f"verify_every is {verify_every} but batches are counted from 1; pass a positive number"
        )
    if isinstance(getattr(model, "_compiled_call_impl", None), OffloadedCall):
        detach(model)
    reason = _refusal(model, loader)
    if reason is not None:
        logger.warning("penstock: offload does nothing: %s", reason)
        loader._plan = Plan(refused=reason)
        return model
    if loader._provenance is None:
        loader._provenance = ProvenanceTable()
    context = CutContext(model, weakref.ref(loader), loader._provenance, options, verify_every)
    model.__dict__["_compiled_call_impl"] = OffloadedCall(context)
    return model


def detach(model: M) -> M:
    """Undoes `offload`: the model runs as before, and the loader's workers stop running its
    prefix."""
    call = getattr(model, "_compiled_call_impl", None)
    if isinstance(call, OffloadedCall):
        model._compiled_call_impl = None
        call.close()
    return model


def _refusal(model: torch.nn.Module, loader: Any) -> str | None:
    if isinstance(model, torch.jit.ScriptModule):
        return "the model is a ScriptModule, whose forward Dynamo cannot capture"
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return "the model is the result of torch.compile; offload it before compiling it"
    if getattr(model, "_compiled_call_impl", None) is not None:
        return "the model was compiled with model.compile(); offload it instead"
    if not hasattr(loader, "_provenance"):
        return f"the loader is a {type(loader).__name__}, not a penstock.DataLoader"
    if not getattr(loader, "num_workers", 0):
        return "the loader has num_workers=0, so there is no worker to move anything to"
    return None


class OffloadedCall:
    """Stands where `model.compile` puts its callable. Confined to the training thread."""

    def __init__(self, context: CutContext) -> None:
        self.context = context
        self._refusal: str | None = None
        self._has_run_graph = False
        self._guards_hooks = False
        self._call_impl: Callable[..., Any] = context.model._call_impl
        self._compiled: Callable[..., Any] = torch.compile(
            self._call_impl, backend=self._compile_graph, fullgraph=True
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_tracing() or not self.context.is_open:
            return self._call_impl(*args, **kwargs)
        self._has_run_graph = False
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            if self._has_run_graph or not _is_capture_failure(error):
                raise
            # Dynamo traces before it runs: none of the forward has happened yet.
            reason = self._refusal or _reason(error)
        finally:
            if self._guards_hooks:
                torch._dynamo.config.skip_nnmodule_hook_guards = True
                self._guards_hooks = False
        self.context.give_up(reason)
        if self.context.model._compiled_call_impl is self:
            self.context.model._compiled_call_impl = None
        return self._call_impl(*args, **kwargs)

    def close(self) -> None:
        """Ends cutting without a word; what workers run for this model is withdrawn."""
        self.context.close()

    def _compile_graph(
        self, graph_module: fx.GraphModule, examples: Sequence[Any]
    ) -> Callable[..., Any]:
        """The Dynamo backend. An error raised here ends up in `__call__`."""
        if torch._dynamo.config.skip_nnmodule_hook_guards:
            # The guards of this graph are made after the backend returns. Without those on hooks, a
            # hook added later would never fire.
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            self._guards_hooks = True
        run = self._callable_for(graph_module)

        def run_noted(*inputs: Any) -> Any:
            self._has_run_graph = True
            return run(*inputs)

        return run_noted

    def _callable_for(self, graph_module: fx.GraphModule) -> Callable[..., Any]:
        try:
            refuse_by_construction(graph_module)
            refuse_by_surroundings()
            placeholders = read_placeholders(graph_module)
        except Unlowerable as refusal:
            if any(
                isinstance(node.target, torch._ops.HigherOrderOperator)
                for node in graph_module.graph.nodes
            ):
                # Run by Dynamo, some of them (checkpointing) give other bits than eager does.
                self._refusal = str(refusal)
                raise
            self.context.refuse_graph(str(refusal))
            return graph_module.forward
        return CutGraph(self.context, graph_module, placeholders)


def _reason(error: Exception) -> str:
    if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
        limit = torch._dynamo.config.recompile_limit
        return f"forward had to be captured more than {limit} times, for it keeps changing"
    return f"the model is not one whole graph ({first_sentence(error)})"


def _is_capture_failure(error: Exception) -> bool:
    return isinstance(
        error,
        (
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
            torch._dynamo.exc.IncorrectUsage,
        ),
    ) or (isinstance(error, RuntimeError) and "dynamo" in str(error).lower())
