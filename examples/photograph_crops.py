# SPDX-License-Identifier: Apache-2.0
"""Labelled photographs without a download: crops of pictures in scikit-image and scikit-learn.

Sixteen photographs that the two wheels carry become an ImageFolder: the folder is the photograph a
crop was taken from, and a model learns to distinguish them. Each photograph is cut into a grid of
cells; a crop lies inside one cell, and about one cell in four is held out. So no pixel of a
held-out crop is in any training crop.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

MARKER = "photographs.json"
SPLITS = ("train", "held_out")
GRID_ROWS = 3

# Of the motorcycle's stereo pair only the left view: the right one shows the held-out cells again.
PHOTOGRAPHS = {
    "astronaut": "skimage/data/astronaut.png",
    "brick": "skimage/data/brick.png",
    "camera": "skimage/data/camera.png",
    "chelsea": "skimage/data/chelsea.png",
    "china": "sklearn/datasets/images/china.jpg",
    "coffee": "skimage/data/coffee.png",
    "coins": "skimage/data/coins.png",
    "flower": "sklearn/datasets/images/flower.jpg",
    "grass": "skimage/data/grass.png",
    "gravel": "skimage/data/gravel.png",
    "hubble_deep_field": "skimage/data/hubble_deep_field.jpg",
    "ihc": "skimage/data/ihc.png",
    "moon": "skimage/data/moon.png",
    "motorcycle": "skimage/data/motorcycle_left.png",
    "retina": "skimage/data/retina.jpg",
    "rocket": "skimage/data/rocket.jpg",
}


class PhotographsError(Exception):
    """The crops cannot be written or the folder given for them has other contents."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The recipe of the folder's content; a folder made by another recipe is made again."""

    train_count: int = 200  # crops per photograph
    held_out_count: int = 50
    side_px: int = 320
    quality: int = 90
    version: int = 1

    def count(self, split: str) -> int:
        return self.train_count if split == "train" else self.held_out_count

    @property
    def crop_count(self) -> int:
        return len(PHOTOGRAPHS) * (self.train_count + self.held_out_count)


def prepare(folder: Path, recipe: Recipe, on_crop: Callable[[], None] | None = None) -> bool:
    """Makes `folder` contain the crops of `recipe`, and returns whether they had to be written.

    The crops are written next to `folder` and renamed into place when they are complete, so a
    folder under that name is complete. A folder with any other content is left alone.
    """
    folder = folder.expanduser().absolute()
    _refuse_foreign(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if _is_complete(folder, recipe):
                return False
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _write(partial, recipe, on_crop)
            if folder.exists():
                shutil.rmtree(folder)
            partial.rename(folder)
    except OSError as err:
        raise PhotographsError(
            f"cannot write the crops to {folder}: {err}; give a folder that can be written, "
            "with about 150 MB free, as --data"
        ) from err
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file, so that two demos started together do not write over each other."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_complete(folder: Path, recipe: Recipe) -> bool:
    try:
        if json.loads((folder / MARKER).read_text()) != asdict(recipe):
            return False
    except (OSError, ValueError):
        return False
    return all(
        sum(1 for _ in (folder / split).glob(f"{label}/*.jpg")) == recipe.count(split)
        for split in SPLITS
        for label in PHOTOGRAPHS
    )


def _refuse_foreign(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise PhotographsError(f"{folder} is a file, not a folder; give a folder as --data")
    if not folder.is_dir():
        return
    names = {entry.name for entry in folder.iterdir()}
    labels = {entry.name for split in SPLITS for entry in (folder / split).glob("*")}
    strangers = sorted((names - {MARKER, *SPLITS}) | (labels - set(PHOTOGRAPHS)))
    if strangers:
        raise PhotographsError(
            f"{folder} holds {strangers[0]!r}, which this example did not write; "
            "give a folder that is empty or not there yet as --data"
        )


def _write(folder: Path, recipe: Recipe, on_crop: Callable[[], None] | None) -> None:
    # Pillow works without the GIL, so threads use every core here.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for label, file in PHOTOGRAPHS.items():
            photograph = Image.open(_packaged(file)).convert("RGB")
            jobs = []
            for split in SPLITS:
                (folder / split / label).mkdir(parents=True)
                for index in range(recipe.count(split)):
                    path = folder / split / label / f"{index:04}.jpg"
                    jobs.append(pool.submit(_write_crop, path, photograph, split, recipe))
            for job in jobs:
                job.result()
                if on_crop is not None:
                    on_crop()
    (folder / MARKER).write_text(json.dumps(asdict(recipe)))


def _packaged(file: str) -> Path:
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        name = {"skimage": "scikit-image", "sklearn": "scikit-learn"}[package]
        raise PhotographsError(f"{name} is not installed; run: pip install {name}")
    path = Path(spec.origin).parent / rest
    if not path.is_file():
        raise PhotographsError(f"{path} is missing; this release of {package} does not carry it")
    return path


def _write_crop(path: Path, photograph: Image.Image, split: str, recipe: Recipe) -> None:
    draw = random.Random(f"{split}/{path.parent.name}/{path.name}")
    cell_px = photograph.height // GRID_ROWS
    cells = [
        (column, row)
        for row in range(GRID_ROWS)
        for column in range(photograph.width // cell_px)
        if ((column + 2 * row) % 4 == 1) == (split == "held_out")
    ]
    column, row = draw.choice(cells)
    window_px = draw.randint(cell_px * 6 // 10, cell_px)
    left = column * cell_px + draw.randint(0, cell_px - window_px)
    top = row * cell_px + draw.randint(0, cell_px - window_px)
    # Cropped first: a resize of a box in the whole picture would also read pixels around the box.
    crop = photograph.crop((left, top, left + window_px, top + window_px))
    crop = crop.resize((recipe.side_px, recipe.side_px), Image.Resampling.BICUBIC)
    crop.save(path, quality=recipe.quality)
