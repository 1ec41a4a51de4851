# SPDX-License-Identifier: Apache-2.0
"""Small models in common styles, each with a matching batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model, how batch number k looks, and how the loss is computed from a delivered batch."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    moves: bool  # whether cut="maximal" moves any calls
    style: str = ""  # the kind of program that it represents
    note: str = ""  # the calls that stay, or the reason why no calls move
    package: str = ""  # the optional package that it needs


class NormalizedResNet(nn.Module):
    """uint8 images; converts, normalises and resizes with antialiasing inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() / 255 - self.mean) / self.std
        x = F.interpolate(x, size=(16, 16), mode="bilinear", antialias=True)
        x = F.relu(self.norm1(self.stem(x)), inplace=True)
        x = F.relu(x + self.norm2(self.conv(x)))
        return self.head(x.mean((2, 3)))


class InPlaceNormalize(NormalizedResNet):
    """The chain of torchvision's normalise: a clone, written to in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 3, 1, 2).float().div(255)
        x = x.clone()
        x.sub_(self.mean).div_(self.std)
        x *= 2
        x = F.relu(self.norm1(self.stem(x)), inplace=True)
        return self.head(x.mean((2, 3)))


class WideAndDeep(nn.Module):
    """Tabular features: logs, clips, buckets, one-hot and crosses, then wide and deep parts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bounds", torch.linspace(0.0, 3.0, 7))
        self.embedding = nn.Embedding(64, 8)
        self.deep = nn.Sequential(nn.Linear(8 * 2 + 4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.wide = nn.Linear(8 + 5, 1)

    def forward(
        self, dense: torch.Tensor, category: torch.Tensor, user: torch.Tensor
    ) -> torch.Tensor:
        dense = torch.log1p(dense.clamp(min=0.0))
        buckets = torch.bucketize(dense[:, 0], self.bounds)
        hot = torch.cat([F.one_hot(buckets, 8), F.one_hot(category % 5, 5)], 1).float()
        cross = (category * 7 + user * 13) % 64
        embedded = torch.cat([self.embedding(cross), self.embedding(user % 64), dense], 1)
        return (self.wide(hot) + self.deep(embedded)).squeeze(1)


class LogMel(nn.Module):
    """Waveforms: short-time Fourier transform, mel bands, log, then convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        generator = torch.Generator().manual_seed(5)
        self.register_buffer("bands", torch.rand(33, 10, generator=generator))
        self.conv = nn.Conv1d(10, 6, 3)
        self.head = nn.Linear(6, 3)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        wave = wave.to(torch.float32) / 32768.0
        spectrum = torch.stft(wave, 64, 16, window=self.window, return_complex=True)
        power = spectrum.abs().pow(2.0)
        mel = torch.matmul(power.transpose(1, 2), self.bands).transpose(1, 2)
        mel = torch.log(torch.clamp(mel, min=1e-10))
        mel = (mel - mel.mean(dim=(1, 2), keepdim=True)) / (
            mel.std(dim=(1, 2), keepdim=True) + 1e-5
        )
        return self.head(F.relu(self.conv(mel)).mean(2))


class TokenTransformer(nn.Module):
    """Token ids and an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.position = nn.Embedding(12, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(input_ids.shape[1]).unsqueeze(0).expand_as(input_ids)
        x = self.embedding(input_ids) + self.position(positions)
        padding = attention_mask == 0
        causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).triu(1)
        y, _ = self.attention(
            x, x, x, key_padding_mask=padding, attn_mask=causal, need_weights=False
        )
        weight = attention_mask.float() / attention_mask.sum(1, keepdim=True).float()
        return self.head((self.norm(x + y) * weight.unsqueeze(-1)).sum(1))


class DropoutOnInput(nn.Module):
    """Random draws on the input stay, and the calls before them move."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() - 3.0) * 0.25
        return self.net(F.dropout(x, 0.3, self.training))


class BatchNormOnInput(nn.Module):
    """Running statistics of the raw input are state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.net = nn.Linear(20, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


class SideBranch(nn.Module):
    """Views, splits, several results of one call, a literal, and other special cases."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor([1.0, 2.0, 0.5])
        self.net = nn.Linear(9, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x = batch["x"].to(torch.float32)
        a, b, c = x.split([4, 4, 1], dim=1)
        best, where = a.max(dim=1)
        shift = torch.tensor([0.1, 0.2, 0.3])
        mixed = torch.stack([best, where.float(), c[:, 0]], 1) * self.scale + shift
        left, right = torch.chunk(b, 2, 1)
        features = torch.cat([mixed, left - right, b.flip(1)], dim=1)
        with torch.no_grad():
            spread = features.amax() - features.amin()
        return {"logits": self.net(features), "spread": spread, "features": features}


def images(k: int, *, last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    shape = (6, 24, 24, 3) if last else (6, 3, 24, 24)
    return (
        torch.randint(0, 256, shape, dtype=torch.uint8, generator=g),
        torch.randint(0, 4, (6,), generator=g),
    )


def table(k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return {
        "dense": torch.randn(16, 4, generator=g) * 3,
        "category": torch.randint(0, 100, (16,), generator=g),
        "user": torch.randint(0, 1000, (16,), generator=g),
        "label": torch.rand(16, generator=g),
    }


def waves(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return (
        torch.randint(-32768, 32768, (4, 640), dtype=torch.int16, generator=g),
        torch.randint(0, 3, (4,), generator=g),
    )


def tokens(k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    mask = (torch.arange(12) < torch.randint(4, 13, (5, 1), generator=g)).long()
    return {
        "input_ids": torch.randint(0, 50, (5, 12), generator=g),
        "attention_mask": mask,
        "label": torch.randint(0, 2, (5,), generator=g),
    }


def rows(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return torch.randn(10, 20, generator=g), torch.randint(0, 2, (10,), generator=g)


def mapping(k: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(k)
    return {
        "x": torch.randint(-9, 9, (8, 9), generator=g),
        "label": torch.randint(0, 2, (8,), generator=g),
    }


def first_argument(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def tabular_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["dense"], batch["category"], batch["user"])
    return F.binary_cross_entropy_with_logits(logits, batch["label"])


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return F.cross_entropy(logits, batch["label"])


def mapping_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch)
    return F.cross_entropy(out["logits"], batch["label"]) + out["spread"] * 0.01


CASES = [
    Case("resnet", NormalizedResNet, images, first_argument, True),
    Case("in_place", InPlaceNormalize, lambda k: images(k, last=True), first_argument, True),
    Case("wide_and_deep", WideAndDeep, table, tabular_loss, True),
    Case("log_mel", LogMel, waves, first_argument, True),
    Case("transformer", TokenTransformer, tokens, token_loss, True),
    Case("dropout_on_input", DropoutOnInput, rows, first_argument, True),
    Case("batch_norm_on_input", BatchNormOnInput, rows, first_argument, False),
    Case("side_branch", SideBranch, mapping, mapping_loss, True),
]
