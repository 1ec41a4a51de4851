# SPDX-License-Identifier: Apache-2.0
"""Access to Dynamo, which captures models, and to Inductor, which compiles prefixes.

Dynamo's settings are read and written through `config`: they are Dynamo's names, and none is
private.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from penstock.compat.require import require

require(
    "dynamo",
    (
        "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
        "torch._dynamo.config.accumulated_recompile_limit",
        "torch._dynamo.config.enable_dynamo_decompositions",
        "torch._dynamo.config.patch",
        "torch._dynamo.config.recompile_limit",
        "torch._dynamo.config.record_runtime_overhead",
        "torch._dynamo.config.skip_nnmodule_hook_guards",
        "torch._dynamo.config.suppress_errors",
        "torch._dynamo.config.trace_numpy",
        "torch._dynamo.convert_frame.register_bytecode_hook",
        "torch._dynamo.disable",
        "torch._dynamo.eval_frame.OptimizeContext",
        "torch._dynamo.eval_frame.OptimizedModule",
        "torch._dynamo.eval_frame.innermost_backend",
        "torch._dynamo.eval_frame.set_code_exec_strategy",
        "torch._dynamo.exc.FailOnRecompileLimitHit",
        "torch._dynamo.exc.SkipFrame",
        "torch._dynamo.exc.TorchDynamoException",
        "torch._dynamo.external_utils.wrap_inline",
        "torch._dynamo.guards.DeletedGuardManagerWrapper",
        "torch._dynamo.mutation_guard.install_generation_tagging_init",
        "torch._dynamo.optimize",
        "torch._dynamo.source.TensorPropertySource",
        "torch._dynamo.source.is_from_local_source",
        "torch._dynamo.trace_rules.check",
        "torch._dynamo.types.FrameAction.DEFAULT",
        "torch._dynamo.types.FrameExecStrategy",
        "torch._guards.CompileContext.current_compile_id",
        "torch._guards.Source",
        "torch._inductor.aot_compile",
    ),
    needed_by="penstock.offload",
    without="penstock.DataLoader works without it.",
)

import torch._inductor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import config as config
from torch._dynamo import exc
from torch._dynamo.convert_frame import register_bytecode_hook
from torch._dynamo.eval_frame import OptimizeContext as OptimizeContext
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule
from torch._dynamo.eval_frame import (  # type: ignore[attr-defined]
    innermost_backend,
    set_code_exec_strategy,
)
from torch._dynamo.exc import SkipFrame as SkipFrame
from torch._dynamo.external_utils import wrap_inline as wrap_inline
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.mutation_guard import install_generation_tagging_init
from torch._dynamo.source import TensorPropertySource as TensorPropertySource
from torch._dynamo.source import is_from_local_source as is_from_local_source
from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]
from torch._guards import CompileContext
from torch._guards import Source as Source

__all__ = [
    "ADVICE",
    "CAPTURE_FAILURES",
    "Capture",
    "OptimizeContext",
    "OptimizedModule",
    "SkipFrame",
    "Source",
    "TensorPropertySource",
    "capture_count",
    "compile_ahead",
    "compiled_by",
    "config",
    "context_of",
    "current_capture",
    "drop_capture",
    "ends_by_returning",
    "function_under",
    "has_lazy_modules",
    "is_near_capture_limit",
    "is_from_local_source",
    "is_skipped",
    "module_under",
    "note_captured_code",
    "optimize",
    "optimize_isolated",
    "source_of",
    "allow_recapture",
    "untraced",
    "with_settings",
    "wrap_inline",
]

F = TypeVar("F", bound=Callable[..., Any])
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# The exceptions of Dynamo when it cannot capture a call. IncorrectUsage is missing from torch 2.12
# on.
CAPTURE_FAILURES: tuple[type[BaseException], ...] = tuple(
    getattr(exc, name)
    for name in ("TorchDynamoException", "FailOnRecompileLimitHit", "IncorrectUsage")
    if hasattr(exc, name)
)
# The loggers of Dynamo's advice for people who compile a model, and the start of that advice.
ADVICE = {
    "torch._dynamo.variables.tensor": "Graph break from `Tensor.item()`",
    "torch._dynamo.convert_frame": "torch._dynamo hit config.",
}


class Capture(NamedTuple):
    """The number of a frame's code in this process, and the number of its capture."""

    frame: int
    number: int


def current_capture() -> Capture | None:
    """Return the capture that is in progress on this thread; None if there is none."""
    number = CompileContext.current_compile_id()
    if number is None or number.frame_id is None or number.frame_compile_id is None:
        return None
    return Capture(number.frame_id, number.frame_compile_id)


def ends_by_returning(graph_module: fx.GraphModule) -> bool:
    """Return whether the graph, which was just captured, ends where its frame returns."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    return reason is not None and not reason.graph_break


def note_captured_code(listener: Callable[[CodeType], None]) -> None:
    """Call `listener` with the code of each frame that Dynamo captures from now on.

    It is called during the capture. The same listener is added once.
    """
    if listener not in _listeners:
        _listeners.append(listener)
        register_bytecode_hook(lambda code, _: listener(code))


_listeners: list[Callable[[CodeType], None]] = []


def capture_count(code: CodeType) -> int:
    """Return the number of Dynamo's captures of a frame's code, by any caller."""
    return sum(entry.code is not None for entry in _debug_get_cache_entry_list(code))


def is_near_capture_limit(code: CodeType) -> bool:
    """Return whether Dynamo may refuse the next capture of a frame's code because of their number.

    The limits hold for the present captures, and for all captures so far.
    """
    entries = _debug_get_cache_entry_list(code)
    return bool(entries) and (
        len(entries) >= config.recompile_limit
        or max(entry.compile_id.frame_compile_id or 0 for entry in entries) + 1
        >= config.accumulated_recompile_limit
    )


def patch_modules() -> None:
    """Make Dynamo replace the `torch.nn.Module` methods that it replaces at its first capture."""
    install_generation_tagging_init()


def allow_recapture(code: CodeType) -> None:
    """Make Dynamo capture frames of this code again.

    Once any caller has reached the limit of captures, Dynamo permanently leaves frames without a
    matching capture to Python, for all callers.
    """
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))


def drop_capture(code: CodeType, capture: Capture) -> None:
    """Remove one capture from Dynamo's cache.

    Dynamo itself does this when an object that it guards is freed.
    """
    for entry in _debug_get_cache_entry_list(code):
        number = entry.compile_id
        if (number.frame_id, number.frame_compile_id) == capture:
            state: Any = entry.guard_manager.extra_state
            if state is not None:
                reason = "no model uses this capture any more"
                state.invalidate(entry, DeletedGuardManagerWrapper(reason))
            return


def untraced(function: F) -> F:
    """Keep Dynamo from tracing into a function, whose calls would then be in the graph."""
    disabled: F = torch._dynamo.disable(function)
    return disabled


def with_settings(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Return a function that calls `function` with these settings of Dynamo in place.

    Torch 2.15 leaves a variable for each `config.patch(...)` in the calling thread's context, so
    patches are reused. Older torch cannot enter a patch within itself, so each call takes an idle
    one.
    """
    idle = _idle_patches.setdefault(tuple(settings.items()), [])

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            patch = idle.pop()
        except IndexError:
            patch = config.patch(**settings)
        try:
            with patch:
                return function(*args, **kwargs)
        finally:
            idle.append(patch)

    return called


_idle_patches: dict[tuple[tuple[str, Any], ...], list[Any]] = {}


def is_skipped(function: Callable[..., Any]) -> bool:
    """Return whether Dynamo leaves the frames of ``function`` to Python."""
    return bool(torch._dynamo.trace_rules.check(function))


def source_of(node: fx.Node) -> Source | None:
    """Return Dynamo's source of the value of a captured graph's placeholder."""
    argument = node.meta.get("grapharg")
    source = argument.source if argument is not None else getattr(node, "_dynamo_source", None)
    return source if isinstance(source, Source) else None


def optimize(backend: Backend, **options: Any) -> Callable[..., Any]:
    """Call `torch.compile` by its older name, which takes options that the newer one does not."""
    compiled: Callable[..., Any] = torch._dynamo.optimize(backend, **options)
    return compiled


def optimize_isolated(backend: Backend, beside: Any = None, **options: Any) -> Any:
    """Call `optimize`, with captures that are counted separately from the program's captures.

    They are counted together with the captures of `beside`. Torch can count captures separately
    from 2.13 on; before, all of them are counted together.
    """
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        return optimize(backend, **options)
    context: Any = optimize(backend, isolate_recompiles=True, **options)
    if beside is not None:
        context._isolate_recompiles_id = beside._isolate_recompiles_id
    return context


def compiled_by(context: OptimizeContext) -> tuple[Backend, dict[str, Any]]:
    """Return the user's backend of one `torch.compile`, and the `optimize` options to repeat it."""
    hooks = context._hooks
    options = {
        "nopython": context.fullgraph,
        "error_on_graph_break": context.error_on_graph_break,
        "dynamic": context._dynamic,
        "guard_filter_fn": hooks.guard_filter_fn if hooks is not None else None,
    }
    return innermost_backend(context.callback), options  # type: ignore[arg-type]


def context_of(function: Any) -> Any:
    """Return the context in the closure of a function that `torch.compile` returned.

    Return None for any other function.
    """
    if not inspect.isfunction(function):
        return None
    if getattr(function, "_torchdynamo_wrapper_id", None) != id(function):
        return None
    return inspect.getclosurevars(function).nonlocals.get("self")


def module_under(model: OptimizedModule) -> torch.nn.Module:
    """Return the module that `torch.compile` was given."""
    module: torch.nn.Module = model._orig_mod
    return module


def function_under(function: Any) -> Any:
    """Return the function that `torch.compile` was given; ``function`` itself if not compiled."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def has_lazy_modules(model: OptimizedModule) -> bool:
    """Return whether a nested module has parameters that its first call will initialise."""
    return hasattr(model._orig_mod, "_initialize_hook")


def compile_ahead(module: fx.GraphModule, examples: tuple[Any, ...], path: str) -> str:
    """Compile an exported module to a shared library; return its path."""
    options = {"aot_inductor.output_path": path}
    return str(torch._inductor.aot_compile(module, examples, options=options))
