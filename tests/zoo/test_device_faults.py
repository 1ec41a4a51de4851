# SPDX-License-Identifier: Apache-2.0
"""Faults between a loader's batches and a device: full and lost devices, late copies, writes to
either end of a copy, a device other than the last one.

The device is the simulated GPU of tests/simgpu.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
import simgpu
import torch
import torch.nn.functional as F
from device_process import on_simgpu
from device_styles import BATCH, SAMPLES, Convolutions, Images, prepared_image
from offload_training import with_own_code
from torch import nn

import penstock
from penstock.tuning.load_meter import TrainerClock

pytestmark = pytest.mark.slow
DEVICE = "simgpu:0"
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def losses(
    step: Step,
    way: str,
    *,
    epochs: int = 2,
    make_model: Callable[[], nn.Module] = Convolutions,
    moves: str = "",
    **options: Any,
) -> list[float]:
    """A training in which `step` moves the batch to the device. With the maximal cut the calls of
    these names, separated by spaces, have to move."""
    torch.manual_seed(3)
    model = with_own_code(make_model()).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if way == "torch":
        loader: Any = torch.utils.data.DataLoader(Images(), batch_size=BATCH, num_workers=2)
    else:
        loader = penstock.DataLoader(Images(), batch_size=BATCH, num_workers=2, **options)
        penstock.offload(model, loader, cut=way)  # type: ignore[arg-type]
    found = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = step(model, images, labels)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert len(found) == epochs * SAMPLES // BATCH
    if way == "maximal" and moves:
        assert loader.plan is not None
        names = {call.partition(" at ")[0] for call in loader.plan.moved_calls}
        assert set(moves.split()) <= names, (names, loader.plan.refused)
    return found


def moved(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    images = images.to(DEVICE, non_blocking=True).float() * 0.01
    return F.cross_entropy(model(images), labels.to(DEVICE, non_blocking=True))


def prepared(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(prepared_image(images).to(DEVICE)), labels.to(DEVICE))


def written_at_once(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The host's memory is written to as soon as torch's copy would have read it."""
    on_device = images.to(DEVICE)
    images.zero_()
    return F.cross_entropy(model(on_device.float() * 0.01), labels.to(DEVICE))


def written_on_device(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first = images.to(DEVICE)
    first.fill_(7)
    second = images.to(DEVICE)
    return F.cross_entropy(model((first + second).float() * 0.01), labels.to(DEVICE))


def written_before(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    images[:, 0] = 3
    return F.cross_entropy(model(images.to(DEVICE).float() * 0.01), labels.to(DEVICE))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("cut", ["auto", "maximal", "none"])
@pytest.mark.parametrize(
    "step", [moved, prepared, written_at_once, written_on_device, written_before]
)
@on_simgpu
def test_writes_to_either_side_of_a_copy_match_torch(step: Step, cut: str) -> None:
    simgpu.set_copy_delay(0.01)
    try:
        assert losses(step, cut) == losses(step, "torch")
    finally:
        simgpu.set_copy_delay(0.002)


@pytest.mark.parametrize("cut", ["auto", "maximal"])
@on_simgpu
def test_held_copies_match_torch(cut: str) -> None:
    with simgpu.held_copies():
        ours = losses(moved, cut)
    assert ours == losses(moved, "torch")


@on_simgpu
def test_program_copies_are_made_ahead_once() -> None:
    def by_epoch(way: str, epochs: int) -> list[tuple[int, int]]:
        """The bytes to the device of each epoch but the first and last, and its late copies."""
        begun: list[tuple[int, int]] = []
        steps = 0

        def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            if steps % (SAMPLES // BATCH) == 0:
                begun.append((simgpu.counts().bytes_in, simgpu.counts().late_copies))
            steps += 1
            return moved(model, images, labels)

        losses(step, way, epochs=epochs)
        return [
            (after[0] - before[0], after[1] - before[1])
            for before, after in itertools.pairwise(begun[1:])
        ]

    plain = min(bytes_in for bytes_in, _ in by_epoch("torch", 3))
    # Planning copies, too, in a later epoch where the machine is busy, and so do batches that
    # arrived before the program's ways were known. The thread that copies waits for none. A longer
    # training follows where none of the first epochs was without such copies.
    assert any(
        late > SAMPLES // BATCH // 2 and bytes_in < 1.2 * plain
        for epochs in (8, 40)
        for bytes_in, late in by_epoch("auto", epochs)
    )


@on_simgpu
def test_training_works_without_memory_for_copies_ahead() -> None:
    expected = losses(moved, "torch")
    simgpu.empty_cache()
    # Room for the model and one batch, but not for the batches that arrive meanwhile.
    with simgpu.memory_limit(simgpu.memory_allocated() + (1 << 20)):
        assert losses(moved, "auto", prefetch_factor=4) == expected


@on_simgpu
def test_lost_device_raises_in_the_program() -> None:
    seen = 0

    def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen < 12:
            return moved(model, images, labels)
        with simgpu.lost_device(), pytest.raises(RuntimeError):
            moved(model, images, labels)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        losses(step, "auto")


@on_simgpu
def test_use_of_another_device_matches_torch() -> None:
    def other(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there = images.to("simgpu:1")
        assert there.device == torch.device("simgpu:1")
        return moved(model, there.cpu() + images, labels)

    for cut in ("auto", "maximal"):
        assert losses(other, cut) == losses(other, "torch")


@on_simgpu
def test_batches_kept_over_epochs_keep_their_values() -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keeping(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        there = images.to(DEVICE)
        kept.append((images, there))
        return F.cross_entropy(model(there.float() * 0.01), labels.to(DEVICE))

    ours = losses(keeping, "maximal")
    theirs = kept.copy()
    kept.clear()
    assert ours == losses(keeping, "torch")
    for (image, there), (expected, _) in zip(theirs, kept, strict=True):
        assert torch.equal(image, expected) and torch.equal(there.cpu(), expected)


class Dropping(Convolutions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x.float() * 0.01, 0.5))


@on_simgpu
def test_device_random_draws_match_torch() -> None:
    """Where a graph is compared with the forward, the device's generator is restored."""

    def draws(way: str) -> list[float]:
        torch.manual_seed(5)
        model = with_own_code(Dropping()).to(DEVICE)
        if way == "torch":
            loader: Any = torch.utils.data.DataLoader(Images(), batch_size=BATCH, num_workers=1)
        else:
            loader = penstock.DataLoader(Images(), batch_size=BATCH, num_workers=1)
            penstock.offload(model, loader, cut=way, verify_every=3)  # type: ignore[arg-type]
        return [
            F.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE)).item()
            for _ in range(2)
            for images, labels in loader
        ]

    expected = draws("torch")
    assert draws("maximal") == expected and draws("auto") == expected


class OnTwoDevices(Convolutions):
    """The features on one device, the head on the other."""

    def to(self, device: Any) -> OnTwoDevices:  # type: ignore[override]
        super().to(device)
        self.head.to("simgpu:1")
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x.float() * 0.01).to(self.conv.weight.device)
        features = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(features.to("simgpu:1"))


def spread(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images.to(DEVICE)), labels.to("simgpu:1"))


def spread_with_the_batch(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """The batch is sent to the device of the head too, and meets its copy there."""
    logits = model(images.to(DEVICE))
    brightness = images.to("simgpu:1").float().mean((1, 2, 3))
    return F.cross_entropy(logits * brightness[:, None] * 0.01, labels.to("simgpu:1"))


@pytest.mark.parametrize("cut", ["auto", "maximal"])
@pytest.mark.parametrize("step", [spread, spread_with_the_batch])
@on_simgpu
def test_model_on_two_devices_matches_torch(step: Step, cut: str) -> None:
    ours = losses(step, cut, make_model=OnTwoDevices, moves="_to_copy float mul")
    assert ours == losses(step, "torch", make_model=OnTwoDevices)


@pytest.mark.parametrize("cut", ["auto", "maximal"])
@on_simgpu
def test_model_moved_to_another_device_mid_epoch_matches_torch(
    cut: str,
) -> None:
    """Tensors that were planned and copied ahead for one device are wanted on the other."""

    def migrating() -> Step:
        seen = 0

        def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            nonlocal seen
            seen += 1
            device = DEVICE if seen <= 12 else "simgpu:1"
            if seen == 13:
                model.to(device)
            scaled = images.to(device, non_blocking=True).float() * 0.01
            return F.cross_entropy(model(scaled), labels.to(device, non_blocking=True))

        return step

    assert losses(migrating(), cut, moves="_to_copy mul") == losses(migrating(), "torch")


def on_a_stream_that_ends(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """One stream per step, which is not referenced once the copy was enqueued."""
    side = simgpu.Stream()
    with simgpu.stream(side):
        images, labels = (
            tensor.to(DEVICE, non_blocking=True).flip(0) for tensor in (images, labels)
        )
    simgpu.current_stream().wait_stream(side)
    del side
    return F.cross_entropy(model(images.float() * 0.01), labels)


@pytest.mark.parametrize("cut", ["auto", "maximal"])
@on_simgpu
def test_copies_survive_a_deleted_stream(cut: str) -> None:
    with simgpu.held_copies():
        ours = losses(on_a_stream_that_ends, cut, moves="_to_copy flip mul")
    assert ours == losses(on_a_stream_that_ends, "torch")


def changing_autocast() -> Step:
    """Around the batch's part and around the model: off, on, and of another type."""
    seen = 0

    def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        dtype = torch.bfloat16 if seen % 3 == 1 else torch.float16
        with torch.autocast("simgpu", dtype, enabled=seen % 3 != 0):
            halves = images.to(DEVICE).half() * 0.01
            bright = (halves + 1).log()  # which autocast computes in float32
        with torch.autocast("simgpu", dtype, enabled=seen % 4 < 2):
            return F.cross_entropy(model(bright.float()).float(), labels.to(DEVICE))

    return step


@pytest.mark.parametrize("cut", ["auto", "maximal"])
@on_simgpu
def test_changing_autocast_around_preparation_matches_torch(cut: str) -> None:
    ours = losses(changing_autocast(), cut, moves="_to_copy")
    assert ours == losses(changing_autocast(), "torch")


class Scaling(Convolutions):
    """Prepares its input itself, by a product that autocast computes in halves."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.matmul(x.float() / 255, torch.eye(20, device=x.device) * 0.7)
        return super().forward(x.float())


def under_changing_autocast() -> Step:
    seen = 0

    def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        dtype = torch.bfloat16 if seen % 5 < 3 else torch.float16
        with torch.autocast("simgpu", dtype, enabled=seen % 3 != 0):
            return F.cross_entropy(model(images.to(DEVICE)).float(), labels.to(DEVICE))

    return step


@pytest.mark.parametrize("cut", ["auto", "maximal"])
@on_simgpu
def test_changing_autocast_around_model_matches_torch(cut: str) -> None:
    ours = losses(under_changing_autocast(), cut, make_model=Scaling, moves="_to_copy float")
    assert ours == losses(under_changing_autocast(), "torch", make_model=Scaling)


def forking(found: list[int]) -> Step:
    """In mid-epoch a child is forked that reads the batch, and tries to move it to the device."""
    seen = 0

    def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen in (7, 15):
            expected = images.clone()
            pid = os.fork()
            if pid == 0:
                os._exit(outcome_in_child(images, expected))
            found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return moved(model, images, labels)

    return step


def outcome_in_child(images: torch.Tensor, expected: torch.Tensor) -> int:
    """Returns 0 if the batch is correct and the device is rejected as torch rejects it."""
    signal.alarm(60)  # a child that hangs ends by it
    try:
        if not torch.equal(images, expected):
            return 3
        images.to(DEVICE).cpu()
    except RuntimeError as error:
        return 0 if "fork" in str(error) else 4
    return 5


@pytest.mark.parametrize("cut", ["auto", "maximal", "none"])
@on_simgpu
def test_forked_child_is_denied_the_device_as_by_torch(cut: str) -> None:
    theirs: list[int] = []
    expected = losses(forking(theirs), "torch")
    assert theirs == [0, 0]
    ours: list[int] = []
    assert losses(forking(ours), cut, moves="_to_copy mul") == expected
    assert ours == theirs


NO_GPU = """
    import sys
    import torch
    import penstock

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            return torch.full((3,), float(index)), index % 2

    def train(way, device):
        torch.manual_seed(1)
        torch.set_num_threads(1)
        model = torch.nn.Linear(3, 2).to(device)
        if way == "torch":
            loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2)
        else:
            loader = penstock.DataLoader(Rows(), batch_size=4, num_workers=2, device=device)
            penstock.offload(model, loader, cut="maximal")
        losses = []
        for rows, labels in loader:
            output = model(rows.to(device) * 0.01)
            losses.append(torch.nn.functional.cross_entropy(output, labels.to(device)).item())
        return losses

    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert device == "cpu"
    assert train("penstock", device) == train("torch", device)

    def error_of(call):
        try:
            call()
        except Exception as error:
            return str(error)

    torchs = error_of(lambda: torch.zeros(1).to("cuda"))
    loader = penstock.DataLoader(Rows(), batch_size=4, num_workers=2, device="cuda")
    ours = error_of(lambda: next(iter(loader)))
    assert torchs in ours and "device='cuda'" in ours, (torchs, ours)
    print("as torch")
"""


def test_program_without_gpus_trains_on_cpu_or_raises_as_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NO_GPU)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "as torch\n", done.stderr


@on_simgpu
def test_device_clock_measures_asynchronous_copies() -> None:
    """Times were measured on the device only for CUDA devices."""
    source = torch.ones(8).pin_memory()
    clock = TrainerClock(torch.device("simgpu:0"))
    delay = 0.05
    simgpu.set_copy_delay(delay)
    try:
        clock.begin("copy")
        source.to("simgpu:0", non_blocking=True)
        clock.end()
        assert not clock.take()
        taken: list[tuple[str, float]] = []
        deadline = time.monotonic() + 60
        while not taken and time.monotonic() < deadline:
            taken = clock.take()
    finally:
        simgpu.set_copy_delay(0.002)
    [(label, seconds)] = taken
    assert label == "copy"
    assert seconds >= delay
