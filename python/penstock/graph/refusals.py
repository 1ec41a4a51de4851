# SPDX-License-Identifier: Apache-2.0
"""Which captured graphs are taken at all.

Some mean more than their operators say. Some are wrong: Dynamo wrote down something else than the
program does, and then the trainer has to run the program itself.
"""

from __future__ import annotations

import os
from collections import Counter

import torch
from torch import fx

from penstock.graph.call_labels import call_label
from penstock.graph.sizes import Unlowerable, Unrunnable
from penstock.seams.operators import AUTOCAST_BEGIN, AUTOCAST_END, HigherOrderOperator

# Run by Dynamo, optimizers give other bits than by Python.
OPTIMIZER_FILES = os.sep + os.path.join("torch", "optim", "")
# Calls after which Dynamo still takes a tensor for its former self: a shape that the program reads
# then is the one from before (torch 2.11; test_random_finds.py has programs that show it).
STALE_SHAPES = frozenset(
    {"as_strided_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)


def refuse_by_construction(graph_module: fx.GraphModule) -> None:
    """Raises Unlowerable for graphs whose meaning is more than their operators, Unrunnable for
    those that even the trainer must not run."""
    begun = Counter(node.target for node in graph_module.graph.nodes if node.op == "call_function")
    if begun[AUTOCAST_BEGIN] != begun[AUTOCAST_END]:
        raise Unlowerable("autocast begins or ends in the middle of a part of forward")
    for node in graph_module.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if isinstance(node.target, HigherOrderOperator):
            # Some of them (checkpointing) give other bits than eager does.
            raise Unrunnable(f"the model uses the higher-order operator {node.target}")
        is_number = isinstance(node.meta.get("example_value"), torch.SymFloat)
        if node.meta.get("unbacked_bindings") and not is_number:
            # Dynamo asserts its assumption about that size; eager assumes nothing.
            raise Unrunnable(f"{call_label(node)} gives a tensor whose size depends on contents")
        if _is_split_addcdiv(node):
            raise Unrunnable(f"{call_label(node)} is one operator in eager and three in Dynamo")
        if node.op in ("call_method", "call_function") and name in STALE_SHAPES:
            raise Unrunnable(
                f"{call_label(node)} changes the shape of a tensor in place, which Dynamo loses"
                f" track of; {name.removesuffix('_')} is another tensor and no trouble"
            )
        if OPTIMIZER_FILES in (node.meta.get("stack_trace") or ""):
            raise Unrunnable("an optimizer steps where the batch is read, too")
        if node.op == "call_function" and name == "_enter_inference_mode":
            raise Unlowerable("forward switches inference_mode")
        if node.op == "call_function" and name.endswith("_increment_nesting"):
            # Its levels are the process's own: a walk that ends between two of them leaves one.
            raise Unlowerable("forward uses a torch.func transform")
        if node.op == "call_module":
            raise Unlowerable(f"the module {node.target} was not inlined")


def _is_split_addcdiv(node: fx.Node) -> bool:
    """Whether Dynamo made `node` of `torch.addcdiv(x, a, b, value=v)`, which it always takes apart:
    it rounds three times then, where eager rounds once or twice."""
    calls = [node]
    for target in (torch.mul, torch.div):
        operand = calls[-1].args[-1 if target is torch.mul else 0] if calls[-1].args else None
        if not isinstance(operand, fx.Node) or operand.target is not target:
            return False
        calls.append(operand)
    traces = {call.meta.get("stack_trace") for call in calls}
    return node.target is torch.add and len(traces) == 1
