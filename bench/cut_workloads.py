# SPDX-License-Identifier: Apache-2.0
"""The models of bench/cut.py, which compute their features from the batch in forward.

Each is written as its user would write it without knowing of a cut. The data are made in memory,
from fixed seeds. Except for `one_hot`, a worker has little to do before the model's part.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from mel_bands import mel_bands
from torch import nn
from torch.utils.data import Dataset, TensorDataset

Batch = Any
RATE_HZ = 16_000
TABLE_ROWS = 1 << 16
VOCABULARY_SIZE = 500
SENTENCE_PIECES = 32
PIECE_LENGTH = 10  # of the longest, in letters
MULTIPLIER = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed integer


@dataclass(frozen=True, slots=True)
class CutWorkload:
    """A model with its features in forward, and the data that it is trained on."""

    name: str
    make_dataset: Callable[[int], Dataset[Any]]  # of so many samples
    make_model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batch_size: int
    epoch_batches: int = 64
    maximal_must_lose: bool = False  # without a cut, or the workload does not test its question


class KeywordNet(nn.Module):
    """Waveforms as recorded; log-mel bands, levelled, then convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(400))
        self.register_buffer("bands", mel_bands(201, 64, RATE_HZ))
        self.net = convolutions(1, (16, 32, 64), class_count=35)

    def forward(self, waves: torch.Tensor) -> torch.Tensor:
        waves = waves.float() / 32768
        spectrum = torch.stft(waves, 400, 160, window=self.window, return_complex=True)
        mels = spectrum.abs().square().transpose(1, 2) @ self.bands
        mels = torch.log(mels.clamp(min=1e-6))
        mels = mels - mels.mean(dim=(1, 2), keepdim=True)
        mels = mels / (mels.std(dim=(1, 2), keepdim=True) + 1e-5)
        return self.net(mels.unsqueeze(1))


def waves(count: int) -> Dataset[Any]:
    """One second each of 16-bit noise at changing levels."""
    draw = torch.Generator().manual_seed(0)
    level = 200 + 4000 * torch.rand(count, 1, generator=draw)
    samples = (torch.randn(count, RATE_HZ, generator=draw) * level).clamp(-32768, 32767)
    return TensorDataset(samples.to(torch.int16), torch.randint(35, (count,), generator=draw))


class ClickNet(nn.Module):
    """The columns of a click log: 13 counts and 26 categories; a wide and a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.expm1(torch.linspace(0, 10, 15)))
        self.register_buffer("left", torch.arange(0, 16, 2))
        self.register_buffer("right", torch.arange(1, 16, 2))
        self.table = nn.Embedding(TABLE_ROWS, 8)
        self.wide = nn.Linear(13 * 16, 1)
        self.deep = nn.Sequential(
            nn.Linear(13 + (26 + 8) * 8, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, counts: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        counts = counts.clamp(0, 1e6)
        dense = torch.log1p(counts)
        dense = (dense - 2.0) / 1.5
        buckets = torch.bucketize(counts, self.edges)
        hot = F.one_hot(buckets, 16).flatten(1).float()
        crosses = categories[:, self.left] * MULTIPLIER + categories[:, self.right]
        ids = torch.cat([categories, crosses], dim=1) * MULTIPLIER
        ids = (ids ^ (ids >> 29)).remainder(TABLE_ROWS)
        deep = self.deep(torch.cat([dense, self.table(ids).flatten(1)], dim=1))
        return (self.wide(hot) + deep).squeeze(1)


def clicks(count: int) -> Dataset[Any]:
    draw = torch.Generator().manual_seed(0)
    counts = torch.exp(2 + 2 * torch.randn(count, 13, generator=draw)) - 1
    categories = torch.exp(12 * torch.rand(count, 26, generator=draw)).long()
    labels = torch.randint(2, (count,), generator=draw).float()
    return TensorDataset(counts, categories, labels)


class ResizingNet(nn.Module):
    """Images as stored; converts, normalises and resizes them, then convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
        self.net = convolutions(3, (16, 32, 64), class_count=10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = (images.float() / 255 - self.mean) / self.std
        images = F.interpolate(images, size=(96, 96), mode="bilinear", antialias=True)
        return self.net(images)


def images(count: int) -> Dataset[Any]:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 256, 256), dtype=torch.uint8, generator=draw)
    return TensorDataset(pixels, torch.randint(10, (count,), generator=draw))


class OneHotNet(nn.Module):
    """Token ids, each made a vector of as many numbers as there are tokens, then a linear layer.

    The features computed from the batch alone are 250 times as many bytes as the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(VOCABULARY_SIZE, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hot = F.one_hot(ids, VOCABULARY_SIZE).float()
        return self.second(F.relu(self.first(hot)).mean(dim=1))


class Sentences(Dataset[Any]):
    """Lower-case texts, cut greedily into the longest pieces known, as word-piece tokenizers do."""

    def __init__(self, count: int) -> None:
        draw = random.Random(0)
        pieces = list(string.ascii_lowercase)
        while len(pieces) < VOCABULARY_SIZE:
            piece = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, PIECE_LENGTH)))
            if piece not in pieces:
                pieces.append(piece)
        self._ids = {piece: index for index, piece in enumerate(pieces)}
        words = ["".join(draw.choices(pieces, k=3)) for _ in range(10_000)]
        self._texts = [" ".join(draw.choices(words, k=SENTENCE_PIECES // 3)) for _ in range(count)]
        self._labels = [draw.randrange(4) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ids: list[int] = []
        for word in self._texts[index].split():
            begin = 0
            while begin < len(word):
                end = min(len(word), begin + PIECE_LENGTH)
                while word[begin:end] not in self._ids:
                    end -= 1
                ids.append(self._ids[word[begin:end]])
                begin = end
        ids += [0] * (SENTENCE_PIECES - len(ids))
        return torch.tensor(ids[:SENTENCE_PIECES]), self._labels[index]


def ready_ids(count: int) -> Dataset[Any]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY_SIZE, (count, SENTENCE_PIECES), generator=draw)
    return TensorDataset(ids, torch.randint(4, (count,), generator=draw))


class OneGraph(nn.Module):
    """uint8 images, converted and normalised in forward, and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
        self.first = convolutions(3, (16, 32), 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = (images.float() / 255 - self.mean) / self.std
        # Not a loop: Dynamo captures no part of a loop with a break in it.
        values = F.relu(self.first(values))
        self.between_stages()
        values = F.relu(self.second(values))
        self.between_stages()
        return self.third(values)

    def between_stages(self) -> None:
        pass


class SeveralGraphs(OneGraph):
    """The same, with code between its stages that Dynamo cannot capture."""

    def between_stages(self) -> None:
        torch._dynamo.graph_break()


# None of these operations moves, and the question is the cost of that.
OVERHEAD_MODELS = {"one_graph": OneGraph, "several_graphs": SeveralGraphs}


def convolutions(in_channels: int, widths: tuple[int, ...], class_count: int) -> nn.Sequential:
    """Halves the size with each layer; a linear layer reads the mean."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [
            nn.Conv2d(in_channels, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        in_channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, class_count)
    )


def class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def click_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0], batch[1]), batch[2])


class Frames(Dataset[Any]):
    """Pictures of a film as bytes: 3 x 256 x 256. A few of them, again and again."""

    def __init__(self, count: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self._frames = torch.randint(0, 256, (64, 3, 256, 256), dtype=torch.uint8, generator=draw)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._frames[index % len(self._frames)], index % 10


class FrameNet(nn.Module):
    """Frames that the model converts and normalises; features of patches, and a linear layer."""

    def __init__(self, edge: int | None = None) -> None:
        super().__init__()
        self._edge = edge  # to which frames are resized first
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
        self.patches = nn.Conv2d(3, 16, 16, stride=16)
        self.head = nn.Linear(16, 10)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        pictures = frames.float() / 255
        if self._edge is not None:
            size = (self._edge, self._edge)
            pictures = F.interpolate(pictures, size, mode="bilinear", antialias=True)
        pictures = (pictures - self.mean) / self.deviation
        return self.head(F.relu(self.patches(pictures)).mean((2, 3)))


def small_frames_net() -> nn.Module:
    return FrameNet(96)


WORKLOADS = {
    workload.name: workload
    for workload in (
        CutWorkload("audio", waves, KeywordNet, class_loss, batch_size=32),
        CutWorkload("tabular", clicks, ClickNet, click_loss, batch_size=2048),
        CutWorkload("resize", images, ResizingNet, class_loss, batch_size=16),
        # The worker makes the ids from text, so that it has no time to spare for features that
        # inflate the batch.
        CutWorkload(
            "one_hot", Sentences, OneHotNet, class_loss, batch_size=128, maximal_must_lose=True
        ),
        # The same model on ids that are ready: a price that is correct there must be correct here,
        # too.
        CutWorkload("one_hot_ready", ready_ids, OneHotNet, class_loss, batch_size=128),
        # Conversion makes four bytes of one; over a link the trainer should do it.
        CutWorkload("frames", Frames, FrameNet, class_loss, batch_size=16),
        CutWorkload("frames_resized", Frames, small_frames_net, class_loss, batch_size=16),
    )
}
