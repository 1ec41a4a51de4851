# SPDX-License-Identifier: Apache-2.0
"""The graphs that Dynamo captured for offloaded models: one backend for the process.

Dynamo keeps captured graphs with the code of a forward, behind guards. Instances of one class, the
loaders of one model, folds and sweeps run the same code, so they share a graph where its guards
allow it. A graph therefore holds nothing of a model: when it runs, it finds the offloaded call that
is running on its thread, and that call has the cuts.

A graph that no open call has run lately is kept for the next model of its kind. Of each frame, a
few are; older ones are taken out of Dynamo's cache.

Where the user compiled the model, the user's compiler is given every captured graph as it stands,
and its result is the reference. The part of a cut graph that stays is given to the same compiler.
Fused and laid out anew it may round otherwise than it did within the whole, so no cut is used
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
    optimize_apart,
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

# How many graphs of one frame are kept that no open call uses.
UNUSED_MAX = 8

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class GraphRunner(Protocol):
    """An offloaded call, which runs captured graphs."""

    def note_capture(self, frame: int) -> None:
        """Dynamo captures a graph of this frame for the call."""

    def run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Runs a graph, or a part of it."""

    def stamp(self) -> tuple[Any, ProgramStamp]:
        """What the model runs, an object for all models alike, which is held weakly, and the
        program's state now."""

    @property
    def is_observing(self) -> bool:
        """Whether nothing of the program may run in place of a graph."""
        ...

    def refuse_frame(self, examples: Sequence[Any], reason: str) -> None:
        """Python runs a frame whose graph cannot be run as it is."""


class CapturedGraph:
    """One captured graph. Confined to the thread that captures it but for `run_whole`."""

    def __init__(
        self,
        module: fx.GraphModule,
        run_whole: Callable[..., Any],
        *,
        placeholders: Sequence[Placeholder] = (),
        is_dynamic: bool = False,
        refusal: str | None = None,
    ) -> None:
        """`refusal` says why no part of it can move."""
        self.module = module
        self.run_whole = run_whole
        self.placeholders = placeholders
        self.is_dynamic = is_dynamic
        self.refusal = refusal
        self.is_whole_frame = ends_by_returning(module)
        self.code: weakref.ref[types.CodeType] | None = None  # of the frame, once it is known
        self.capture: Capture | None = current_capture()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  # open calls that have run it
        self.contained: set[tuple[int, ...]] = set()  # see `eager_comparison.observe`
        # Of which program it was captured, and in which state of that.
        self.stamp = _running.calls[-1].stamp() if _running.calls else None

    def drop(self) -> None:
        """Takes the graph out of Dynamo's cache: calls that fit it are captured anew."""
        code = None if self.code is None else self.code()
        if code is not None and self.capture is not None:
            drop_capture(code, self.capture)

    def by(self, user: UserCompile | None) -> CompiledGraph | None:
        """The graph in the hands of the user's compiler, where there is one."""
        return None if user is None else CompiledGraph(user, self.run_whole, self.is_dynamic)


class _Running(threading.local):
    def __init__(self) -> None:
        self.calls: list[GraphRunner] = []


_running = _Running()  # of each thread
_frames: dict[int, list[weakref.ref[CapturedGraph]]] = {}  # by Dynamo's number of the frame
_newest: weakref.ref[CapturedGraph] | None = None  # whose code is not known yet
_skipped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # why Python runs a class or a function
_broken: WeakIdKeyDictionary = WeakIdKeyDictionary()  # code of frames that are no one graph


def begin_run(call: GraphRunner) -> None:
    """To be called when an offloaded call begins to run, and `end_run` when it ends."""
    _running.calls.append(call)


def end_run() -> None:
    _running.calls.pop()


def why_skipped(model: Any) -> str | None:
    """Why Dynamo leaves the forward of such models to Python since one of them was captured."""
    reason: str | None = _skipped.get(_program_of(model))
    return reason


def note_skipped(model: Any, reason: str) -> None:
    _skipped[_program_of(model)] = reason


def is_broken(code: types.CodeType) -> bool:
    """Whether Dynamo has captured the frame as more or less than one graph: lines of the program
    run before or after the graph then."""
    return code in _broken


def note_broken(code: types.CodeType) -> None:
    """Python has run the frame, and Dynamo at most frames that it calls."""
    _broken[code] = True


def _program_of(model: Any) -> Any:
    return type(model) if isinstance(model, torch.nn.Module) else getattr(model, "__code__", model)


def capture_graph(graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """The Dynamo backend for models that the user did not compile."""
    call = _begin_capture()
    try:
        refuse_by_construction(graph_module)
        placeholders = read_placeholders(graph_module)
    except Unrunnable as refusal:
        # The frame is run by Python, as it would be without us.
        if call is not None:
            call.refuse_frame(examples, str(refusal))
            if call.is_observing:
                raise
        raise SkipFrame(str(refusal)) from refusal
    except Unlowerable as refusal:
        own_source(graph_module)
        return _kept(CapturedGraph(graph_module, graph_module.forward, refusal=str(refusal)))
    own_source(graph_module)
    return _kept(CapturedGraph(graph_module, graph_module.forward, placeholders=placeholders))


class UserBackend:
    """The Dynamo backend for models that the user compiled with one backend. Backends are equal
    where the user's are, so that models share their graphs as they do without penstock."""

    def __init__(self, user: UserCompile) -> None:
        self._user = user.backend

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserBackend) and bool(self._user == other._user)

    def __hash__(self) -> int:
        return hash(type(self))

    def __call__(self, graph_module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """Compiles a graph. One that cannot be cut is left to the user's own backend."""
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
            return _kept(CapturedGraph(graph_module, run_whole, refusal=str(refusal)))
        run_whole = _with_memory(self._user(graph_module, examples))
        return _kept(
            CapturedGraph(graph, run_whole, placeholders=placeholders, is_dynamic=is_dynamic)
        )


def _with_plain_examples(graph_module: fx.GraphModule, examples: Sequence[Any]) -> list[Any]:
    """The examples with an ordinary tensor for each lazy one, in the graph, too: when the graph
    runs, it is given the values, and what compilers do with wrappers is made for others."""
    given: list[Any] = []
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(nodes, examples, strict=True):
        if isinstance(example, LazyTensor):
            # Without values, as Dynamo's own: it knows where the sizes of that one come from.
            fake = node.meta["example_value"]
            example = node.meta["example_value"] = plain(fake)
            if fake.requires_grad:
                example = node.meta["example_value"] = example.detach().requires_grad_()
        given.append(example)
    return given


def _with_memory(run: Callable[..., Any]) -> Callable[..., Any]:
    """The user's compiler has seen ordinary tensors, and its code may read their memory."""

    def run_whole(*inputs: Any) -> Any:
        if LazyTensor in map(type, inputs):
            inputs = memory_in(inputs)
        return run(*inputs)

    return run_whole


def _begin_capture() -> GraphRunner | None:
    """Notes a capture for the running call, and makes room for its graph."""
    call = _running.calls[-1] if _running.calls else None
    capture = current_capture()
    if capture is None:
        return call
    _forget_unused(capture.frame)
    if call is not None:
        call.note_capture(capture.frame)
    return call


def _kept(graph: CapturedGraph) -> Callable[..., Any]:
    """The callable that Dynamo runs in place of the graph."""
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
    """Dynamo has made the code that takes the place of this frame's."""
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
    """Takes the graphs of a program out of Dynamo's cache that were captured before something
    changed that Dynamo does not guard. To be called before another model runs it first."""
    program = _program_of(model)
    graphs = [graph for known in _frames.values() for one in known if (graph := one()) is not None]
    for graph in graphs:
        if graph.stamp is not None and graph.stamp[0]() is program:
            if not graph.stamp[1].is_as_it_was():
                graph.drop()


def stamp_of(model: Any, modules: Sequence[torch.nn.Module]) -> tuple[Any, ProgramStamp]:
    """See `GraphRunner.stamp`."""
    return weakref.ref(_program_of(model)), ProgramStamp(list(modules))


def _forget_unused(frame: int) -> None:
    """Takes graphs of a frame that are no longer used out of Dynamo's cache, the oldest first."""
    graphs = [graph for known in _frames.get(frame, ()) if (graph := known()) is not None]
    unused = [graph for graph in graphs if not graph.users]
    for graph in unused[: max(0, len(unused) - UNUSED_MAX)]:
        graph.drop()
        graphs.remove(graph)
    _frames[frame] = [weakref.ref(graph) for graph in graphs]
    for other in [other for other, known in _frames.items() if not any(one() for one in known)]:
        del _frames[other]  # its code is gone


@functools.cache
def capturing(*, whole: bool) -> OptimizeContext:
    """What `torch.compile` would make of our backend, for all models alike: Dynamo keeps each. With
    `whole`, a call that is not one graph raises before any of it runs."""
    note_captured_code(_note_code)
    beside = capturing(whole=False) if whole else None
    context: Any = optimize_apart(capture_graph, beside, nopython=whole)
    assert isinstance(context, OptimizeContext)
    return context


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
