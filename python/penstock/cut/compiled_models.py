# SPDX-License-Identifier: Apache-2.0
"""Models that the user compiled: the arguments of `torch.compile`, and how they are given again.

The user's compiler is given every captured graph as it stands, and its result is the reference. The
part of a cut graph that stays is given to the same compiler. Fused and laid out anew it may round
otherwise than it did within the whole, so no cut is used before both gave the same bits
(`whole_comparison.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from penstock.graph.call_labels import call_label
from penstock.graph.declared_operators import is_declared
from penstock.graph.sizes import Unlowerable
from penstock.seams.dynamo import (
    OptimizeContext,
    OptimizedModule,
    compiled_by,
    context_of,
    function_under,
    module_under,
    optimize,
)
from penstock.seams.modules import compiled_call_of, graph_module, module_call
from penstock.seams.operators import OpOverload, OpOverloadPacket

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class UserCompile:
    """One call of `torch.compile` by the user. Arguments that only inductor takes, such as `mode`,
    are within the backend."""

    context: OptimizeContext

    @property
    def backend(self) -> Backend:
        return compiled_by(self.context)[0]

    @property
    def backend_name(self) -> str:
        """The backend's name, for people."""
        backend = self.backend
        name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
        return str(name or type(backend).__name__)

    def with_backend(self, backend: Backend) -> Any:
        """The user's call of torch.compile with another backend."""
        original, options = compiled_by(self.context)
        context_manager = getattr(original, "backend_ctx_ctor", None)
        if context_manager is not None:
            backend.backend_ctx_ctor = context_manager  # type: ignore[attr-defined]
        if self.context.compiler_config is not None:
            config = self.context.compiler_config
            backend.get_compiler_config = lambda: config  # type: ignore[attr-defined]
        return optimize(backend, **options)

    def compile_part(self, part: fx.GraphModule, is_dynamic: bool) -> Callable[..., Any]:
        """Compiles the part of a graph that stays; `is_dynamic` says that the graph has sizes that
        vary."""
        backend, options = compiled_by(self.context)
        dynamic = True if is_dynamic else options["dynamic"]
        compiled: Callable[..., Any] = optimize(backend, nopython=True, dynamic=dynamic)(
            part.forward
        )
        return compiled


def user_compile_of(model: Any) -> UserCompile | None:
    """The call of `torch.compile` that `model` is the result of, or that `model.compile()` made;
    None where there was none, or one that turned compilation off."""
    if isinstance(model, OptimizedModule):
        context: Any = model.dynamo_ctx
    elif isinstance(model, torch.nn.Module):
        context = context_of(compiled_call_of(model))
    else:
        context = context_of(model)
    return UserCompile(context) if isinstance(context, OptimizeContext) else None


def recompiled(model: Any, context: Any) -> Callable[..., Any]:
    """The function that the user calls by way of `model`, compiled by `context` in place of the
    user's own.
    """
    if isinstance(model, OptimizedModule):
        return OptimizedModule(module_under(model), context).forward
    if isinstance(model, torch.nn.Module):
        return context(module_call(model))  # type: ignore[no-any-return]
    return context(model)  # type: ignore[no-any-return]


def compiled_target(model: Any) -> Any:
    """The module or function that was compiled: buffers are looked for there."""
    if isinstance(model, OptimizedModule):
        return module_under(model)
    return function_under(model)


@dataclass
class CompiledGraph:
    """One captured graph in the hands of the user's compiler."""

    user: UserCompile
    run_whole: Callable[..., Any]
    is_dynamic: bool

    def compile_suffix(self, suffix: fx.GraphModule) -> Callable[..., Any]:
        return self.user.compile_part(suffix, self.is_dynamic)


def refuse_repeats(graph_module: fx.GraphModule) -> None:
    """Raises Unlowerable for calls that may do more than compute: to compare, the graph is run once
    more."""
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        target: Any = node.target
        if isinstance(target, OpOverloadPacket):
            overloads = [getattr(target, name) for name in target.overloads()]
        else:
            overloads = [target] if isinstance(target, OpOverload) else []
        if overloads:
            is_known = all(o.namespace in _KNOWN_LIBRARIES or is_declared(o) for o in overloads)
        else:
            home = str(getattr(target, "__module__", None) or "torch")
            is_known = home.split(".")[0] in _KNOWN_MODULES and "distributed" not in home
        if not is_known:
            raise Unlowerable(
                f"the compiled model calls {call_label(node)}, which may do more than compute, so "
                "it cannot be run once more to compare; an operator that only computes is declared "
                "by penstock.stateless"
            )


_KNOWN_LIBRARIES = frozenset({"aten", "prims", "prim"})
_KNOWN_MODULES = frozenset({"torch", "_operator", "builtins", "math"})


def copy_of(original: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph over the same tensors. Compilers change the graph that they are given."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in original.graph.nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    return graph_module(original, graph)
