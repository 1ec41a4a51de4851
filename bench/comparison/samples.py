# SPDX-License-Identifier: Apache-2.0
"""The data of the comparison, the same for every system. Needs numpy alone to be imported: the
environment of tf.data has no torch.

A sample has a stored part, which formats such as MDS hold, and a part that is made from it each
time: `make(stored(index))`.
"""

from __future__ import annotations

import io
import os
import random
import time
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Sample = dict[str, Any]
COUNT = 2048  # of the samples that promises are checked with
SAMPLE_S = 0.002
IMAGE_COUNT, IMAGE_SIZE = 32, 64
DOCUMENT_COUNT, ROW_LENGTH = 400, 128
WORDS = 20_000


class Samples:
    """A dataset with indices; `None` as `collate` stacks the values of samples."""

    batch_size = 8
    collate: Callable[[list[Sample]], Sample] | None = None

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self._length = folder, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        return self.make(self.stored(int(index)))

    def stored(self, index: int) -> Sample:
        raise NotImplementedError

    def make(self, stored: Sample, draw: random.Random | None = None) -> Sample:
        """Return the sample; `draw` takes the place of the global generator."""
        return stored


class Numbered(Samples):
    """Samples that show who made them, and with which random number."""

    def __init__(self, folder: Path, sample_s: float = SAMPLE_S) -> None:
        super().__init__(folder, COUNT)
        self._sample_s = sample_s

    def stored(self, index: int) -> Sample:
        return {"id": index}

    def make(self, stored: Sample, draw: random.Random | None = None) -> Sample:
        time.sleep(self._sample_s)
        number = (draw or random).random()
        return {"id": int(stored["id"]), "draw": number, "pid": os.getpid()}


class Documents(Samples):
    """Sequences of 1 to 100 tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, DOCUMENT_COUNT)

    def stored(self, index: int) -> Sample:
        draw = np.random.default_rng(index)
        return {"tokens": draw.integers(1, 1000, draw.integers(1, 100), dtype=np.int64)}


class Rows(Samples):
    """A row of 100 floats and a label."""

    batch_size = 256

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 50_000)
        self.values = np.random.default_rng(0).random((50_000, 100), dtype=np.float32)

    def stored(self, index: int) -> Sample:
        return {"row": self.values[index], "label": index % 10}


class Photographs(Samples):
    """JPEG files of 500 x 375: decode, random resized crop to 224, flip, to float."""

    batch_size = 32

    def __init__(self, folder: Path) -> None:
        self.paths = photograph_files(folder)
        super().__init__(folder, 8 * len(self.paths))
        self._transform: Any = None

    def stored(self, index: int) -> Sample:
        path = self.paths[index % len(self.paths)]
        return {"file": path.read_bytes(), "label": index % 10}

    def __getitem__(self, index: int) -> Sample:
        from PIL import Image

        with Image.open(self.paths[index % len(self.paths)]) as image:
            return {"image": self._augmented(image.convert("RGB")), "label": index % 10}

    def make(self, stored: Sample, draw: random.Random | None = None) -> Sample:
        return {"image": self._augmented(decoded(stored["file"])), "label": stored["label"]}

    def _augmented(self, image: Any) -> Any:
        if self._transform is None:
            from torchvision import transforms

            self._transform = transforms.Compose(
                [
                    transforms.RandomResizedCrop(224),
                    transforms.RandomHorizontalFlip(),
                    transforms.ToTensor(),
                ]
            )
        return self._transform(image)


class Texts(Samples):
    """Sentences of many lengths to token ids, padded to the longest of a batch."""

    batch_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 16_384)
        draw = random.Random(0)
        words = [f"w{word:x}" for word in range(WORDS)]
        self.vocabulary = {word: 1 + token for token, word in enumerate(words)}
        self.sentences = [
            " ".join(draw.choices(words, k=min(256, 4 + int(draw.lognormvariate(3.3, 0.7)))))
            for _ in range(len(self))
        ]

    def stored(self, index: int) -> Sample:
        return {"text": self.sentences[index]}

    def make(self, stored: Sample, draw: random.Random | None = None) -> Sample:
        tokens = [self.vocabulary[word] for word in str(stored["text"]).split()]
        return {"tokens": np.array(tokens, np.int64)}

    @staticmethod
    def collate(samples: list[Sample]) -> Sample:
        rows = [np.asarray(sample["tokens"]) for sample in samples]
        padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = tokens
        return {"tokens": padded}


class Heavy(Samples):
    """Samples of which 5 % take 50 ms, as a slow store does."""

    batch_size = 32

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 4096)
        self.slow = np.random.default_rng(0).random(len(self)) < 0.05

    def stored(self, index: int) -> Sample:
        return {"index": index}

    def make(self, stored: Sample, draw: random.Random | None = None) -> Sample:
        index = int(stored["index"])
        if self.slow[index]:
            time.sleep(0.05)
        return {"row": np.full(1000, index, np.float32)}


class Pixels(Samples):
    """JPEG files, decoded and resized by Pillow."""

    def __init__(self, folder: Path) -> None:
        self.paths = photograph_files(folder)[:IMAGE_COUNT]
        super().__init__(folder, len(self.paths))

    def stored(self, index: int) -> Sample:
        return {"id": index, "file": self.paths[index].read_bytes()}

    def make(self, stored: Sample, draw: random.Random | None = None) -> Sample:
        return {"id": stored["id"], "image": resized(decoded(stored["file"]))}


KINDS: dict[str, Callable[[Path], Samples]] = {
    "numbered": Numbered,
    "documents": Documents,
    "pixels": Pixels,
    "rows": Rows,
    "photographs": Photographs,
    "texts": Texts,
    "heavy": Heavy,
}


def photograph_files(folder: Path) -> list[Path]:
    """The files that the harness wrote."""
    return sorted((folder / "photographs").rglob("*.jpg"))


def decoded(file: bytes) -> Any:
    """A picture of Pillow, in RGB."""
    from PIL import Image

    return Image.open(io.BytesIO(file)).convert("RGB")


def resized(image: Any) -> np.ndarray[Any, Any]:
    from PIL import Image

    return np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))


Pair = namedtuple("Pair", ["ids", "draws"])


@dataclass
class Record:
    ids: list[int]
    draws: list[float]


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as what tokenizers of Hugging Face return."""


def as_pair(samples: list[Sample]) -> Pair:
    return Pair(*_columns(samples))


def as_record(samples: list[Sample]) -> Record:
    return Record(*_columns(samples))


def as_encoding(samples: list[Sample]) -> Encoding:
    return Encoding(zip(("ids", "draws"), _columns(samples), strict=True))


CONTAINERS = {"namedtuple": as_pair, "dataclass": as_record, "UserDict": as_encoding}


def _columns(samples: list[Sample]) -> tuple[list[int], list[float]]:
    return [sample["id"] for sample in samples], [sample["draw"] for sample in samples]
