# SPDX-License-Identifier: Apache-2.0
"""Prints a digest of an epoch's batches, and who made them; run by `make test-wheel`."""

from __future__ import annotations

import hashlib

import torch

from penstock import DataLoader


class Squares(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 16), float(index * index)) + torch.rand(3, 16), index


def main() -> None:
    torch.manual_seed(5)
    loader = DataLoader(Squares(), batch_size=8, shuffle=True, num_workers=2, seeding="batch")
    digest = hashlib.sha256()
    count = 0
    for squares, indices in loader:
        digest.update(squares.numpy().tobytes() + indices.numpy().tobytes())
        count += 1
    print(f"digest {digest.hexdigest()}")
    print(f"{count} batches, iterator {loader.stats().iterator}")


if __name__ == "__main__":
    main()
