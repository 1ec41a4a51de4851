# SPDX-License-Identifier: Apache-2.0
"""device=: batches on a device equal the results of ``batch.to(device)`` in every case.

Each test runs on a GPU if there is one, and has a CPU counterpart, where batches stay on the CPU.
Memory ownership while copies are in flight is tested without a GPU in tests/cpp/loader.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections import UserDict, UserList, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from penstock import DataLoader, offload
from penstock.loader.device import move_batch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


class Nested(Dataset[Any]):
    """Samples of every kind in a loop with images and labels."""

    def __init__(self, length: int = 60, failing: int = -1) -> None:
        self.length, self.failing = length, failing

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.failing:
            raise KeyError(index)
        generator = torch.Generator().manual_seed(index)
        return {
            "image": torch.randint(0, 256, (3, 24, 32), dtype=torch.uint8, generator=generator),
            "half": torch.randn(5, generator=generator).half(),
            "wide": torch.randn(7, 2, generator=generator, dtype=torch.float64).t(),
            "label": index,
            "none": torch.empty(0, 4),
            "name": f"sample {index}",
        }


def expect_same(batch: Any, expected: Any, device: str) -> None:
    assert batch.keys() == expected.keys()
    assert batch["name"] == expected["name"]
    for key in batch.keys() - {"name"}:
        assert batch[key].device.type == device
        moved = expected[key].to(device)
        assert batch[key].dtype == moved.dtype and batch[key].stride() == moved.stride()
        assert torch.equal(batch[key], moved)


def expected_batches(**options: Any) -> list[Any]:
    return list(torch.utils.data.DataLoader(Nested(), batch_size=4, **options))


@on_each_device
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("bound", [None, 1, 20_000])
def test_batches_equal_those_moved_to_the_device(
    device: str, workers: int, bound: int | None
) -> None:
    options = {} if workers == 0 else {"prefetch_bytes": bound}
    loader = DataLoader(Nested(), batch_size=4, num_workers=workers, device=device, **options)
    expected = expected_batches()
    for _ in range(2):
        batches = list(loader)  # all of them kept
        assert len(batches) == len(expected)
        for batch, other in zip(batches, expected, strict=True):
            expect_same(batch, other, device)


@on_each_device
def test_pin_memory_works_with_a_device(device: str) -> None:
    loader = DataLoader(Nested(), batch_size=4, num_workers=1, device=device, pin_memory=True)
    expect_same(next(iter(loader)), expected_batches()[0], device)


@on_each_device
def test_batches_outlive_iterators_dropped_mid_epoch(device: str) -> None:
    loader = DataLoader(Nested(), batch_size=4, num_workers=2, prefetch_factor=4, device=device)
    for taken_count in range(5):
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(taken_count)]
        del iterator
        gc.collect()
        for batch, other in zip(batches, expected_batches(), strict=False):
            expect_same(batch, other, device)


@on_each_device
def test_exception_takes_the_place_of_its_batch(device: str) -> None:
    loader = DataLoader(Nested(failing=9), batch_size=4, num_workers=2, device=device)
    iterator = iter(loader)
    expected = expected_batches()
    for index in range(15):
        if index == 2:
            with pytest.raises(KeyError):
                next(iterator)
            continue
        expect_same(next(iterator), expected[index], device)


@on_each_device
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_child_dropping_the_iterator_has_no_effect(device: str) -> None:
    loader = DataLoader(Nested(), batch_size=4, num_workers=2, device=device)
    iterator = iter(loader)
    expected = expected_batches()
    for index in range(15):
        if index in (3, 4):
            child = os.fork()
            if child == 0:
                del iterator
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        expect_same(next(iterator), expected[index], device)


@on_each_device
def test_lookahead_sees_the_coming_batches(device: str) -> None:
    loader = DataLoader(Nested(), batch_size=4, num_workers=2, prefetch_factor=4, device=device)
    expected = expected_batches()
    for index, batch in enumerate(loader):
        coming = loader.lookahead(2, lambda ahead: ahead["image"].clone())
        for place, image in enumerate(coming, index + 1):
            assert torch.equal(image.cpu(), expected[place]["image"])
        expect_same(batch, expected[index], device)


class Normalized(nn.Module):
    """Preprocessing inside the model, on images as they are stored."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, 0.25, 0.125]).view(3, 1, 1))
        self.conv = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = (image.float() / 256 - self.mean) * 4
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def losses_of(model: nn.Module, loader: Any, device: str, has_autocast: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=has_autocast):
            logits = model(batch["image"].to(device))
        loss = nn.functional.cross_entropy(logits.float(), batch["label"].to(device) % 4)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long("aot_eager-False-cpu", "None-True-cpu", "aot_eager-True-cpu")
@on_each_device
@pytest.mark.parametrize("has_autocast", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_training_with_a_cut_matches_torch(
    device: str, has_autocast: bool, backend: str | None
) -> None:
    """Scales are powers of two, so that CPU and GPU kernels of the preprocessing agree bit for bit.

    Others may differ in the last bit: workers compute on the CPU where the GPU did.
    """
    losses = []
    for is_ours in (False, True):
        torch.manual_seed(3)
        model: Any = Normalized().to(device)
        if backend is not None:
            model = torch.compile(model, backend=backend)
        loader: Any = torch.utils.data.DataLoader(Nested(), batch_size=4, num_workers=1)
        if is_ours:
            loader = DataLoader(Nested(), batch_size=4, num_workers=1, device=device)
            model = offload(model, loader, cut="maximal")
        losses.append(losses_of(model, loader, device, has_autocast))
    assert losses[0] == losses[1]


@pytest.mark.cuda
def test_cuda_graphs_can_be_captured_while_loading() -> None:
    """In torch's default mode a capture forbids other threads' queries; batches were wrong.

    Its CPU counterparts are the tests of tests/cpp/loader/copy_stage_test.cpp.
    """
    loader = DataLoader(Nested(400), batch_size=4, num_workers=2, prefetch_factor=4, device="cuda")
    expected = torch.utils.data.DataLoader(Nested(400), batch_size=4)
    source = torch.ones(1 << 16, device="cuda")
    for batch, other in zip(loader, expected, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = source
            for _ in range(100):
                doubled = doubled * 1.0
        graph.replay()
        expect_same(batch, other, "cuda")
        assert torch.equal(doubled, source)


@contextlib.contextmanager
def memory_full() -> Iterator[None]:
    """This process gets no more memory of the device. Other processes do not notice."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
def test_device_out_of_memory_is_reported_and_the_epoch_continues() -> None:
    """Its CPU counterpart is MemoryThatNeverComesIsAnErrorInPlaceOfTheBatchAlone."""
    rows = torch.zeros(40, 1 << 22)
    loader = DataLoader(rows, batch_size=4, num_workers=1, device="cuda")  # 64 MiB each
    iterator = iter(loader)
    kept = [next(iterator)]
    message = "bytes hold batches that were copied"
    with memory_full(), pytest.raises(torch.OutOfMemoryError, match=message):
        for _ in range(8):
            kept.append(next(iterator))
    kept.clear()
    assert next(iterator).shape == (4, 1 << 22)


PINNED = """
import torch
from penstock import DataLoader

loader = {loader_class}(torch.ones(8, 2), batch_size=4, num_workers=1, pin_memory=True)
print([batch.is_pinned() for batch in loader])
"""


@pytest.mark.cuda
@pytest.mark.parametrize("loader_class", ["DataLoader", "torch.utils.data.DataLoader"])
def test_batches_are_pinned_before_the_device_is_initialised(loader_class: str) -> None:
    """Torch reports no memory as pinned before it has initialised the device."""
    program = PINNED.format(loader_class=loader_class)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[True, True]\n"), done.stderr


class Frozen(Mapping[str, Any]):
    """A Mapping without update()."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class OfKeywords(Frozen):
    """A Mapping that cannot be constructed from a dict."""

    def __init__(self, *, items: dict[str, Any]) -> None:
        super().__init__(items)


class Row(Sequence[Any]):
    """A Sequence without item assignment."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, place: Any) -> Any:
        return self.items[place]

    def __len__(self) -> int:
        return len(self.items)


class Encoding(UserDict[str, Any]):
    """Like transformers' BatchEncoding: a mapping with further attributes, moved by its to()
    method."""

    is_moved = False

    def to(self, device: Any) -> Any:
        moved = Encoding({key: value.to(device) for key, value in self.items()})
        moved.is_moved = True
        return moved


Pair = namedtuple("Pair", "first second")
TENSOR = torch.zeros(2)
ODD = [
    Frozen({"a": TENSOR}),
    OfKeywords(items={"a": TENSOR}),
    MappingProxyType({"a": TENSOR}),
    UserDict({"a": TENSOR}),
    Row([TENSOR, 1]),
    UserList([TENSOR]),
    Pair(TENSOR, (TENSOR, "text")),
    range(3),
    {"a": [b"bytes", None, 2.5]},
]


@pytest.mark.parametrize("batch", ODD, ids=lambda batch: type(batch).__name__)
def test_containers_are_moved_as_torch_pins_them(batch: Any) -> None:
    """The user saw an AttributeError or a TypeError from inside the loader."""
    from torch.utils.data._utils.pin_memory import pin_memory

    class Pinned:
        device = torch.device("meta")

        def pin_memory(self) -> Any:
            return TENSOR.to("meta")

    def kinds(value: Any) -> Any:
        if isinstance(value, Mapping):
            return type(value), {key: kinds(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return type(value), [kinds(item) for item in value]
        return type(value), getattr(value, "device", value)

    def with_pinned(value: Any) -> Any:
        if value is TENSOR:
            return Pinned()
        if isinstance(value, OfKeywords):
            return OfKeywords(items={key: with_pinned(item) for key, item in value.items()})
        if isinstance(value, Mapping):
            return type(value)({key: with_pinned(item) for key, item in value.items()})
        if isinstance(value, Pair):
            return Pair(*map(with_pinned, value))
        if isinstance(value, range):
            return value
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return type(value)([with_pinned(item) for item in value])  # type: ignore[call-arg]
        return value

    expected = pin_memory(with_pinned(batch))
    assert kinds(move_batch(batch, torch.device("meta"))) == kinds(expected)


def test_object_with_a_to_method_is_moved_by_it() -> None:
    moved = move_batch([Encoding({"a": TENSOR})], torch.device("meta"))[0]
    assert type(moved) is Encoding and moved.is_moved and moved["a"].device.type == "meta"


@pytest.mark.parametrize("batch", [*ODD, Encoding({"a": TENSOR})], ids=lambda b: type(b).__name__)
def test_cpu_device_returns_the_batch_unchanged(batch: Any) -> None:
    loader = DataLoader([batch], batch_size=None, collate_fn=lambda one: one, device="cpu")
    assert next(iter(loader)) is batch
