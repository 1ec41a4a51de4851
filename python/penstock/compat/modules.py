# SPDX-License-Identifier: Apache-2.0
"""Access to modules: how `torch.nn` calls one, modules of graphs, TorchScript's switches."""

from __future__ import annotations

import functools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from penstock.compat.require import require

require(
    "modules",
    (
        "torch._C._debug_set_autodiff_subgraph_inlining",
        "torch._C._get_graph_executor_optimize",
        "torch._C._is_tracing",
        "torch.fx._lazy_graph_module._LazyGraphModule",
        "torch.fx.graph_module._loader.eval_cache.pop",
        "torch.nn.Module._call_impl",
        "torch.nn.Module._compiled_call_impl",
        "torch.nn.modules.module._global_backward_hooks",
        "torch.nn.modules.module._global_backward_pre_hooks",
        "torch.nn.modules.module._global_forward_hooks",
        "torch.nn.modules.module._global_forward_pre_hooks",
    ),
    needed_by="penstock.offload",
    without="penstock.DataLoader works without it.",
)

from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph_module import _loader as _sources
from torch.nn.modules import module as _module

__all__ = [
    "COMPILED_CALL",
    "Patch",
    "compiled_call_of",
    "global_hooks",
    "graph_module",
    "has_optimized_executor",
    "is_tracing",
    "module_call",
    "own_source",
    "set_small_groups",
]

# The attribute of a module that holds the function that runs in place of its `_call_impl`.
COMPILED_CALL = "_compiled_call_impl"

_GLOBAL_HOOKS = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)


def module_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the method that runs the module with its hooks, regardless of `compile()`."""
    return module._call_impl


def compiled_call_of(module: Any) -> Any:
    """Return the callable that runs in place of `module_call(module)`; None if there is none."""
    return getattr(module, COMPILED_CALL, None)


def graph_module(root: torch.nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """Make a module of a graph, whose generated source is dropped with it.

    Torch keeps the source of each `fx.GraphModule` until the process ends.
    """
    module = fx.GraphModule(root, graph)
    own_source(module)
    return module


def own_source(module: fx.GraphModule) -> None:
    """Make torch drop the generated source of a new module with the module.

    The source is generated now if torch has left that to the first call, which takes three more
    calls each time.
    """
    if isinstance(module, _LazyGraphModule):
        module.real_recompile()
    forward: Any = type(module).forward
    weakref.finalize(forward, _drop_source, forward.__code__.co_filename).atexit = False


def _drop_source(name: str) -> None:
    if name.startswith("<eval_with_key>"):  # several files may share another name
        _sources.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)


def is_tracing() -> bool:
    """Return whether `torch.jit.trace` is recording this thread."""
    return bool(torch._C._is_tracing())


def has_optimized_executor() -> bool:
    """Return whether TorchScript optimizes programs that run on this thread."""
    return bool(torch._C._get_graph_executor_optimize())


def set_small_groups(keeps_them: bool) -> None:
    """Set whether TorchScript keeps differentiable groups with few operators; normally off."""
    torch._C._debug_set_autodiff_subgraph_inlining(not keeps_them)


def global_hooks() -> list[Any]:
    """Return the hooks for all modules, by their kinds; each a dict."""
    return [getattr(_module, name) for name in _GLOBAL_HOOKS]


class Patch:
    """A patch of a method of a class that other code patches as well.

    If another patch was put over it before it is removed, that patch stays, and calls that reach
    this one are passed to the former method.
    """

    def __init__(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`make` returns the replacement for the method that it receives."""
        self._owner, self._name = owner, name
        self._is_own = name in vars(owner)
        self._original: Any = getattr(owner, name)
        self._replacement: Any = make(self._original)
        patch = self

        @functools.wraps(self._original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return patch._replacement(*args, **kwargs)

        self._stand_in = stand_in
        setattr(owner, name, stand_in)

    def undo(self) -> None:
        self._replacement = self._original
        if vars(self._owner).get(self._name) is not self._stand_in:
            return
        if self._is_own:
            setattr(self._owner, self._name, self._original)
        else:
            delattr(self._owner, self._name)
