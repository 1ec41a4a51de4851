# SPDX-License-Identifier: Apache-2.0
"""Samples that are copied into their batch one by one: when, and that it is not observable."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from sample_datasets import Computed
from stream_oracle import describe, error_text, without_frames
from torch.utils.data import Dataset, Subset
from torch.utils.data.dataloader import DataLoader as TorchDataLoader

from penstock import DataLoader

SIDE = 128  # float32: 64 KiB a sample


def image(index: int) -> torch.Tensor:
    return torch.full((SIDE, SIDE), float(index)) + torch.arange(float(SIDE))


class Watching(Dataset[Any]):
    """Returns with each sample how many of the samples before it still live in this process."""

    def __init__(self, make: Any = image) -> None:
        self._make = make
        self._seen: list[weakref.ref[torch.Tensor]] = []

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        gc.collect()
        alive = sum(seen() is not None for seen in self._seen)
        made = self._make(index)
        self._seen.append(weakref.ref(made))
        return made, alive


def count_living_samples(loader: DataLoader[Any]) -> list[int]:
    """For each sample, in order, how many earlier ones lived."""
    return [int(count) for _, alive in loader for count in alive]


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("is_subset", [False, True])
def test_worker_holds_only_one_large_sample_of_a_batch(seeding: Any, is_subset: bool) -> None:
    dataset: Any = Watching()
    if is_subset:
        dataset = Subset(Subset(dataset, range(64)), range(64))
    alive = count_living_samples(DataLoader(dataset, batch_size=8, num_workers=1, seeding=seeding))
    # A batch without a free slab is collated as torch does; the trainer drops them immediately.
    moved = [batch for batch in range(8) if max(alive[8 * batch : 8 * batch + 8]) == 0]
    assert len(moved) >= 4, alive


def test_referenced_samples_are_not_moved() -> None:
    kept = [image(index) for index in range(64)]
    alive = count_living_samples(
        DataLoader(Watching(kept.__getitem__), batch_size=8, num_workers=1)
    )
    assert alive[-1] == 63


class Reusing(Dataset[Any]):
    """Returns the same memory for every sample, so that all rows of a batch equal the last one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._memory = torch.empty(SIDE, SIDE)
        self._array = np.empty((SIDE, SIDE), np.float32)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._kind == "numpy":
            self._array[:] = index
            return torch.from_numpy(self._array)
        self._memory.fill_(index)
        if self._kind == "view":
            return self._memory.view(-1)
        return self._memory if self._kind == "tensor" else self._memory.detach()


def turned(index: int) -> torch.Tensor:
    return torch.stack([image(index), image(index + 1)]).permute(1, 2, 0)


def twice(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    same = image(index)
    return same, same


def nested(index: int) -> dict[str, Any]:
    parts = [image(index), {"deep": (image(-index).to(torch.bfloat16), index)}]
    return {"parts": parts, "text": f"sample {index}", "array": image(index).numpy()}


def keys_in_alternating_order(index: int) -> dict[str, torch.Tensor]:
    sample = {"a": image(index), "b": image(-index)}
    return sample if index % 3 else dict(reversed(sample.items()))


def held_now_and_then(index: int) -> torch.Tensor:
    made = image(index)
    if index % 5 == 0:
        _HELD.append(made)
    return made


_HELD: list[torch.Tensor] = []

DATASETS = {
    "image": Computed(24, image),
    "turned": Computed(24, turned),
    "crop": Computed(24, lambda index: turned(index)[3:, ::2]),
    "twice": Computed(24, twice),
    "nested": Computed(24, nested),
    "keys in turn": Computed(24, keys_in_alternating_order),
    "held now and then": Computed(24, held_now_and_then),
    "reused tensor": Reusing("tensor"),
    "reused view": Reusing("view"),
    "reused numpy": Reusing("numpy"),
    "reused detached": Reusing("detached"),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"seeding": "batch"}], ids=str)
def test_row_copied_batches_match_torch(name: str, options: dict[str, Any]) -> None:
    workers = {"batch_size": 5, "num_workers": 2}
    torch_options = {key: value for key, value in options.items() if key != "seeding"}
    streams = []
    for loader in (
        TorchDataLoader(DATASETS[name], **workers, **torch_options),  # type: ignore[arg-type]
        DataLoader(DATASETS[name], **workers, **options),  # type: ignore[arg-type]
    ):
        torch.manual_seed(3)
        streams.append([describe(batch) for _ in range(2) for batch in loader])
    assert streams[0] == streams[1]


def of_other_shape(index: int) -> torch.Tensor:
    return image(index) if index != 13 else image(index)[1:]


def of_other_type(index: int) -> torch.Tensor:
    return image(index) if index != 13 else image(index).double()


def failing(index: int) -> torch.Tensor:
    if index == 13:
        raise ValueError("sample 13 is broken")
    return image(index)


@pytest.mark.parametrize("make", [of_other_shape, of_other_type, failing])
def test_mismatched_sample_raises_as_with_torch(make: Any) -> None:
    outcomes: list[Any] = []
    for loader_class in (TorchDataLoader, DataLoader):
        iterator = iter(loader_class(Computed(24, make), batch_size=8, num_workers=1))
        assert torch.equal(next(iterator)[7], image(7))
        try:
            outcomes.append(describe(next(iterator)))
        except Exception as error:
            outcomes.append(error_text(without_frames(error)))
    assert outcomes[0] == outcomes[1]


def test_kept_batches_are_not_overwritten() -> None:
    kept = list(DataLoader(Computed(64, image), batch_size=4, num_workers=2))
    for place, batch in enumerate(kept):
        assert torch.equal(batch, torch.stack([image(4 * place + row) for row in range(4)]))
