# SPDX-License-Identifier: Apache-2.0
"""Text: sentences of many lengths to token ids, padded by a user-defined collate_fn; batch 64."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from workloads.workload import Workload, fetch_and_collate

Sample = tuple[torch.Tensor, int]


class Sentences(Dataset[Sample]):
    """Splits a sentence into words and looks each up in the vocabulary."""

    def __init__(self, sentence_count: int, word_count: int) -> None:
        draw = random.Random(0)
        words = [f"w{word:x}" for word in range(word_count)]
        self._vocabulary = {word: 1 + token for token, word in enumerate(words)}
        self._sentences = [
            " ".join(draw.choices(words, k=min(256, 4 + int(draw.lognormvariate(3.3, 0.7)))))
            for _ in range(sentence_count)
        ]

    def __len__(self) -> int:
        return 8 * len(self._sentences)

    def __getitem__(self, index: int) -> Sample:
        index %= len(self._sentences)
        tokens = [self._vocabulary[word] for word in self._sentences[index].split()]
        return torch.tensor(tokens), index % 4


def pad(samples: list[Sample]) -> dict[str, torch.Tensor]:
    tokens, labels = zip(*samples, strict=True)
    padded = pad_sequence(list(tokens), batch_first=True)
    return {"tokens": padded, "mask": padded != 0, "labels": torch.tensor(labels)}


def build(folder: Path) -> dict[str, Any]:
    dataset = Sentences(16_384, 20_000)
    return {"dataset": dataset, "batch_size": 64, "shuffle": True, "collate_fn": pad}


WORKLOAD = Workload(
    "text",
    build,
    fetch_and_collate,
    work_is="the samples of each batch and collate_fn, 2 processes",
)
