# SPDX-License-Identifier: Apache-2.0
"""Models whose forward is a program: branches, loops, numbers read from tensors, counters."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from cut_models import Case, first_argument, rows
from torch import nn


class Rows(nn.Module):
    """Twenty columns in, two classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x - 0.5) * 2.0)


class BreaksInTheMiddle(Rows):
    """A print among the features, left over from a debugging session."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - 0.5) * 2.0
        print(end="", flush=True)
        return self.net(x.abs().log1p())


class BranchesOnData(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        x = x.clamp(-2.5, 2.5) if x.max() > 5.5 else x.tanh()
        return self.net(x)


class ReadsAnItem(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        largest = x.abs().max().item()
        return self.net(x / largest)


class LoopsOverLengths(Rows):
    """A Python loop over lengths read from a tensor."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = [row[:length].mean() for row, length in zip(x, lengths.tolist(), strict=True)]
        return self.net(x - torch.stack(parts).unsqueeze(1))


class SelectsRows(Rows):
    """A result whose size depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[x[:, 0] > -0.2]
        return self.net(x - kept.mean(0))


class FlipsByPythonRandom(Rows):
    """Python's generator decides, one draw per call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2.0
        if random.random() < 0.5:
            x = x.flip(1)
        return self.net(x)


class TrainsAndEvaluatesDifferently(Rows):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double().float()
        x = x + 0.1 * torch.randn_like(x) if self.training else x - x.mean(1, keepdim=True)
        return self.net(x)


class WarmsUp(Rows):
    """A Python number that grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x * min(1.0, self.calls / 4) + self.calls)


class Anneals(Rows):
    """A Python fraction that an outside schedule changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x.abs() * self.scale).sqrt())


def rows_and_lengths(k: int) -> dict[str, torch.Tensor]:
    x, label = rows(k)
    g = torch.Generator().manual_seed(100 + k)
    return {"x": x, "lengths": torch.randint(1, 21, (10,), generator=g), "label": label}


def lengths_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["label"])


def annealed_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = first_argument(model, batch)
    model.scale *= 0.9
    return loss


CONTROL_FLOW = [
    Case(
        "graph_break",
        BreaksInTheMiddle,
        rows,
        first_argument,
        True,
        "graph break",
        "two graphs",
    ),
    Case(
        "branch_on_data",
        BranchesOnData,
        rows,
        first_argument,
        True,
        "data-dependent branch",
        "two graphs",
    ),
    Case(
        "item",
        ReadsAnItem,
        rows,
        first_argument,
        True,
        ".item()",
        "two graphs; the number is read in the trainer",
    ),
    Case(
        "loop",
        LoopsOverLengths,
        rows_and_lengths,
        lengths_loss,
        True,
        ".tolist() and a loop",
        "several graphs; lengths become Python numbers",
    ),
    Case(
        "select",
        SelectsRows,
        rows,
        first_argument,
        True,
        "data-dependent size",
        "the size that depends on values stays",
    ),
    Case(
        "python_random",
        FlipsByPythonRandom,
        rows,
        first_argument,
        True,
        "Python's random",
        "several graphs",
    ),
    Case(
        "modes",
        TrainsAndEvaluatesDifferently,
        rows,
        first_argument,
        True,
        "train/eval switch",
        "the draw stays in training; in evaluation all of the features move",
    ),
    Case(
        "warm_up",
        WarmsUp,
        rows,
        first_argument,
        True,
        "counter in Python",
        "the counter is another constant in every step, so every step is captured anew",
    ),
    Case(
        "anneal",
        Anneals,
        rows,
        annealed_loss,
        True,
        "fraction in Python",
        "moves in the first graph only: later the fraction is a tensor whose item is read",
    ),
]
