# SPDX-License-Identifier: Apache-2.0
"""Models that are wrapped in, compiled by or exported through a part of torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from cut_models import (
    Case,
    DropoutOnInput,
    NormalizedResNet,
    WideAndDeep,
    first_argument,
    images,
    rows,
    table,
    tabular_loss,
)
from torch import nn
from zoo_control_flow import Rows


class HasAnAutocastRegion(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - x.mean(0)) / (x.std(0) + 1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.net(x)
        return x.float()


class Checkpointed(Rows):
    """Activation checkpointing over a BatchNorm, after features of the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.utils.checkpoint.checkpoint(self.body, x.abs().log1p(), use_reentrant=False)
        return self.net(x)


class Rounded(torch.autograd.Function):
    """Straight through: rounds forward, the identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 8.0) / 8.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class UsesAnAutogradFunction(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(Rounded.apply(x * 2.0))


class HasAFrozenTeacher(Rows):
    """A network without gradients on the same features as the learning one."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(20, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.tanh()
        with torch.no_grad():
            taught = self.teacher(x).softmax(1)
        return self.net(x) + taught


class MapsOverTheBatch(Rows):
    """Features of one row, mapped over the rows by torch.func."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.vmap(lambda row: row - row.mean())(x))


class CompilesItsBody(NormalizedResNet):
    """The user compiles a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.compile(backend="aot_eager")


def prepended() -> nn.Module:
    """The features are in a hook that runs before the network, as some recipes put them."""
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 2))
    model.register_forward_pre_hook(centered)
    return model


def centered(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return ((inputs[0] - inputs[0].mean(0)) * 0.5,)


def weight_normed() -> nn.Module:
    model = WideAndDeep()
    nn.utils.parametrizations.weight_norm(model.wide)
    return model


def compiled() -> Any:
    return torch.compile(NormalizedResNet(), backend="aot_eager")


def compiled_in_place() -> nn.Module:
    model = NormalizedResNet()
    model.compile(backend="aot_eager")
    return model


def data_parallel() -> nn.Module:
    return nn.DataParallel(NormalizedResNet())


def distributed() -> nn.Module:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(NormalizedResNet())


def graph_module() -> nn.Module:
    return torch.fx.symbolic_trace(NormalizedResNet())


def exported() -> nn.Module:
    x, _ = images(0)
    return torch.export.export(NormalizedResNet(), (x,)).module()


def scripted() -> nn.Module:
    return torch.jit.script(DropoutOnInput())


def traced_inside() -> nn.Module:
    """TorchScript within a Python model: a traced network after features."""
    return nn.Sequential(nn.Hardtanh(), torch.jit.trace(nn.Linear(20, 2), torch.zeros(10, 20)))


def autocast_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[0])
    return F.cross_entropy(logits.float(), batch[1])


def unoptimized_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """TorchScript's optimizer computes other gradients from the second run of a class on."""
    with torch.jit.optimized_execution(False):
        return first_argument(model, batch)


WRAPPINGS = [
    Case(
        "autocast_around",
        NormalizedResNet,
        images,
        autocast_loss,
        True,
        "autocast around it",
        "moves as its casts",
    ),
    Case(
        "autocast_inside",
        HasAnAutocastRegion,
        rows,
        first_argument,
        True,
        "autocast region",
        "moves as its casts",
    ),
    Case(
        "checkpoint",
        Checkpointed,
        rows,
        first_argument,
        False,
        "activation checkpointing",
        "refused: run by Dynamo it would have other bits",
    ),
    Case(
        "own_function",
        UsesAnAutogradFunction,
        rows,
        first_argument,
        True,
        "autograd.Function",
        "its forward is inlined, for the batch needs no gradients",
    ),
    Case(
        "frozen_teacher",
        HasAFrozenTeacher,
        rows,
        first_argument,
        True,
        "frozen network",
        "parameters stay, frozen ones too",
    ),
    Case(
        "vmap",
        MapsOverTheBatch,
        rows,
        first_argument,
        False,
        "torch.func",
        "refused: torch.func transforms",
    ),
    Case(
        "pre_hook",
        prepended,
        rows,
        first_argument,
        True,
        "features in a forward pre-hook",
        "the hook is the only frame of the user's, and all of it moves",
    ),
    Case(
        "weight_norm",
        weight_normed,
        table,
        tabular_loss,
        True,
        "parametrization",
        "as wide_and_deep",
    ),
    Case(
        "compiled",
        compiled,
        images,
        first_argument,
        True,
        "torch.compile(model)",
        "the user's backend compiles what stays",
    ),
    Case(
        "compiled_in_place",
        compiled_in_place,
        images,
        first_argument,
        True,
        "model.compile()",
        "as torch.compile(model)",
    ),
    Case(
        "compiled_part",
        CompilesItsBody,
        images,
        first_argument,
        True,
        "a compiled submodule",
        "Dynamo goes through the compiled part",
    ),
    Case(
        "data_parallel",
        data_parallel,
        images,
        first_argument,
        True,
        "DataParallel",
        "on the CPU it calls its module",
    ),
    Case(
        "distributed",
        distributed,
        images,
        first_argument,
        True,
        "DDP on gloo",
        "DDP's own forward has graph breaks",
    ),
    Case("fx", graph_module, images, first_argument, True, "torch.fx.GraphModule", "as resnet"),
    Case(
        "export",
        exported,
        images,
        first_argument,
        True,
        "torch.export program",
        "as resnet; it cannot switch between training and evaluation",
    ),
    Case(
        "script",
        scripted,
        rows,
        unoptimized_loss,
        True,
        "TorchScript",
        "what stays is TorchScript again; used from the fifth call on",
    ),
    Case(
        "traced_inside",
        traced_inside,
        rows,
        first_argument,
        False,
        "a traced submodule",
        "no plan: all frames are torch's own",
    ),
]
