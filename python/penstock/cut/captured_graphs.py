# SPDX-License-Identifier: Apache-2.0
"""Keep the graphs that Dynamo captured for offloaded models: one backend per process.

Dynamo keeps captured graphs with the code of a forward, behind guards. Instances of one class, the
loaders of one model, folds and sweeps run the same code, so they share a graph where its guards
allow it. A graph therefore holds no data of a model: when it runs, it finds the offloaded call that
is running on its thread, and that call has the cuts.

A graph that no open call has run lately is kept for the next model of its kind. A few are kept for
each frame; older ones are removed from Dynamo's cache.

If the user compiled the model, the user's compiler receives every captured graph unchanged, and its
result is the reference. The remaining part of a cut graph is compiled by the same compiler. With
other fusions and layouts, it may round differently than within the whole graph, so no cut is used
before both gave the same bits (`whole_comparison.py`).
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from penstock.compat.dynamo import (
    Capture,
    OptimizeContext,
    OptimizedModule,
    SkipFrame,
    compiled_by,
    context_of,
    current_capture,
    drop_capture,
    ends_by_returning,
    function_under,
    module_under,
    note_captured_code,
    optimize,
    optimize_isolated,
)
from penstock.compat.modules import compiled_call_of, graph_module, module_call, own_source
from penstock.compat.operators import OpOverload, OpOverloadPacket
from penstock.cut.eager_comparison import ProgramStamp
from penstock.graph.capture import (
    Placeholder,
    call_label,
    read_placeholders,
    refuse_by_construction,
)
from penstock.graph.operators import is_declared
from penstock.graph.sizes import Unlowerable, Unrunnable
from penstock.tracking.lazy_tensor import LazyTensor, memory_in, plain

# Limit of graphs per frame that are kept although no open call uses them.
UNUSED_MAX = 8

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class GraphRunner(Protocol):
    """An offloaded call, which runs captured graphs."""

    def note_capture(self, frame: int) -> None:
        """Handle Dynamo's capture of a graph of this frame for the call."""

    def run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Run a graph, or a part of it."""

    def stamp(self) -> tuple[Any, ProgramStamp]:
        """Return the model's program and that program's present state.

        The program is an object that models share, and is held weakly.
        """

    @property
    def is_observing(self) -> bool:
        """Return whether no part of the program may run in place of a graph."""
        ...

    def refuse_frame(self, examples: Sequence[Any], reason: str) -> None:
        """Handle a frame that Python runs because its graph cannot run as recorded."""


class CapturedGraph:
    """One captured graph. Confined to the thread that captures it, except for `run_whole`."""

    def __init__(
        self,
        module: fx.GraphModule,
        run_whole: Callable[..., Any],
        *,
        placeholders: Sequence[Placeholder] = (),
        is_dynamic: bool = False,
        refusal: str | None = None,
    ) -> None:
        """`refusal` is the reason why no part of it can move."""
        self.module = module
        self.run_whole = run_whole
        self.placeholders = placeholders
        self.is_dynamic = is_dynamic
        self.refusal = refusal
        self.is_whole_frame = ends_by_returning(module)
        self.code: weakref.ref[types.CodeType] | None = None  # of the frame, once known
        self.capture: Capture | None = current_capture()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # open calls that have run it
        self.contained: set[tuple[int, ...]] = set()  # see `eager_comparison.observe`
        # The program of which it was captured, and its state then.
        self.stamp = _running.calls[-1].stamp() if _running.calls else None

    def drop(self) -> None:
        """Remove the graph from Dynamo's cache: calls that fit it are captured again."""
        code = None if self.code is None else self.code()
        if code is not None and self.capture is not None:
            drop_capture(code, self.capture)

    def by(self, user: UserCompile | None) -> CompiledGraph | None:
        """Return the graph as compiled by the user's compiler, if there is one."""
        return None if user is None else CompiledGraph(user, self.run_whole, self.is_dynamic)


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[GraphRunner] = []


_running = _Running()  # per thread
_frames: dict[int, list[weakref.ref[CapturedGraph]]] = {}  # by Dynamo's number of the frame
_newest: weakref.ref[CapturedGraph] | None = None  # the graph whose code is not known yet
_skipped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # why Python runs a class or a function
_broken: WeakIdKeyDictionary = WeakIdKeyDictionary()  # code of frames that are not one graph


def begin_run(call: GraphRunner) -> None:
    """Mark the start of an offloaded call's run; call `end_run` at its end."""
    _running.calls.append(call)


def end_run() -> None:
    _running.calls.pop()


def skip_reason(model: Any) -> str | None:
    """Return why Dynamo has left the forward of such models to Python since a capture of one."""
    reason: str | None = _skipped.get(_program_of(model))
    return reason


def note_skipped(model: Any, reason: str) -> None:
    _skipped[_program_of(model)] = reason


def is_broken(code: types.CodeType) -> bool:
    """Return whether Dynamo has captured the frame as more or less than one graph.

    Lines of the program then run before or after the graph.
    """
    return code in _broken


def note_broken(code: types.CodeType) -> None:
    """Note that Python ran the frame, and Dynamo at most frames that it calls."""
    _broken[code] = True


def _program_of(model: Any) -> Any:
    return type(model) if isinstance(model, torch.nn.Module) else getattr(model, "__code__", model)


def capture_graph(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Dynamo backend for models that the user did not compile."""
    call = _begin_capture()
    try:
        refuse_by_construction(graph_module)
        placeholders = read_placeholders(graph_module)
    except Unrunnable as refusal:
        # Python runs the frame, as it does without penstock.
        if call is not None:
            call.refuse_frame(examples, str(refusal))
            if call.is_observing:
                raise
        raise SkipFrame(str(refusal)) from refusal
    except Unlowerable as refusal:
        own_source(graph_module)
        return _register(CapturedGraph(graph_module, graph_module.forward, refusal=str(refusal)))
    own_source(graph_module)
    return _register(CapturedGraph(graph_module, graph_module.forward, placeholders=placeholders))


class UserBackend:
    """Dynamo backend for models that the user compiled with one backend.

    Backends are equal if the user's backends are, so that models share their graphs as they do
    without penstock.
    """

    def __init__(self, user: UserCompile) -> None:
        self._user = user.backend

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserBackend) and bool(self._user == other._user)

    def __hash__(self) -> int:
        return hash(type(self))

    def __call__(self, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph. The user's backend gets graphs that cannot be cut."""
        _begin_capture()
        examples = _with_plain_examples(graph_module, examples)
        is_dynamic = any(not isinstance(example, torch.Tensor) for example in examples)
        try:
            refuse_by_construction(graph_module)
            refuse_repeats(graph_module)
            placeholders = read_placeholders(graph_module)
            graph = copy_of(graph_module)
        except Unlowerable as refusal:
            run_whole = _with_memory(self._user(graph_module, examples))
            return _register(CapturedGraph(graph_module, run_whole, refusal=str(refusal)))
        run_whole = _with_memory(self._user(graph_module, examples))
        return _register(
            CapturedGraph(graph, run_whole, placeholders=placeholders, is_dynamic=is_dynamic)
        )


def _with_plain_examples(graph_module: fx.GraphModule, examples: Sequence[Any]) -> list[Any]:
    """Return the examples with an ordinary tensor in place of each lazy one.

    The graph is changed accordingly: when it runs, it receives the values, and compilers' treatment
    of wrappers is meant for other wrappers.
    """
    given: list[Any] = []
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(nodes, examples, strict=True):
        if isinstance(example, LazyTensor):
            # Without values, made from Dynamo's fake tensor: Dynamo knows the sources of its sizes.
            fake = node.meta["example_value"]
            example = node.meta["example_value"] = plain(fake)
            if fake.requires_grad:
                example = node.meta["example_value"] = example.detach().requires_grad_()
        given.append(example)
    return given


def _with_memory(run: Callable[..., Any]) -> Callable[..., Any]:
    """Pass `run` ordinary tensors for lazy ones: code of the user's compiler may read memory."""

    def run_whole(*inputs: Any) -> Any:
        if LazyTensor in map(type, inputs):
            inputs = memory_in(inputs)
        return run(*inputs)

    return run_whole


def _begin_capture() -> GraphRunner | None:
    """Note a capture for the running call, and make room for its graph."""
    call = _running.calls[-1] if _running.calls else None
    capture = current_capture()
    if capture is None:
        return call
    _forget_unused(capture.frame)
    if call is not None:
        call.note_capture(capture.frame)
    return call


def _register(graph: CapturedGraph) -> Callable[..., Any]:
    """Return the callable that Dynamo runs in place of the graph."""
    global _newest
    _newest = weakref.ref(graph)
    if graph.capture is not None:
        _frames.setdefault(graph.capture.frame, []).append(weakref.ref(graph))

    def run(*inputs: Any) -> Any:
        if not _running.calls:
            return graph.run_whole(*inputs)
        return _running.calls[-1].run_graph(graph, inputs)

    return run


def _note_code(code: types.CodeType) -> None:
    """Note the code that Dynamo has made to replace this frame's code."""
    if not _running.calls:
        return
    graph = None if _newest is None else _newest()
    if graph is not None and graph.code is None and graph.capture == current_capture():
        graph.code = weakref.ref(code)
    else:
        graph = None
    if graph is None or not graph.is_whole_frame:
        note_broken(code)


def drop_stale(model: Any) -> None:
    """Remove stale graphs of a program from Dynamo's cache.

    These were captured before a change that Dynamo does not guard. Call this before another model
    runs the program for the first time.
    """
    program = _program_of(model)
    graphs = [graph for known in _frames.values() for one in known if (graph := one()) is not None]
    for graph in graphs:
        if graph.stamp is not None and graph.stamp[0]() is program:
            if not graph.stamp[1].is_current():
                graph.drop()


def stamp_of(model: Any, modules: Sequence[torch.nn.Module]) -> tuple[Any, ProgramStamp]:
    """Return the stamp for `GraphRunner.stamp`."""
    return weakref.ref(_program_of(model)), ProgramStamp(list(modules))


def _forget_unused(frame: int) -> None:
    """Remove graphs of a frame that are no longer used from Dynamo's cache, the oldest first."""
    graphs = [graph for known in _frames.get(frame, ()) if (graph := known()) is not None]
    unused = [graph for graph in graphs if not graph.users]
    for graph in unused[: max(0, len(unused) - UNUSED_MAX)]:
        graph.drop()
        graphs.remove(graph)
    _frames[frame] = [weakref.ref(graph) for graph in graphs]
    for other in [other for other, known in _frames.items() if not any(one() for one in known)]:
        del _frames[other]  # its code was freed


@functools.cache
def capturing(*, whole: bool) -> OptimizeContext:
    """Return the `torch.compile` context of our backend, one for all models: Dynamo keeps each.

    With `whole`, a call that is not one graph raises before any of it runs.
    """
    note_captured_code(_note_code)
    beside = capturing(whole=False) if whole else None
    context: Any = optimize_isolated(capture_graph, beside, nopython=whole)
    assert isinstance(context, OptimizeContext)
    return context


@dataclass(frozen=True)
class UserCompile:
    """One call of `torch.compile` by the user.

    Arguments that only inductor takes, such as `mode`, are within the backend.
    """

    context: OptimizeContext

    @property
    def backend(self) -> Backend:
        return compiled_by(self.context)[0]

    @property
    def backend_name(self) -> str:
        """Return the backend's name for users."""
        backend = self.backend
        name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", None)
        return str(name or type(backend).__name__)

    def with_backend(self, backend: Backend) -> Any:
        """Return the user's call of torch.compile with another backend."""
        original, options = compiled_by(self.context)
        context_manager = getattr(original, "backend_ctx_ctor", None)
        if context_manager is not None:
            backend.backend_ctx_ctor = context_manager  # type: ignore[attr-defined]
        if self.context.compiler_config is not None:
            config = self.context.compiler_config
            backend.get_compiler_config = lambda: config  # type: ignore[attr-defined]
        return optimize(backend, **options)

    def compile_part(self, part: fx.GraphModule, is_dynamic: bool) -> Callable[..., Any]:
        """Compile the remaining part of a graph; `is_dynamic` if the graph has varying sizes."""
        backend, options = compiled_by(self.context)
        dynamic = True if is_dynamic else options["dynamic"]
        compiled: Callable[..., Any] = optimize(backend, nopython=True, dynamic=dynamic)(
            part.forward
        )
        return compiled


def user_compile_of(model: Any) -> UserCompile | None:
    """Return the call of `torch.compile` that made `model`, or that `model.compile()` made.

    Return None if there was none, or if it turned compilation off.
    """
    if isinstance(model, OptimizedModule):
        context: Any = model.dynamo_ctx
    elif isinstance(model, torch.nn.Module):
        context = context_of(compiled_call_of(model))
    else:
        context = context_of(model)
    return UserCompile(context) if isinstance(context, OptimizeContext) else None


def recompiled(model: Any, context: Any) -> Callable[..., Any]:
    """Return the function that the user calls by way of `model`, compiled by `context`.

    It replaces the function that the user compiled.
    """
    if isinstance(model, OptimizedModule):
        return OptimizedModule(module_under(model), context).forward
    if isinstance(model, torch.nn.Module):
        return context(module_call(model))  # type: ignore[no-any-return]
    return context(model)  # type: ignore[no-any-return]


def compiled_target(model: Any) -> Any:
    """Return the module or function that was compiled: its buffers are looked up there."""
    if isinstance(model, OptimizedModule):
        return module_under(model)
    return function_under(model)


@dataclass
class CompiledGraph:
    """One captured graph as compiled by the user's compiler."""

    user: UserCompile
    run_whole: Callable[..., Any]
    is_dynamic: bool

    def compile_suffix(self, suffix: fx.GraphModule) -> Callable[..., Any]:
        return self.user.compile_part(suffix, self.is_dynamic)


def refuse_repeats(graph_module: fx.GraphModule) -> None:
    """Raise Unlowerable for calls that may have side effects: to compare, the graph runs again."""
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
                f"the compiled model calls {call_label(node)}, which may have side effects, so it "
                "cannot be re-run for comparison; declare an operator without side effects with "
                "penstock.stateless"
            )


_KNOWN_LIBRARIES = frozenset({"aten", "prims", "prim"})
_KNOWN_MODULES = frozenset({"torch", "_operator", "builtins", "math"})


def copy_of(original: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph over the same tensors: compilers change their input graph."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in original.graph.nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    return graph_module(original, graph)
