# SPDX-License-Identifier: Apache-2.0
"""Common computations on a batch before the first parameter, and obstacles to moving them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cut_models import Case, NormalizedResNet, first_argument, images, rows
from torch import nn
from zoo_control_flow import Rows


class ChannelsLast(NormalizedResNet):
    """Requests a memory format, on which the kernels of the convolutions depend."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = ((x.float() / 255 - self.mean) / self.std).to(memory_format=torch.channels_last)
        return self.head(F.relu(self.norm1(self.stem(x))).mean((2, 3)))


class Patches(Rows):
    """Overlapping windows: unfold, as_strided views, and a gather by a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(20).flip(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        windows = x.unfold(1, 5, 2)
        strided = x.as_strided((x.shape[0], 4, 5), (x.stride(0), 5, 1))
        spread = windows.amax(2).sum(1, keepdim=True) + strided.diagonal(dim1=1, dim2=2).sum(
            1, keepdim=True
        )
        return self.net(x[:, self.places] * spread)


class Spectra(nn.Module):
    """Complex numbers, a conjugate that is only a view, and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x).conj()
        return self.head((spectrum @ self.weight).abs())


class Halved(Rows):
    """A model in bfloat16 whose features are made in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        x = (x - x.mean(0)) / x.std(0)
        return self.net(x.to(torch.bfloat16)).float()


class LearnsItsScale(Rows):
    """Normalises with parameters: only the operations before them depend on the batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(20))
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x.clamp(-2.0, 2.0) - self.mean) * self.scale)


class Standardizes(Rows):
    """Mean and deviation are buffers that the training loop sets again now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(20))
        self.register_buffer("deviation", torch.ones(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x - self.mean) / self.deviation)

    def adapt(self, x: torch.Tensor) -> None:
        self.mean.copy_(x.mean(0))
        self.deviation = x.std(0) + 1e-3


class ChangesItsInput(Rows):
    """Writes to its input batch, and to views of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, ::2].mul_(0.5)
        x.t()[0] = 1.0
        return self.net(x + 1.0)


class PenalizesItsGradient(Rows):
    """A penalty on the gradient at the input: the batch takes part in autograd."""

    def penalty(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return gradient.square().sum(1).mean()


class Reconstructs(nn.Module):
    """An autoencoder: the loss reads the batch and the features that forward made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(20, 4)
        self.wide = nn.Linear(4, 20)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = x.sigmoid()
        return self.wide(F.relu(self.narrow(features))), features


def ragged_rows(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch before the last is a smaller one."""
    x, label = rows(k)
    return (x[:7].clone(), label[:7].clone()) if k == 4 else (x, label)


def adapting_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, label = batch
    if x[0, 0] > 0:
        model.adapt(x)
    return F.cross_entropy(model(x), label)


def penalized_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = first_argument(model, batch)
    return loss + model.penalty(batch[0]) if torch.is_grad_enabled() else loss


def reconstruction_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    made, features = model(batch[0])
    return F.mse_loss(made, features) + 0.1 * F.l1_loss(made, batch[0])


FEATURES = [
    Case(
        "channels_last",
        ChannelsLast,
        images,
        first_argument,
        True,
        "memory format",
        "the boundary keeps its strides",
    ),
    Case(
        "patches",
        Patches,
        ragged_rows,
        first_argument,
        True,
        "strided views, a small batch",
        "a second plan for the smaller batch",
    ),
    Case(
        "spectra",
        Spectra,
        rows,
        first_argument,
        True,
        "complex numbers",
        "a conjugate is a view, and a boundary tensor is not",
    ),
    Case(
        "bfloat16",
        Halved,
        rows,
        first_argument,
        True,
        "float64 features, bfloat16 model",
        "the cast to bfloat16 moves",
    ),
    Case(
        "learned_scale",
        LearnsItsScale,
        rows,
        first_argument,
        True,
        "normalises by parameters",
        "the clamp moves, the parameters stay",
    ),
    Case(
        "adapted",
        Standardizes,
        rows,
        adapting_loss,
        True,
        "changed mean/std buffers",
        "buffers that changed twice count as state",
    ),
    Case(
        "writes_input",
        ChangesItsInput,
        rows,
        first_argument,
        False,
        "writes to the batch",
        "what reads the batch after a write stays",
    ),
    Case(
        "penalty",
        PenalizesItsGradient,
        rows,
        penalized_loss,
        True,
        "gradient of the input",
        "the batch requires gradients in every second call, which stays whole",
    ),
    Case(
        "autoencoder",
        Reconstructs,
        rows,
        reconstruction_loss,
        True,
        "loss reads the batch",
        "the features come back out of forward",
    ),
]
