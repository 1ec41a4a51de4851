# SPDX-License-Identifier: Apache-2.0
"""The plan of a model that runs as several graphs, for `explain`.

Where Python runs in the middle of a forward, the later graphs are only known once the earlier ones
have run. So a copy of the model runs once, on copies of the batch, with no worker anywhere: each
graph is planned as it would be in training. The generators are put back.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any

import torch

from penstock.cut.cut_context import CutContext, CutHost
from penstock.cut.shown_plan import ShownPlan
from penstock.explanation.explained_call import ExplainedCall
from penstock.graph.capture import first_sentence
from penstock.graph.compiled_library import Library
from penstock.graph.link import Link
from penstock.graph.plan import Plan
from penstock.graph.planning import CutOptions
from penstock.graph.sizes import Unlowerable
from penstock.seams.storages import write_count
from penstock.seams.trees import tree_map
from penstock.stream.kept_generators import AllGeneratorsKept
from penstock.tracking.batch_origin import BatchHandle, Provenance, ProvenanceTable
from penstock.tuning.load_meter import LoadMeter


class _Listener:
    """Stands for a loader: hears of the plan, and has no workers."""

    def __init__(self, link: Link | None) -> None:
        self._known_link = link
        self.plan: Plan | None = None
        self._load_meter: LoadMeter | None = None

    def _install_prefix(
        self, prefix: str, constants: list[torch.Tensor], seed: int, library: Library
    ) -> None:
        pass

    def _remove_prefixes(self, prefixes: set[str]) -> None:
        pass

    def _show_plan(self, plan: Plan | None) -> None:
        self.plan = plan

    def _link(self) -> Link | None:
        return self._known_link


class _QuietPlan(ShownPlan):
    """Names in the plan alone the parts that stay whole."""

    def refuse(self, reason: str) -> None:
        self.publish(Plan(refused=reason))


def plan_graphs(model: torch.nn.Module, call: ExplainedCall, options: CutOptions) -> Plan:
    """The plans of all graphs that the call runs as, joined. Raises Unlowerable with the reason
    when the model cannot be copied, or fails."""
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
    """The plan of a call whose arguments `provenance` knows, or that wait
    (`penstock.tracking.lazy_tensor`). The model's writes to them are done."""
    from penstock.cut.offloaded_call import OffloadedCall

    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise Unlowerable(
            f"to see all graphs, the model is run once as a copy, and it cannot be copied "
            f"({first_sentence(error)})"
        ) from error
    listener = _Listener(options.link)
    host: weakref.ref[CutHost] = weakref.ref(listener)
    context = CutContext(twin, host, provenance, options, 1)
    context.plan = _QuietPlan(context.name, context.user, host, provenance.use)
    run = OffloadedCall(context, call.call_of(twin), twin, is_compared=False)
    with AllGeneratorsKept():
        try:
            run(*call.args, **call.kwargs)
        except Exception as error:
            raise Unlowerable(
                f"to see all graphs, the model was run once as a copy, and failed "
                f"({first_sentence(error)})"
            ) from error
    if listener.plan is None:
        raise Unlowerable("there is nothing to move: no graph with a tensor of the batch ran")
    return listener.plan
