# SPDX-License-Identifier: Apache-2.0
"""`explain`: find the plan that `offload` would follow, without side effects on the program.

If Python runs in the middle of a forward, the later graphs are only known once the earlier ones
have run. So a copy of the model runs once, on copies of the batch, without any worker: each graph
is planned as it would be in training. The generators are restored.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.compat.dynamo import OptimizedModule, is_skipped, module_under, wrap_inline
from penstock.compat.modules import module_call
from penstock.compat.operators import tree_map
from penstock.compat.storages import write_count
from penstock.cut.cut_context import CutContext, ShownPlan
from penstock.explanation.absent_values import (
    deep_copy,
    reads_absent_values,
    refuse_absent_batch,
    stand_in_for,
)
from penstock.graph.capture import (
    Captured,
    LeafLookup,
    SeveralGraphs,
    capture_whole,
    classify,
    first_sentence,
    is_plain,
    refuse_by_surroundings,
    tie_sizes,
)
from penstock.graph.link import Link
from penstock.graph.lowering import lower
from penstock.graph.plan import Plan
from penstock.graph.planning import CutMode, CutOptions, plan_cut
from penstock.graph.script_plan import plan_script
from penstock.graph.sizes import Unlowerable
from penstock.graph.tolerance import Tolerance
from penstock.loader.loader_run import LoaderRun
from penstock.stream.batch_seeds import AllGeneratorsKept
from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tracking.leaves import flatten_batch

Call = Callable[[Any, Any], Any]


def explain(
    model: Callable[..., Any],
    batch: Any,
    *,
    call: Call | None = None,
    cut: CutMode = "auto",
    allow_random: bool = False,
    worker_count: int = 2,
    link_bytes_per_s: float | None = None,
    cut_tolerance: int | float | None = None,
) -> Plan:
    """Return the plan that :func:`penstock.offload` would follow for batches like ``batch``.

    The plan shows which calls of ``model`` could run in the workers, and their costs. This is only
    an analysis: no parameter, buffer, random generator, hook or compiled state changes, and the
    model is examined in its current mode (train or eval). The movable operators are run once to be
    timed. A model that Dynamo captures as several graphs is run once, as a copy, because the later
    graphs depend on the results of the earlier ones; text that its forward prints appears.

    Parameters and buffers may be on the meta device, as of a model that is too large for this
    machine: no memory is allocated for them. Calls that read a buffer without values stay.

    Args:
        model (torch.nn.Module | Callable): Model, TorchScript module or function.
        batch (Any): A batch as the loader delivers it: tensors on the CPU, also in tuples, lists
            and mappings.
        call (Callable[[Any, Any], Any] | None): ``call(model, batch)`` calls the model with a
            batch. Default: None; the type of the batch decides, as below.
        cut (str): ``"auto"``, ``"maximal"`` or ``"none"``, as for ``offload``. Default: ``"auto"``.
        allow_random (bool): Let random draws move, as for ``offload``. Default: False.
        worker_count (int): Number of workers that share the batches. Default: 2.
        link_bytes_per_s (float | None): Bytes per second, above 0, that arrive from all workers of
            a pool together: 125e6 for 1 Gbit/s. The plan then shows how many bytes cross the link
            for each way to cut. Default: None, workers on this machine.
        cut_tolerance (int | float | None): Allowed difference of results, as for ``offload``.
            Default: None.

    Returns:
        Plan: The plan; bytes and seconds are per batch. If the model cannot be cut, ``refused`` has
        the reason.

    Raises:
        ValueError: If ``cut``, ``link_bytes_per_s`` or ``cut_tolerance`` has an invalid value.
        TypeError: If ``cut_tolerance`` is not a number.

    Without ``call``, the model is called with

    - a tensor as ``model(batch)``;
    - a mapping as ``model(**batch)`` if its keys are parameters of forward, else ``model(batch)``;
    - a tuple or list as ``model(*batch[:n])``, where n is the number of parameters that forward
      requires, at least 1; but as ``model(batch)`` if forward requires one parameter and names it
      ``batch``;
    - any other batch as ``model(batch)``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> print(explain(model, torch.zeros(3, 2, 2)).kept[-1].operator)  # doctest: +SKIP
        linear at linear.py:134
    """
    if link_bytes_per_s is not None and not link_bytes_per_s > 0:
        raise ValueError(
            f"link_bytes_per_s must be a positive number of bytes per second, got "
            f"{link_bytes_per_s}; leave it out for workers on this machine"
        )
    link = None
    if link_bytes_per_s is not None:
        link = Link(worker_count, link_bytes_per_s, sends_whole=False)
    tolerance = Tolerance.of(cut_tolerance)
    options = CutOptions(cut, allow_random, worker_count, link=link, tolerance=tolerance)
    leaves = flatten_batch(batch)
    try:
        if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
            return plan_script(model, leaves, options)
        refuse_by_surroundings()
        refuse_absent_batch(leaves)
        target = stand_in_for(_eager(model))
        return _plan_call(target, _call_with(target, batch, leaves, call), options)
    except Unlowerable as refusal:
        return Plan(refused=str(refusal))


def explain_call(
    model: Any, call: ExplainedCall, options: CutOptions, followed: ProvenanceTable | None = None
) -> Plan:
    """Return the plan for a call of `model`, otherwise as `explain` does.

    Some of its arguments may be values that the program made from a batch, as recorded in
    `followed`.
    """
    try:
        if isinstance(model, torch.jit.ScriptModule):
            return plan_script(model, _script_inputs(call), options)
        refuse_by_surroundings()
        target = stand_in_for(_eager(model))
        if followed is not None:
            return plan_followed(target, call, followed, options)
        return _plan_call(target, call, options)
    except Unlowerable as refusal:
        return Plan(refused=str(refusal))


def default_arguments(model: Any, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the default arguments for a call of `model`; `explain` documents the rule."""
    parameters = _forward_parameters(model)
    if isinstance(batch, Mapping):
        named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        required = {p.name for p in parameters if p.default is p.empty and p.name in named}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        keys = set(batch)
        if keys and required <= keys and (keys <= named or takes_any):
            return (), dict(batch)
        return (batch,), {}
    if isinstance(batch, (tuple, list)) and batch:
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        required_names = [p.name for p in positional if p.default is p.empty]
        if required_names == ["batch"]:
            return (batch,), {}
        return tuple(batch[: max(1, len(required_names))]), {}
    return (batch,), {}


def _forward_parameters(model: Any) -> list[inspect.Parameter]:
    target = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return []


def _call_with(
    model: Any, batch: Any, leaves: list[torch.Tensor], call: Call | None
) -> ExplainedCall:
    leaf_index = {id(leaf): index for index, leaf in enumerate(leaves)}

    def leaf_index_of(tensor: torch.Tensor) -> int | None:
        return leaf_index.get(id(tensor))

    if call is not None:
        call_of = functools.partial(_calling, call)
        return ExplainedCall((batch,), {}, leaf_index_of, len(leaves), call_of)
    args, kwargs = default_arguments(model, batch)
    return ExplainedCall(args, kwargs, leaf_index_of, len(leaves))


def _calling(call: Call, model: Any) -> Callable[..., Any]:
    return lambda batch: call(model, batch)


def _plan_call(model: Any, call: ExplainedCall, options: CutOptions) -> Plan:
    try:
        captured = capture_whole(call.call_of(model), call.args, call.kwargs)
    except SeveralGraphs:
        if not isinstance(model, torch.nn.Module):
            raise
        return plan_graphs(model, call, options)
    return _plan_captured(model, captured, call, options)


def _plan_captured(
    model: Any, captured: Captured, call: ExplainedCall, options: CutOptions
) -> Plan:
    for place, value in zip(captured.placeholders, captured.examples, strict=True):
        if isinstance(value, torch.Tensor) and call.leaf_index_of(value) is not None:
            if not is_plain(value):
                raise Unlowerable(
                    f"the batch tensor {place.label} requires grad, is not strided or is not on "
                    "the CPU"
                )
    buffers = {id(b): b for b in model.buffers()} if isinstance(model, torch.nn.Module) else {}
    graph_inputs = tie_sizes(
        classify(captured.placeholders, captured.examples, call.leaf_index_of, buffers)
    )
    _, planned = plan_cut(
        lambda symbolic: lower(
            captured.graph_module, graph_inputs, captured.examples, symbolic=symbolic
        ),
        captured.examples,
        call.leaf_count,
        options,
    )
    return planned.plan


def _script_inputs(call: ExplainedCall) -> list[torch.Tensor]:
    """Return the inputs: TorchScript's front end treats all of them as batch tensors."""
    if call.kwargs or not all(isinstance(value, torch.Tensor) for value in call.args):
        raise Unlowerable("a TorchScript module is read only when called with tensors, by position")
    return list(call.args)


def _eager(model: Any) -> Any:
    """Return the module behind a compiled or exported one."""
    if isinstance(model, OptimizedModule):
        return module_under(model)
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    return model


def forward_call(model: Any) -> Callable[..., Any]:
    """Return the model's call without the functions that `model.compile` or `offload` added."""
    if not isinstance(model, torch.nn.Module):
        return model  # type: ignore[no-any-return]
    if is_skipped(model.forward):
        # Dynamo skips frames of torch.nn, such as Sequential's, unless a frame that it captures
        # calls them.
        return wrap_inline(module_call(model))
    return module_call(model)


@dataclass(frozen=True, slots=True)
class ExplainedCall:
    """A call to explain: `module_call(model)(*args, **kwargs)`, where `model` may be a copy."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    leaf_index_of: LeafLookup  # index of a tensor in the batch, None for other tensors
    leaf_count: int  # leaf count of the batch
    call_of: Callable[[Any], Callable[..., Any]] = forward_call


class _PlanCollector(LoaderRun):
    """Stands in for a loader: receives the plan, and has no workers."""

    def __init__(self, link: Link | None) -> None:
        super().__init__()
        self._known_link = link

    @property
    def link(self) -> Link | None:
        return self._known_link


class _UnloggedPlan(ShownPlan):
    """Shows refused parts in the plan only, not in the log."""

    def refuse(self, reason: str) -> None:
        self.publish(Plan(refused=reason))


def plan_graphs(model: torch.nn.Module, call: ExplainedCall, options: CutOptions) -> Plan:
    """Return the joined plans of all graphs that the call runs as.

    Raises Unlowerable, with the reason, if the model cannot be copied, or fails.
    """
    provenance, handle = ProvenanceTable(), BatchHandle(call.leaf_count)

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        fresh = value.detach().clone().requires_grad_(value.requires_grad)
        index = call.leaf_index_of(value)
        if index is not None:
            provenance.record(fresh, Provenance(handle, index, write_count(fresh)))
        return fresh

    args, kwargs = tree_map(copied, (tuple(call.args), dict(call.kwargs)))
    return plan_followed(model, replace(call, args=args, kwargs=kwargs), provenance, options)


def plan_followed(
    model: torch.nn.Module, call: ExplainedCall, provenance: ProvenanceTable, options: CutOptions
) -> Plan:
    """Return the plan of a call with arguments that `provenance` records, or that are deferred.

    Deferred arguments are lazy (`penstock.tracking.lazy_tensor`). The model's writes to the
    arguments take effect.
    """
    from penstock.cut.offloaded_call import OffloadedCall

    try:
        model_copy = deep_copy(model)
    except Exception as error:
        raise Unlowerable(
            f"capturing all graphs needs a copy of the model, which cannot be copied "
            f"({first_sentence(error)})"
        ) from error
    listener = _PlanCollector(options.link)
    host: weakref.ref[LoaderRun] = weakref.ref(listener)
    context = CutContext(model_copy, host, provenance, options, 1)
    context.plan = _UnloggedPlan(context.name, context.user, host, provenance.use)
    run = OffloadedCall(context, call.call_of(model_copy), model_copy, is_compared=False)
    with AllGeneratorsKept():
        try:
            run(*call.args, **call.kwargs)
        except Exception as error:
            absent = reads_absent_values(error)
            raise Unlowerable(
                absent
                or f"capturing all graphs needs a run of a copy of the model, which failed "
                f"({first_sentence(error)})"
            ) from error
    if listener.plan is None:
        raise Unlowerable("nothing to move: no graph with a tensor of the batch ran")
    return listener.plan
