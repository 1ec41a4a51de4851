# SPDX-License-Identifier: Apache-2.0
"""`explain`: the plan that `offload` would follow, found without starting or changing anything."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.explanation.explained_call import ExplainedCall
from penstock.explanation.explained_graphs import plan_followed, plan_graphs
from penstock.graph.autocast import refuse_by_surroundings
from penstock.graph.capture import (
    Captured,
    SeveralGraphs,
    capture_whole,
    classify,
    is_plain,
    tie_sizes,
)
from penstock.graph.link import Link
from penstock.graph.lowering import lower
from penstock.graph.plan import Plan
from penstock.graph.planning import CutMode, CutOptions, plan_cut
from penstock.graph.script_plan import plan_script
from penstock.graph.sizes import Unlowerable
from penstock.graph.tolerance import Tolerance
from penstock.seams.dynamo import OptimizedModule, module_under
from penstock.tracking.batch_origin import ProvenanceTable
from penstock.tracking.leaves import flatten_batch

Call = Callable[[Any, Any], Any]


def explain(
    model: Any,
    batch: Any,
    *,
    call: Call | None = None,
    cut: CutMode = "auto",
    allow_random: bool = False,
    worker_count: int = 2,
    link_bytes_per_s: float | None = None,
    cut_tolerance: int | float | None = None,
) -> Plan:
    """Says which calls of `model` could run in the workers for batches like `batch`, and their
    costs.

    Analysis alone: no parameter, buffer, random generator, hook or compiled state changes, and the
    model is looked at in the mode (train or eval) it is in. The movable operators are run once to
    be timed. A model that Dynamo captures as several graphs is run once, as a copy, since the later
    graphs follow from what the earlier ones gave: what its forward prints is printed.

    `batch` is what the loader yields. `call(model, batch)` says how the model is called with it;
    left out:

    - a tensor: `model(batch)`
    - a mapping: `model(**batch)` if its keys are parameters of forward, else `model(batch)`
    - a tuple or list: `model(*batch[:n])`, n being how many parameters forward requires, at least
      1; but `model(batch)` if forward requires one parameter and calls it `batch`
    - anything else: `model(batch)`

    `worker_count` workers share the batches. With `link_bytes_per_s` they are those of a pool, and
    so many bytes a second come from all of them together: 125e6 for 1 Gbit/s. The plan then says
    how many bytes cross the link with each way to cut. `cut_tolerance` is that of `offload`.

    A model that cannot be cut gives a plan with `refused` set.

        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
        >>> print(explain(model, torch.zeros(3, 2, 2)).kept[-1].operator)  # doctest: +SKIP
        linear at linear.py:134
    """
    if link_bytes_per_s is not None and not link_bytes_per_s > 0:
        raise ValueError(
            f"link_bytes_per_s is {link_bytes_per_s} but a positive number of bytes a second is "
            f"expected; leave it out for workers of this machine"
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
        target = _eager(model)
        return _plan_call(target, _call_with(target, batch, leaves, call), options)
    except Unlowerable as refusal:
        return Plan(refused=str(refusal))


def explain_call(
    model: Any, call: ExplainedCall, options: CutOptions, followed: ProvenanceTable | None = None
) -> Plan:
    """The plan for a call of `model`. Some of its arguments may be values that the program made of
    a batch, which `followed` knows. As `explain` otherwise."""
    try:
        if isinstance(model, torch.jit.ScriptModule):
            return plan_script(model, _script_inputs(call), options)
        refuse_by_surroundings()
        target = _eager(model)
        if followed is not None:
            return plan_followed(target, call, followed, options)
        return _plan_call(target, call, options)
    except Unlowerable as refusal:
        return Plan(refused=str(refusal))


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
    """TorchScript's front end takes every input of forward for a tensor of the batch."""
    if call.kwargs or not all(isinstance(value, torch.Tensor) for value in call.args):
        raise Unlowerable("a TorchScript module is read only when called with tensors, by position")
    return list(call.args)


def default_arguments(model: Any, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """How `model` is called with `batch` when nobody says; `explain` has the rule."""
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


def _eager(model: Any) -> Any:
    """The module behind a compiled or exported one."""
    if isinstance(model, OptimizedModule):
        return module_under(model)
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    return model
