# SPDX-License-Identifier: Apache-2.0
"""The prefixes that bench/executor.py runs: everything that can move of a model, as offload would
ship it, and the very same computation as a module that eager, TorchScript and AOTInductor can
run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cut_workloads import WORKLOADS, OneGraph, class_loss
from torch import nn
from torch.utils.data import default_collate

from penstock.cut.prefix_compiler import CompileJob, LeafModule
from penstock.graph.capture import capture_whole, classify, tie_sizes
from penstock.graph.lowering import lower
from penstock.graph.planning import CutOptions, plan_cut
from penstock.tracking.leaves import flatten_batch

TESTS = Path(__file__).resolve().parents[1] / "tests"
TOKEN_COUNT, POSITION_COUNT, HEAD_COUNT = 30_000, 512, 8


@dataclass(frozen=True, slots=True)
class Prefix:
    """The operators that run in a worker, and the same for others."""

    text: str
    constants: list[torch.Tensor]
    leaves: list[torch.Tensor]
    module: nn.Module  # called with `used_leaves`
    used_leaves: list[torch.Tensor]


class MaskNet(nn.Module):
    """Token ids with padding: positions, a causal mask, relative biases and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKEN_COUNT, 16)
        self.positions = nn.Embedding(POSITION_COUNT, 16)
        self.biases = nn.Embedding(64, HEAD_COUNT)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        there = torch.arange(length).unsqueeze(0) < lengths.unsqueeze(1)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        both = there.unsqueeze(1) & there.unsqueeze(2) & causal
        mask = torch.zeros(both.shape).masked_fill(~both, -1e9).unsqueeze(1)
        place = (there.long().cumsum(1) - 1).clamp(min=0)
        distance = (place.unsqueeze(2) - place.unsqueeze(1)).clamp(0, 63)
        weight = there.float() / there.sum(1, keepdim=True).float()
        x = self.tokens(ids) + self.positions(place)
        scores = (x @ x.transpose(1, 2)).unsqueeze(1) + self.biases(distance).permute(0, 3, 1, 2)
        y = torch.softmax(scores + mask, dim=-1).mean(1) @ x
        return (y * weight.unsqueeze(-1)).sum(dim=1)


def mask_batch() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randint(TOKEN_COUNT, (32, 128), generator=draw),
        torch.randint(16, 129, (32,), generator=draw),
    ]


def image_batch() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (64, 3, 224, 224), dtype=torch.uint8, generator=draw)
    return [pixels, torch.randint(10, (64,), generator=draw)]


def cases() -> dict[str, Callable[[], Prefix]]:
    """The prefixes of bench/cut.py's models, and two more kinds, by name."""
    result: dict[str, Callable[[], Prefix]] = {}
    for workload in WORKLOADS.values():
        if workload.name != "one_hot":  # is one_hot_ready once the worker has made the ids
            result[workload.name] = partial(_of_workload, workload)
    result["normalise"] = lambda: prefix_of(OneGraph(), image_batch(), class_loss)
    result["masks"] = lambda: prefix_of(
        MaskNet(), mask_batch(), lambda model, batch: model(*batch).sum()
    )
    return result


def zoo_cases() -> dict[str, Callable[[], Prefix]]:
    """The prefixes of the models of tests/zoo, by name. Their batches are small, so the cost of a
    call dominates."""
    sys.path += [str(TESTS / "python"), str(TESTS / "zoo")]
    from zoo_models import ZOO

    return {
        case.name: lambda case=case: prefix_of(case.make_model(), case.make_batch(0), case.loss)
        for case in ZOO
    }


def _of_workload(workload: Any) -> Prefix:
    torch.manual_seed(0)
    dataset = workload.make_dataset(workload.batch_size)
    batch = default_collate([dataset[index] for index in range(workload.batch_size)])
    return prefix_of(workload.make_model(), batch, workload.loss)


def prefix_of(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor]
) -> Prefix:
    """Everything that can move of one training step. Raises the errors of planning, and ValueError
    when no operation can move."""
    captured = capture_whole(lambda b: loss(model, b), (batch,), {})
    leaves = flatten_batch(batch)
    place = {id(leaf): index for index, leaf in enumerate(leaves)}
    inputs = tie_sizes(
        classify(
            captured.placeholders,
            captured.examples,
            lambda tensor: place.get(id(tensor)),
            {id(buffer): buffer for buffer in model.buffers()},
        )
    )
    _, planned = plan_cut(
        lambda symbolic: lower(captured.graph_module, inputs, captured.examples, symbolic=symbolic),
        captured.examples,
        len(leaves),
        CutOptions("maximal", allow_random=False, worker_count=1),
    )
    if planned.reference is None:
        raise ValueError("none of its calls can move")
    used = [
        (index, captured.examples[index])
        for index, item in enumerate(inputs)
        if item.kind == "leaf"
    ]
    nodes = [node for node in planned.reference.graph.nodes if node.op == "placeholder"]
    others = [
        value if node.users and item.kind != "leaf" else None
        for node, item, value in zip(nodes, inputs, captured.examples, strict=True)
    ]
    return Prefix(
        planned.prefix,
        [constant.detach().clone() for constant in planned.prefix_constants],
        leaves,
        LeafModule(CompileJob(planned.reference, others, used)),
        [leaf for _, leaf in used],
    )
