# SPDX-License-Identifier: Apache-2.0
"""Define the callable that replaces an offloaded model's call.

It runs the graphs that Dynamo captured of the model, cut if this pays off.
"""

from __future__ import annotations

import functools
import logging
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.compat.dynamo import (
    CAPTURE_FAILURES,
    allow_recapture,
    is_near_capture_limit,
    is_skipped,
    with_settings,
    wrap_inline,
)
from penstock.compat.dynamo import config as dynamo_config
from penstock.compat.modules import is_tracing
from penstock.compat.operators import tree_leaves, tree_map
from penstock.cut.captured_graphs import (
    CapturedGraph,
    UserBackend,
    UserCompile,
    begin_run,
    capturing,
    drop_stale,
    end_run,
    is_broken,
    note_broken,
    note_skipped,
    recompiled,
    refuse_repeats,
    skip_reason,
    stamp_of,
)
from penstock.cut.cut_context import CutContext, forget_user, modules_of
from penstock.cut.cut_graph import CutGraph
from penstock.cut.eager_comparison import (
    HasSideEffects,
    Mode,
    Observation,
    ObservationDone,
    ProgramStamp,
    Schedule,
    observe,
)
from penstock.cut.unmoved_calls import UnmovedCalls
from penstock.graph.capture import first_sentence
from penstock.graph.planning import CutOptions
from penstock.stream.batch_seeds import AllGeneratorsKept
from penstock.tracking.deferral import SAMPLED_EVERY
from penstock.tracking.lazy_tensor import (
    LazyTensor,
    enter_model,
    exclude_reads,
    has_lazy_in,
    leave_model,
    values_in,
    values_of_lazy,
)

logger = logging.getLogger(__name__)

# After this many calls in a row without a captured graph, the plan reports this.
UNCAPTURED_CALLS_MAX = 16
_CAPTURES_OF_ALL_MAX = 1 << 30
# A capture takes seconds. A model that needs more captures is no longer cut.
_RECAPTURES_MAX = 32


class StandIn:
    """The part that is independent of how the model is captured."""

    context: CutContext

    def _bind_lifetimes(self) -> None:
        """Free the loader's data of the model when the model is deleted, and vice versa."""
        context, this = self.context, weakref.ref(self)
        forget = functools.partial(forget_user, context.user, context.host, context.provenance)
        self._finalizer = weakref.finalize(self, context.provenance.pending_cleanups.append, forget)
        self._finalizer.atexit = False

        def close(_: Any) -> None:
            # Module globals are cleared during Python's shutdown.
            if sys is None or sys.is_finalizing():
                return
            call = this()
            if call is not None:
                call.close()

        host = context.host()
        # The reference belongs to this object and is freed with it.
        self._host_finalizer = None if host is None else weakref.ref(host, close)

    @property
    def options(self) -> CutOptions:
        """Return the options of `offload`, as its caller gave them."""
        return self.context.options

    def __reduce__(self) -> Any:
        """Make copies of the model not offloaded, even if its class pickles all attributes."""
        return _no_call, ()

    def close(self) -> None:
        """Stop cutting silently, and withdraw the prefixes that workers run for this model."""
        self._finalizer.detach()
        self.context.close()


class OffloadedCall(StandIn):
    """Replaces the callable of `model.compile`, or a function. Confined to the training thread."""

    def __init__(
        self,
        context: CutContext,
        call_impl: Callable[..., Any],
        model: Any,
        user: UserCompile | None = None,
        former: Any = None,
        is_compared: bool = True,
    ) -> None:
        """`call_impl` runs without penstock, and `former` was in this position before.

        `user` is the user's way of compiling `model`. Without `is_compared`, Python runs no call
        only for the comparison with the captured graph.
        """
        self.call_impl = call_impl
        self.former = former
        self.context = context
        self._user = user
        self._graphs: weakref.WeakKeyDictionary[CapturedGraph, Callable[..., Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._captures: Counter[int] = Counter()  # by Dynamo's number of the frame
        self._captures_max = dynamo_config.recompile_limit
        self._is_new = True
        self._has_values = False  # whether no tensor of the model is on the meta device
        self._has_run_graph = False
        self._has_run_root = False  # the graph of the frame that is called first
        self._has_captured = False  # during this call
        self._uncaptured_calls = 0  # since the last call in which a graph ran
        # In every call, random draws have to depend on the position of the batch.
        can_skip_calls = user is None and not context.options.allow_random
        self._unmoved_calls = UnmovedCalls(model) if can_skip_calls else None
        self._guards_hooks = False
        self._compiled: Callable[..., Any]
        if user is not None:
            self._compiled = recompiled(model, user.with_backend(UserBackend(user)))
            self._with_raised_limit = with_settings(self._compiled, **_RAISED_LIMIT)
            # Dynamo calls modules of torch.nn through a separate frame, the same for all.
            is_torchs = type(context.target()).__module__.startswith("torch.")
            self._inlined = _code_of(wrap_inline(_code_of)) if is_torchs else None
        else:
            self._traced = _traceable(call_impl)
            self._compiled = self._with_raised_limit = _as_eager(
                capturing(whole=False)(self._traced)
            )
        self._schedule: Schedule | None = None
        if user is None and is_compared:
            target = context.target  # held weakly
            self._schedule = Schedule(lambda: modules_of(target()), context.verify_every)
        self._recaptures = 0
        self._several_graphs: set[Mode] = set()  # modes in which a call is not one graph
        self._observation: Observation | None = None
        self.is_observing = False
        self._bind_lifetimes()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self.call_impl(*args, **kwargs)
        if not self.context.is_open:
            # The code of the user's compiler remains in use.
            run = self.call_impl if self._user is None else self._compiled
            return run(*args, **kwargs)
        if not self._has_values and not self._find_values():
            run = self.call_impl if self._user is None else self._compiled
            args, kwargs = values_in((args, kwargs))
            return run(*args, **kwargs)
        if self._unmoved_calls is not None:
            has_lazy = self.context.provenance.deferral is not None and has_lazy_in((args, kwargs))
            if self._unmoved_calls.may_skip(self.context.lazy.is_sampling and not has_lazy):
                if has_lazy:
                    args, kwargs = values_in((args, kwargs))
                return self.call_impl(*args, **kwargs)
            self.context.call_weight = self._unmoved_calls.weight
        else:
            self.context.call_weight = SAMPLED_EVERY if self.context.lazy.is_sampling else 1
        run = self._with_raised_limit if self._is_near_capture_limit() else self._compiled
        if self._is_to_be_compared():
            return self._run_compared(args, kwargs)
        self._begin_run()
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if self._has_run_graph or self._user or not _is_capture_failure(error):
                raise
            # Dynamo traces before it runs: no part of the forward has run yet.
            reason = f"the model cannot be captured ({first_sentence(error)})"
        finally:
            self._end_run()
        self.context.give_up(reason)
        return self.call_impl(*args, **kwargs)

    def stamp(self) -> tuple[Any, ProgramStamp]:
        """Implement `GraphRunner`."""
        target = self.context.target()
        return stamp_of(target, [part for one in modules_of(target) for part in one.modules()])

    def _find_values(self) -> bool:
        """Return whether the model has values; until then, the plan reports which it lacks."""
        for module in modules_of(self.context.target()):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_meta:
                    self.context.plan.refuse(
                        f"all its parameters and buffers must have values, got {name} on the meta "
                        f"device; call model.to_empty(device=...) and initialise or load them "
                        f"before the first batch (penstock.explain shows the plan without values)"
                    )
                    return False
        self._has_values = True
        return True

    def _is_near_capture_limit(self) -> bool:
        """Return whether Dynamo's limit may prevent a capture in the next call.

        It counts all models of a class, including models that the program compiles; ours counts
        each model.
        """
        if self._user is None and not self._is_new:
            return False  # handled by `_as_eager`
        if self._user is None:
            drop_stale(self.context.target())
        code = self._code
        if self._is_new and code is not None and skip_reason(self.context.target()) is None:
            allow_recapture(code)
        is_new, self._is_new = self._is_new, False
        return is_new or (code is not None and is_near_capture_limit(code))

    def _begin_run(self) -> None:
        self._has_run_graph = self._has_run_root = self._has_captured = False
        self.context.begin_call()
        enter_model()
        begin_run(self)

    def _end_run(self) -> None:
        end_run()
        leave_model()
        if self._guards_hooks:
            dynamo_config.skip_nnmodule_hook_guards = True
            self._guards_hooks = False
        self.context.end_call(self._has_run_graph)
        self._note_run()

    def _is_to_be_compared(self) -> bool:
        schedule, epoch = self._schedule, self.context.provenance.delivered_epoch
        if schedule is None or not schedule.is_due(self._mode, epoch):
            return False
        if self._is_observable():
            return True
        if schedule.has_moved(self._mode):
            self._recapture()
        schedule.done(self._mode, epoch)
        return False

    @property
    def _mode(self) -> Mode:
        target = self.context.target()
        is_training = target.training if isinstance(target, torch.nn.Module) else True
        return is_training, torch.is_grad_enabled()

    def _is_observable(self) -> bool:
        """Return whether Dynamo will run the call as one graph without any line of the program.

        The answer is based on the facts known before the call.
        """
        code = self._code
        return (
            code is not None
            and not self.options.allow_random  # the draws differ from the forward's
            and self._mode not in self._several_graphs
            and self._uncaptured_calls == 0
            and not is_skipped(self._traced if self._owner is None else self._owner.forward)
            and not is_broken(code)
            and skip_reason(self.context.target()) is None
        )

    @property
    def _code(self) -> types.CodeType | None:
        """Return the code of the frame that Dynamo captures first."""
        if self._user is None:
            owner = self._owner
            return _code_of(self._traced if owner is None else owner.forward)
        target = self.context.target()
        return self._inlined or _code_of(getattr(target, "forward", target))

    @property
    def _owner(self) -> torch.nn.Module | None:
        """Return the module whose forward Dynamo captures; hooks around it always run in Python."""
        owner = getattr(self.call_impl, "__self__", None)
        is_own = self._traced is self.call_impl and isinstance(owner, torch.nn.Module)
        return owner if is_own else None

    def _run_compared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call in Python, and a captured graph for comparison."""
        for item in tree_leaves((args, kwargs)):
            if type(item) is LazyTensor:
                exclude_reads(item)
        owner = self._owner
        if owner is None:
            return self._run_beside(self._traced, self.call_impl, args, kwargs)
        before = owner.__dict__.get("forward", _NONE)

        def restore() -> None:
            if before is _NONE:
                owner.__dict__.pop("forward", None)
            else:
                owner.__dict__["forward"] = before

        def forward(*inner_args: Any, **inner_kwargs: Any) -> Any:
            restore()
            run = owner.forward
            return self._run_beside(run, run, inner_args, inner_kwargs)

        owner.__dict__["forward"] = forward
        try:
            return self.call_impl(*args, **kwargs)
        finally:
            restore()

    def _run_beside(
        self,
        traced: Callable[..., Any],
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        observation, result = self._observe(traced, args, kwargs)
        schedule = self._schedule
        assert schedule is not None
        if result is not _NONE:
            schedule.done(self._mode, self.context.provenance.delivered_epoch)
            return result
        args, kwargs = tree_map(_with_values, (args, kwargs))
        had = [] if observation is None else schedule.tensors_before((args, kwargs))
        result = run(*args, **kwargs)
        difference = None if observation is None else observation.difference(result, had)
        if observation is not None and difference is not None and observation.is_repeatable():
            if self.context.is_open:
                self.context.give_up(schedule.format_reason(self._mode, difference))
        elif schedule.has_other_code(self._mode) or (
            (observation is None or difference is not None) and schedule.has_moved(self._mode)
        ):
            # Other code may have the same results and other gradients.
            self._recapture()
        schedule.done(self._mode, self.context.provenance.delivered_epoch)
        return result

    def _observe(
        self, traced: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Observation | None, Any]:
        """Return the observation of a call's captured graph; None if that cannot run alone.

        If Dynamo left the frame to Python, the call has run, and its result is returned.
        """
        code, result = self._code, _NONE
        if code is not None:
            allow_recapture(code)
        self._observation, self.is_observing = None, True
        self._begin_run()
        kept = AllGeneratorsKept()  # Dynamo draws Python's numbers before the graph runs
        kept.__enter__()
        try:
            run = _as_eager(capturing(whole=True)(traced), suppress_errors=False)
            result = run(*args, **kwargs)
        except ObservationDone:
            pass
        except Exception:
            # No part of the program has run. If this is an error of the program, it will be raised
            # again.
            logger.debug("a call is not compared", exc_info=True)
        finally:
            if result is _NONE:
                kept.restore()
            self.is_observing = False
            self._end_run()
        if result is not _NONE or not self._has_run_graph:
            self._several_graphs.add(self._mode)
        observation, self._observation = self._observation, None
        return observation, result

    def _recapture(self) -> None:
        """Have Dynamo capture the model again, since a change was detected."""
        self._recaptures += 1
        if self._recaptures > _RECAPTURES_MAX and self.context.is_open:
            self.context.give_up("the program keeps replacing functions that its forward may call")
        for graph in list(self._graphs):
            graph.drop()
        self._release_cuts()
        self._captures.clear()
        self._several_graphs.clear()

    def close(self) -> None:
        super().close()
        self._release_cuts()

    def _release_cuts(self) -> None:
        """Free the cuts. The graphs stay for other models of this kind."""
        for graph in list(self._graphs):
            graph.users.discard(self)
        self._graphs.clear()

    def note_capture(self, frame: int) -> None:
        """Implement `GraphRunner`. An error raised here propagates to `__call__`."""
        self._has_captured = True
        self._captures[frame] += 1
        if self._captures[frame] > self._captures_max and self.context.is_open:
            self.context.give_up(
                f"Dynamo has captured a part of its forward {self._captures_max} times "
                f"(torch._dynamo.config.recompile_limit), and something that the part depends on "
                f"keeps changing; set TORCH_LOGS=recompiles to see what"
            )
        if self._user is None and dynamo_config.skip_nnmodule_hook_guards:
            # The guards of this graph are made after the backend returns. Without guards on hooks,
            # a hook added later would never run.
            dynamo_config.skip_nnmodule_hook_guards = False
            self._guards_hooks = True

    def run_graph(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """Implement `GraphRunner`."""
        self._has_run_graph = True
        if self._schedule is not None and graph.code is not None and graph.code() is self._code:
            self._has_run_root = True
        is_observed = self.is_observing and self._has_run_root
        if not self.context.is_open:
            self._release_cuts()
            if is_observed:
                raise ObservationDone
            return graph.run_whole(*inputs)
        run = self._graphs.get(graph)
        if run is None:
            run = self._graphs[graph] = self._cut_of(graph)
            graph.users.add(self)
        if is_observed:
            if not graph.is_whole_frame:
                self._has_run_graph = False
                raise HasSideEffects("lines of the program run after it")
            if isinstance(run, CutGraph):
                inputs = run.examine(inputs)
            refuse_repeats(graph.module)
            self._observation = observe(graph.run_whole, inputs, graph.contained)
            raise ObservationDone
        return run(*inputs)

    def _cut_of(self, graph: CapturedGraph) -> Callable[..., Any]:
        if graph.refusal is not None:
            self.context.plan.refuse(graph.refusal)
            return graph.run_whole
        return CutGraph(self.context, graph.module, graph.placeholders, graph.by(self._user))

    def refuse_frame(self, examples: Sequence[Any], reason: str) -> None:
        """Implement `GraphRunner`."""
        lookup = self.context.provenance.lookup
        if any(isinstance(one, torch.Tensor) and lookup(one) is not None for one in examples):
            self.context.plan.refuse(reason)
            note_skipped(self.context.target(), reason)

    def _note_run(self) -> None:
        if self._unmoved_calls is not None:
            call = self.context.call
            is_unmoved = not (self._has_captured or call.has_planned or call.moves)
            self._unmoved_calls.note_call(is_unmoved)
        self._uncaptured_calls = 0 if self._has_run_graph else self._uncaptured_calls + 1
        if self._has_run_graph and not self._has_run_root and self._schedule is not None:
            code = self._code
            if code is not None:
                note_broken(code)
        if self._uncaptured_calls == UNCAPTURED_CALLS_MAX and self.context.is_open:
            self.context.plan.note_idle(self._uncaptured_reason())

    def _uncaptured_reason(self) -> str:
        """Return why Dynamo captures no graph, if that can be determined."""
        target = self.context.target()
        skipped = skip_reason(target)
        if skipped is not None:
            return skipped
        return (
            f"Dynamo captured no graph in {UNCAPTURED_CALLS_MAX} calls in a row: it does not "
            f"support this forward, or is disabled; set TORCH_LOGS=graph_breaks to see why; if "
            f"the model was compiled after offload(), compile it first and offload the compiled "
            f"model"
        )


_NONE = object()
# Captures are counted for each offloaded model, unlike in Dynamo, which counts all instances
# together.
_RAISED_LIMIT: dict[str, Any] = {
    "recompile_limit": _CAPTURES_OF_ALL_MAX,
    "accumulated_recompile_limit": _CAPTURES_OF_ALL_MAX,
}


def _code_of(function: Any) -> types.CodeType | None:
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _with_values(item: Any) -> Any:
    return values_of_lazy(item) if type(item) is LazyTensor else item


def _as_eager(compiled: Callable[..., Any], *, suppress_errors: bool = True) -> Callable[..., Any]:
    """Give a compiled function eager's results.

    Dynamo records add_ with an alpha, addcmul_ and addcdiv_ as two operators each, which round
    twice where eager rounds once; and NumPy's functions as torch's, which draw other numbers.
    Python runs the calls that Dynamo cannot capture, regardless of the calls that ran before them.
    """
    return with_settings(
        compiled,
        enable_dynamo_decompositions=False,
        trace_numpy=False,
        suppress_errors=suppress_errors,
        record_runtime_overhead=False,  # profiler marks in each graph of each call
        **_RAISED_LIMIT,
    )


def _traceable(call_impl: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap modules of torch.nn: Dynamo skips their frames if no captured frame calls them."""
    target = getattr(call_impl, "__self__", None)
    if not isinstance(target, torch.nn.Module) or not type(target).__module__.startswith("torch."):
        return call_impl

    def called(*args: Any, **kwargs: Any) -> Any:
        return call_impl(*args, **kwargs)

    parts = tuple((name, type(part)) for name, part in target.named_modules())
    return types.FunctionType(
        _code_for(parts, called.__code__), called.__globals__, closure=called.__closure__
    )


@functools.lru_cache(maxsize=32)
def _code_for(parts: tuple[tuple[str, type], ...], code: types.CodeType) -> types.CodeType:
    """Return the code object of a separate frame for modules of these parts.

    Dynamo's findings about a frame hold for its code object, so one frame that it cannot capture
    must not affect all others.
    """
    return code.replace(co_name=f"call_{parts[0][1].__name__}")


def _is_capture_failure(error: Exception) -> bool:
    return isinstance(error, CAPTURE_FAILURES) or (
        isinstance(error, RuntimeError) and "dynamo" in str(error).lower()
    )


def _no_call() -> None:
    return None
