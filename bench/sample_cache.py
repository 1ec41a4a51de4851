# SPDX-License-Identifier: Apache-2.0
"""The rate of a second epoch from penstock.cached(), over that of data that lie decoded in memory.

Photographs are JPEG files, decoded by Pillow, cropped at random and mirrored in 2 workers. "files"
decodes them in each epoch; "memory" and "disk" read a cache that holds all of them; "decoded" has
the pixels in a tensor, which is what no cache can surpass. The kinds take turns, an epoch each.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from figures import Record, bench_parser, report, run_main, summary
from PIL import Image
from table import aligned, number
from torch.utils.data import Dataset

from penstock import DataLoader, cached

HEIGHT, WIDTH, CROP, BATCH = 256, 320, 224, 32


def photographs(count: int) -> list[bytes]:
    """Smooth random pictures with some noise, as JPEG files."""
    draws = np.random.default_rng(0)
    files = []
    for _ in range(count):
        coarse = Image.fromarray(draws.integers(0, 256, (8, 10, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(pixels + draws.integers(-12, 13, pixels.shape), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


class Decoded(Dataset[torch.Tensor]):
    fingerprint = "photographs of bench/sample_cache.py"

    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        pixels = np.array(Image.open(io.BytesIO(self.files[index])).convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1)


class InMemory(Dataset[torch.Tensor]):
    def __init__(self, pixels: list[torch.Tensor]) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.pixels[index]


class Augmented(Dataset[torch.Tensor]):
    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.images[index]
        top, left = (int(torch.randint(end - CROP + 1, ())) for end in image.shape[1:])
        image = image[:, top : top + CROP, left : left + CROP]
        image = image.flip(-1) if torch.rand(()) < 0.5 else image
        return image.contiguous().float().div_(255)


def rate(loader: Any) -> float:
    """Photographs in a second of one epoch, from the first batch on."""
    count, first_at = 0, 0.0
    for batch in loader:
        count += len(batch) if first_at else 0
        first_at = first_at or time.perf_counter()
    return count / (time.perf_counter() - first_at)


def measure(args: argparse.Namespace) -> Iterator[Record]:
    decoded = Decoded(photographs(args.photographs))
    pixels = [decoded[index] for index in range(len(decoded))]
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Any] = {
            "files": decoded,
            "memory": cached(decoded, memory="2GB"),
            "disk": cached(decoded, disk=(folder, "4GB")),
            "decoded": InMemory(pixels),
        }
        loaders = {
            kind: DataLoader(
                Augmented(data),
                BATCH,
                shuffle=True,
                num_workers=2,
                persistent_workers=True,
                overlap_epochs=False,  # or workers would make batches while others are measured
            )
            for kind, data in kinds.items()
        }
        for loader in loaders.values():
            rate(loader)  # the first epoch
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, loader in loaders.items():
                rates[kind].append(rate(loader))
        for kind, values in rates.items():
            yield summary("sample_cache/photographs_per_s", {"kind": kind}, values)
            pairs = zip(values, rates["decoded"], strict=True)
            ratios = [ours / limit for ours, limit in pairs]
            yield summary("sample_cache/ratio", {"kind": kind}, ratios)
        for kind in ("memory", "disk"):
            stats = kinds[kind].stats()
            hits = stats.hits + stats.disk_hits
            yield summary("sample_cache/hits", {"kind": kind}, [hits / args.rounds / len(decoded)])
        for loader in loaders.values():
            loader.close()


def table(everything: list[Record]) -> str:
    found = {(r["name"].rpartition("/")[2], r["parameters"]["kind"]): r for r in everything}
    rows = [["second epoch from", "photographs/s", "over decoded data", "10th to 90th", "hits"]]
    for kind in ("files", "disk", "memory", "decoded"):
        ratio = found["ratio", kind]
        hits = found.get(("hits", kind))
        rows.append(
            [
                kind,
                number(found["photographs_per_s", kind]["median"]),
                f"{ratio['median']:.3f}",
                f"{ratio['p10']:.3f} to {ratio['p90']:.3f}",
                "" if hits is None else f"{hits['median']:.3f}",
            ]
        )
    return aligned(rows)


def parse_arguments() -> argparse.Namespace:
    parser = bench_parser(__doc__)
    add = parser.add_argument
    add("--photographs", type=int, default=1024, help="number of photographs")
    add("--rounds", type=int, default=9, help="epochs of each kind")
    add("--quick", action="store_true", help="smoke test with few photographs")
    args = parser.parse_args()
    if args.quick:
        args.photographs, args.rounds = 96, 1
    return args


def main() -> int:
    everything = report("sample_cache", parse_arguments(), measure, table)
    return 1 if everything is None else 0


if __name__ == "__main__":
    run_main(main)
