# SPDX-License-Identifier: Apache-2.0
"""With device="auto" a loader copies ahead the tensors that the program copies to a device, and
everything else that a program does with a batch gives the same results as with torch.

The device is the simulated GPU of tests/simgpu.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import pickle
import queue
import threading
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import simgpu
import torch
from device_process import on_simgpu
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import penstock

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"
SAMPLES = 60
BATCH = 4
BATCHES = SAMPLES // BATCH
# Batches that are in flight when the program first copies one, and are not copied ahead: two
# workers with two each, and the batches that the trainer has taken.
LEARNT_AFTER = 6


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, 6, 6, generator=generator) * 1e3
        return {"image": image, "label": index % 4, "name": f"sample {index}"}


def loaders(**options: Any) -> tuple[Any, Any]:
    """Torch's, and penstock's with device="auto"."""
    options = {"batch_size": BATCH, "num_workers": 2, **options}
    dataset = options.pop("dataset", None) or Samples()
    expected = torch.utils.data.DataLoader(dataset, **options)
    return expected, penstock.DataLoader(dataset, device="auto", **options)


@contextlib.contextmanager
def ahead_copies() -> Iterator[list[int]]:
    """The number of copies that were started by others than the program, whose copies all wait for
    completion."""
    simgpu.reset_counts()
    count: list[int] = []
    yield count
    count.append(simgpu.counts().late_copies)


def expect_same(ours: Any, expected: Any) -> None:
    assert ours.dtype == expected.dtype and ours.device == expected.device
    assert ours.shape == expected.shape and ours.stride() == expected.stride()
    assert torch.equal(ours.cpu(), expected.cpu())


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def to_type(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("simgpu", torch.float16)


def by_device_method(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.simgpu()  # type: ignore[attr-defined, no-any-return]


def to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE, memory_format=torch.channels_last)


def to_another(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.empty(0, device=DEVICE, dtype=torch.float64))


def pinned_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory().to(DEVICE)


def detached_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(DEVICE)


def into_a_buffer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=DEVICE).copy_(tensor)


def on_a_side_stream(tensor: torch.Tensor) -> torch.Tensor:
    side = simgpu.Stream()
    with simgpu.stream(side):
        there = tensor.to(DEVICE)
    simgpu.current_stream().wait_stream(side)
    there.record_stream(simgpu.current_stream())
    return there


COPIES = [
    to_device,
    to_type,
    by_device_method,
    to_channels_last,
    to_another,
    pinned_first,
    detached_first,
    into_a_buffer,
    on_a_side_stream,
]


@pytest.mark.parametrize("copied", COPIES, ids=lambda copied: copied.__name__)
@pytest.mark.parametrize("pin_memory", [False, True])
@on_simgpu
def test_copied_tensors_are_copied_ahead(
    copied: Callable[[torch.Tensor], torch.Tensor], pin_memory: bool
) -> None:
    expected, ours = loaders(pin_memory=pin_memory)
    with ahead_copies() as count:
        for batch, plain in zip(ours, expected, strict=True):
            there = copied(batch["image"])
            assert type(there) is torch.Tensor
            expect_same(there, copied(plain["image"]))
    assert BATCHES - LEARNT_AFTER <= count[0] <= BATCHES


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return (Samples()[index] for index in range(info.id, SAMPLES, info.num_workers))


def in_a_thread(loader: Any) -> Iterator[Any]:
    """Batches that another thread takes from the loader, as prefetchers do."""
    taken: queue.Queue[Any] = queue.Queue(2)

    def take() -> None:
        for batch in loader:
            taken.put(batch)
        taken.put(None)

    thread = threading.Thread(target=take)
    thread.start()
    yield from iter(taken.get, None)
    thread.join()


SOURCES: dict[str, tuple[dict[str, Any], Callable[[Any], Iterator[Any]]]] = {
    "stream": ({"dataset": Stream()}, iter),
    "stream out of order": ({"dataset": Stream(), "in_order": False}, iter),
    "out of order": ({"in_order": False}, iter),
    "persistent workers": (
        {"persistent_workers": True},
        lambda loader: itertools.chain(loader, loader),
    ),
    "thread": ({}, in_a_thread),
}


@pytest.mark.parametrize("source", SOURCES)
@on_simgpu
def test_copies_ahead_work_for_every_batch_source(source: str) -> None:
    options, read = SOURCES[source]
    _, ours = loaders(**options)
    batch_count = 0
    with ahead_copies() as count:
        for batch in read(ours):
            batch_count += 1
            there = batch["image"].to(DEVICE)
            indices = [int(name.removeprefix("sample ")) for name in batch["name"]]
            expect_same(there.cpu(), torch.stack([Samples()[i]["image"] for i in indices]))
    assert batch_count in (BATCHES, BATCHES + 1, 2 * BATCHES)
    assert count[0] >= batch_count - LEARNT_AFTER - 2  # which the thread has taken


@on_simgpu
def test_tensors_are_copied_only_once() -> None:
    expected, ours = loaders()
    simgpu.reset_counts()
    for batch in expected:
        batch["image"].to(DEVICE), batch["label"].to(DEVICE)
    plain_bytes = simgpu.counts().bytes_in
    simgpu.reset_counts()
    for batch in ours:
        batch["image"].to(DEVICE), batch["label"].to(DEVICE)
    assert simgpu.counts().bytes_in == plain_bytes


@on_simgpu
def test_out_of_range_casts_match_torch() -> None:
    expected, ours = loaders()
    for batch, plain in zip(ours, expected, strict=True):
        for form in ({}, {"non_blocking": True}):
            expect_same(
                batch["image"].to(DEVICE, torch.uint8, **form),
                plain["image"].to(DEVICE, torch.uint8, **form),
            )


@on_simgpu
def test_offload_with_nothing_to_move_makes_few_lazy_batches() -> None:
    """Each operator that is held back costs the trainer's CPU time, which a GPU waits for."""
    ours = penstock.DataLoader(Samples(), batch_size=BATCH, num_workers=2)
    model = penstock.offload(torch.nn.Linear(6, 2).to(DEVICE), ours, cut="none")
    held_back = []
    with ahead_copies() as count:
        for _ in range(6):
            for batch in ours:
                there = batch["image"].to(DEVICE, non_blocking=True)
                held_back.append(type(there) is not torch.Tensor)
                model(there).sum().backward()
    assert any(held_back[:BATCHES])
    assert held_back[BATCHES * 4 :].count(True) <= 2 * BATCHES // 16 + 2
    # The program's copies are still made ahead.
    assert count[0] >= 5 * BATCHES


@on_simgpu
def test_second_copies_and_writes_match_torch() -> None:
    expected, ours = loaders()
    for batch, plain in zip(ours, expected, strict=True):
        for images in (batch["image"], plain["image"]):
            images.to(DEVICE).fill_(7)
        expect_same(batch["image"].to(DEVICE), plain["image"].to(DEVICE))
        for images in (batch["image"], plain["image"]):
            images[:, 0] = 3
        expect_same(batch["image"].to(DEVICE), plain["image"].to(DEVICE))
        for labels in (batch["label"], plain["label"]):
            labels.numpy()[0] = 9
        expect_same(batch["label"].to(DEVICE), plain["label"].to(DEVICE))


@on_simgpu
def test_batch_written_before_its_copy_is_not_copied_ahead() -> None:
    _, ours = loaders()
    with ahead_copies() as count:
        for batch in ours:
            batch["image"].mul_(2).to(DEVICE)
    assert count == [0]


@on_simgpu
def test_tensors_read_but_never_copied_become_plain() -> None:
    _, ours = loaders()
    kinds = []
    for _ in range(2):
        for batch in ours:
            batch["image"].sum()
            kinds.append((type(batch["image"]), type(batch["label"])))
            batch["label"].sum(), batch["label"].to(DEVICE)
    assert all(issubclass(kind, torch.Tensor) for pair in kinds for kind in pair)
    # The images are read and never copied; the labels are both.
    assert kinds[-1][0] is torch.Tensor and kinds[-1][1] is not torch.Tensor


def printed(tensor: torch.Tensor) -> Any:
    return repr(tensor), str(tensor), f"{tensor.flatten()[0]:.3f}"


def saved(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"x": tensor}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    assert type(loaded) is torch.Tensor
    return loaded


def unpickled(tensor: torch.Tensor) -> Any:
    return pickle.loads(pickle.dumps(tensor))


def as_parameter(tensor: torch.Tensor) -> Any:
    parameter = torch.nn.Parameter(tensor)
    assert isinstance(parameter, torch.nn.Parameter)
    (parameter * 2).sum().backward()
    return parameter.grad


def moved_with_gradient(tensor: torch.Tensor) -> Any:
    tensor.requires_grad_()
    there = tensor.to(DEVICE)
    (there * 3).sum().backward()
    return tensor.grad


def through_dlpack(tensor: torch.Tensor) -> Any:
    return torch.from_dlpack(tensor)


def through_array_interface(tensor: torch.Tensor) -> Any:
    return torch.as_tensor(np.asarray(tensor))


class Boxes(torch.Tensor):
    """A class of the program."""


def as_subclass_of_program(tensor: torch.Tensor) -> Any:
    boxes = tensor.as_subclass(Boxes)
    assert type(boxes + 1) is Boxes
    boxes.fill_(3)
    return tensor.clone()


def compiled(tensor: torch.Tensor) -> Any:
    return torch.compile(lambda x: (x * 2).sum(0), backend="eager")(tensor)


USES: list[Callable[[torch.Tensor], Any]] = [
    printed,
    saved,
    unpickled,
    as_parameter,
    moved_with_gradient,
    through_dlpack,
    through_array_interface,
    as_subclass_of_program,
    compiled,
    copy.copy,
    copy.deepcopy,
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: (x.clone(), x.cpu(), x.half(), x.data, x.detach()),
    lambda x: (x.is_pinned(), x.storage_offset(), x.is_contiguous(), x.element_size(), len(x)),
    lambda x: x.view(-1),
    lambda x: x[0, 1].item() if x[0, 1].dim() == 0 else x[:, 1:],
    lambda x: [part.contiguous() for part in x.chunk(2)],
    lambda x: torch.stack([x, x]),
    lambda x: x.untyped_storage().nbytes(),
    lambda x: isinstance(x, torch.Tensor) and torch.is_tensor(x),
    lambda x: torch.tensor(x.tolist()) + torch.as_tensor(x),
    lambda x: default_collate([x, x]),
    lambda x: torch.nn.functional.conv2d(x, torch.ones(2, 3, 3, 3)),
    lambda x: (x.new_zeros(2), torch.zeros_like(x), torch.empty_like(x).shape),
    lambda x: [row.sum() for row in x],
    lambda x: np.array(x.numpy()).sum(),
]


def flat(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride(), str(value.device), value.tolist())
    if isinstance(value, np.ndarray):
        return (value.dtype, value.shape, value.tolist())
    if isinstance(value, (list, tuple)):
        return [flat(item) for item in value]
    return value


@on_simgpu
def test_other_uses_of_batch_tensors_match_torch() -> None:
    expected, ours = loaders(num_workers=1)
    for use in USES:
        batch, plain = next(iter(ours)), next(iter(expected))
        assert type(batch["image"]) is not torch.Tensor  # it is followed
        assert flat(use(batch["image"])) == flat(use(plain["image"])), use
        # It works as before for later callers.
        expect_same(batch["image"].detach().to(DEVICE), plain["image"].detach().to(DEVICE))


class Pair(NamedTuple):
    image: Any
    more: Any


@dataclass
class Record:
    image: Any
    label: Any


class Opaque:
    """A batch of a class of the program, in which the loader finds no tensors."""

    def __init__(self, image: Any) -> None:
        self.image = image


def nested(samples: list[Any]) -> Any:
    batch = default_collate(samples)
    image, label = batch["image"], batch["label"]
    return [
        Pair(image, {"again": image, "label": [label, None, "text"]}),
        OrderedDict(label=label * 2),
        UserDict({"x": image * 2}),
        Record(image + 1, (label + 1,)),
        Opaque(image + 2),
        torch.zeros(0, 3),
    ]


def moved(value: Any, device: str) -> Any:
    """As frameworks move batches."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, (dict, UserDict)):
        return type(value)({key: moved(item, device) for key, item in value.items()})
    if isinstance(value, Record):
        return Record(moved(value.image, device), moved(value.label, device))
    return Opaque(moved(value.image, device)) if isinstance(value, Opaque) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, (dict, UserDict)):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return tensors_in(list(vars(value).values())) if hasattr(value, "__dict__") else []


@on_simgpu
def test_unusual_batch_containers_move_as_with_torch() -> None:
    expected, ours = loaders(collate_fn=nested)
    with ahead_copies() as count:
        for batch, plain in zip(ours, expected, strict=True):
            assert type(batch[3]) is Record and type(batch[2]) is UserDict
            there, theirs = tensors_in(moved(batch, DEVICE)), tensors_in(moved(plain, DEVICE))
            assert len(there) == len(theirs) == 9
            for one, other in zip(there, theirs, strict=True):
                expect_same(one, other)
    # The image is in the batch twice, and the loader does not find tensors inside the program's
    # object.
    assert 5 * (BATCHES - LEARNT_AFTER) <= count[0] <= 6 * BATCHES


@on_simgpu
def test_kept_batches_keep_values_but_no_device_memory() -> None:
    expected, ours = loaders()
    epochs = 12
    plain = [batch for _ in range(epochs) for batch in expected]
    before = simgpu.memory_allocated()
    kept = []
    for epoch in range(epochs):
        for batch in ours:
            if epoch == 0:  # from the second one on the copies are not used
                batch["image"].to(DEVICE)
            kept.append(batch)
    copy_bytes = 4096
    assert plain[0]["image"].nbytes < copy_bytes
    # The batches in flight, for workers start with the next epoch.
    assert simgpu.memory_allocated() - before <= 8 * copy_bytes
    for batch, theirs in zip(kept, plain, strict=True):
        expect_same(batch["image"].detach(), theirs["image"])
        expect_same(batch["image"].to(DEVICE), theirs["image"].to(DEVICE))


@pytest.mark.parametrize("when", ["never", "later"])
@on_simgpu
def test_device_option_can_be_assigned(when: str) -> None:
    options = {"batch_size": BATCH, "num_workers": 1, "persistent_workers": True}
    loader = penstock.DataLoader(Samples(), device=None if when == "later" else "auto", **options)
    first = next(iter(loader))
    loader.device = "auto" if when == "later" else None
    second = next(iter(loader))
    followed, plain = (second, first) if when == "later" else (first, second)
    assert type(plain["image"]) is torch.Tensor and type(followed["image"]) is not torch.Tensor
    assert torch.equal(plain["image"], followed["image"])


@on_simgpu
def test_in_process_batches_are_plain() -> None:
    expected, ours = loaders(num_workers=0)
    for batch, plain in zip(ours, expected, strict=True):
        assert type(batch["image"]) is torch.Tensor
        expect_same(batch["image"].to(DEVICE), plain["image"].to(DEVICE))


@on_simgpu
def test_changing_the_target_device_gives_right_values() -> None:
    expected, ours = loaders()
    for step, (batch, plain) in enumerate(zip(ours, expected, strict=True)):
        device = f"simgpu:{step // 4 % 2}"
        expect_same(batch["image"].to(device), plain["image"].to(device))


@on_simgpu
def test_full_or_lost_device_raises_in_the_program() -> None:
    _, ours = loaders()
    batches = iter(ours)
    for _ in range(8):
        next(batches)["image"].to(DEVICE)
    simgpu.empty_cache()
    with simgpu.memory_limit(1):
        batch = next(batches)
        with pytest.raises(torch.OutOfMemoryError):
            for _ in range(3):
                batch["image"].to(DEVICE)
    with simgpu.lost_device(), pytest.raises(RuntimeError):
        for _ in range(3):
            next(batches)["image"].to(DEVICE)


def test_program_without_a_device_gets_plain_tensors() -> None:
    loader = penstock.DataLoader(Samples(), batch_size=BATCH, num_workers=1, device="auto")
    assert all(type(batch["image"]) is torch.Tensor for batch in loader)


def test_device_auto_rejects_datapipes() -> None:
    from torch.utils.data.datapipes.iter import IterableWrapper

    with pytest.raises(ValueError, match="device must be None for a datapipe, .*, got 'auto'"):
        penstock.DataLoader(IterableWrapper([1, 2]), device="auto")
