# SPDX-License-Identifier: Apache-2.0
"""A dataset that holds a list of 1.4 million names and labels, as image folders do: 200 MB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from workloads.workload import Workload, fetch_samples


class Names(Dataset[int]):
    """Reads a name and a label without computing a result from them."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        name, label = self.samples[index]
        return len(name) + label


def build(folder: Path) -> dict[str, Any]:
    count = 20_000 if folder.name.endswith("-quick") else 1_400_000
    samples = [(f"photographs/{index:09d}.jpg", index % 1000) for index in range(count)]
    return {"dataset": Names(samples), "batch_size": 256, "shuffle": True}


WORKLOAD = Workload("object_list", build, fetch_samples, work_is="reading the list, 2 processes")
