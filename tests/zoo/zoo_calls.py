# SPDX-License-Identifier: Apache-2.0
"""Ways of calling a model: options left out, keywords, several calls, steps with the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cut_models import Case, rows
from torch import nn
from zoo_control_flow import Rows


class TakesOptions(Rows):
    """Optional tensors and flags, some of them left out on some steps."""

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        *,
        center: bool = False,
    ) -> torch.Tensor:
        if mask is not None:
            x = x.masked_fill(mask, 0.0)
        if scale is not None:
            x = x * scale
        if center:
            x = x - x.mean(0)
        return self.net(x)


class TakesKeywords(nn.Module):
    """Called as `model(**batch)`, and returns a dict that contains its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 2)

    def forward(
        self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, label: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        weight = attention_mask.float() / attention_mask.sum(1, keepdim=True)
        logits = self.head((self.embedding(input_ids) * weight.unsqueeze(-1)).sum(1))
        return {"loss": F.cross_entropy(logits, label), "logits": logits}


class ComparesTwoViews(Rows):
    """Called twice per step, on two tensors of one batch."""


class HasATrainingStep(Rows):
    """Lightning's way: a step that contains the loss, called instead of the model."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, label = batch
        x = (x - x.mean(0)) / (x.std(0) + 1e-5)
        smooth = F.one_hot(label, 2).float() * 0.9 + 0.05
        return F.cross_entropy(self(x), smooth)


class StepIsForward(HasATrainingStep):
    """The same step as forward itself: targets and loss are part of what can be cut."""

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, label = batch
        x = (x - x.mean(0)) / (x.std(0) + 1e-5)
        smooth = F.one_hot(label, 2).float() * 0.9 + 0.05
        return F.cross_entropy(self.net(x), smooth)


def optional(k: int) -> dict[str, Any]:
    x, label = rows(k)
    mask = x > 1.0 if k % 2 else None
    return {"x": x, "mask": mask, "scale": 0.5 if k % 3 == 0 else None, "label": label}


def optional_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    center = batch["mask"] is None
    logits = model(batch["x"], batch["mask"], scale=batch["scale"], center=center)
    return F.cross_entropy(logits, batch["label"])


def keyword_tokens(k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return {
        "input_ids": torch.randint(0, 50, (5, 12), generator=g),
        "attention_mask": (torch.arange(12) < torch.randint(4, 13, (5, 1), generator=g)).long(),
        "label": torch.randint(0, 2, (5,), generator=g),
    }


def keyword_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"]
    return loss


def pairs(k: int) -> dict[str, torch.Tensor]:
    return {"left": rows(k)[0], "right": rows(100 + k)[0]}


def contrastive_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    left, right = model(batch["left"]), model(batch["right"])
    return F.mse_loss(left, right) - 0.1 * model(batch["left"]).std()


def step_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model.training_step(batch)
    return loss


def forward_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch)
    return loss


CALLS = [
    Case(
        "optional",
        TakesOptions,
        optional,
        optional_loss,
        True,
        "Optional arguments",
        "one graph for each combination of what is given",
    ),
    Case(
        "keywords",
        TakesKeywords,
        keyword_tokens,
        keyword_loss,
        True,
        "keyword inputs",
        "the embedding stays",
    ),
    Case(
        "two_views",
        ComparesTwoViews,
        pairs,
        contrastive_loss,
        True,
        "several calls per step",
        "both calls are cut by one plan",
    ),
    Case(
        "training_step",
        HasATrainingStep,
        rows,
        step_loss,
        True,
        "training_step with the loss",
        "the step is called, and what it makes of the batch reaches the model as lazy tensors",
    ),
    Case(
        "step_is_forward",
        StepIsForward,
        rows,
        forward_loss,
        True,
        "loss in forward",
        "targets move as well",
    ),
]
