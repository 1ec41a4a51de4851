# SPDX-License-Identifier: Apache-2.0
"""The simulated GPU: programs train on it as on the CPU, and go wrong on it where a GPU's would."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import simgpu
import torch
import torch.nn.functional as F
from device_process import on_simgpu
from torch import nn

DEVICE = "simgpu"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 4)
    )


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 4, 32, dropout=0.5, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(20, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The CPU's fused attention has no twin on the device.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return self.head(self.encoder(x.view(8, 2, 20)).mean(1))


def convolutions() -> nn.Module:
    from torchvision.models import resnet18

    model: nn.Module = resnet18(num_classes=4)
    return nn.Sequential(nn.Linear(20, 3 * 32 * 32), nn.Unflatten(1, (3, 32, 32)), model)


def channels_last() -> nn.Module:
    return convolutions().to(memory_format=torch.channels_last)


def losses(
    make: Callable[[], nn.Module], optimize: Callable[..., Any], device: str, backend: str = ""
) -> list[float]:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = optimize(model.parameters())
    run = torch.compile(model, backend=backend) if backend else model
    torch.manual_seed(1)  # draws on the device follow from the seed alone
    seen = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 20 if make is not Encoder else 40, generator=generator)
        y = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(run(x.to(device, non_blocking=True)), y.to(device))
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "optimize", "backend"),
    [
        (layers, sgd, ""),
        (layers, adam, ""),
        (layers, fused_adam, ""),
        (Encoder, sgd, ""),
        (convolutions, sgd, ""),
        (channels_last, sgd, ""),
        (layers, sgd, "eager"),
        (layers, sgd, "aot_eager"),
    ],
)
@on_simgpu
def test_training_losses_match_the_cpu(make: Any, optimize: Any, backend: str) -> None:
    assert losses(make, optimize, DEVICE, backend) == losses(make, optimize, "cpu", backend)


@pytest.mark.slow
@on_simgpu
def test_autocast_and_grad_scaler_work() -> None:
    model = layers().to(DEVICE)
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler(DEVICE)
    with torch.autocast(DEVICE, torch.float16):
        result = model[0](torch.randn(8, 20, device=DEVICE))
        assert result.dtype is torch.float16
        assert F.softmax(result, 1).dtype is torch.float32
        loss = model[1:](result).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model[0].weight.grad.dtype is torch.float32


@on_simgpu
def test_writes_through_views_reach_the_tensor() -> None:
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    x[1:, ::2].mul_(10)
    x.t()[3] = 5
    torch.add(x[0], 1, out=(sums := torch.empty(0, device=DEVICE)))
    assert x.tolist() == [[0, 1, 2, 5], [40, 5, 60, 5], [80, 9, 100, 5]]
    assert sums.tolist() == [1, 2, 3, 6]
    assert x.as_strided((2,), (4,), 1).tolist() == [1, 5]


@on_simgpu
def test_unsynchronised_copy_gives_old_values() -> None:
    pinned = torch.ones(1000).pin_memory()
    side = simgpu.Stream()
    with simgpu.held_copies():
        with simgpu.stream(side):
            copied = torch.zeros(1000, device=DEVICE)
            side.synchronize()
            copied.copy_(pinned, non_blocking=True)
            copy_ended = side.record_event()
        assert copied.sum().item() == 0 and not copy_ended.query()
        simgpu.current_stream().wait_event(copy_ended)
        assert copied.sum().item() == 1000 and copy_ended.query()


@on_simgpu
def test_early_write_to_pinned_memory_changes_the_copy() -> None:
    pinned, pageable = torch.ones(1000).pin_memory(), torch.ones(1000)
    assert pinned.is_pinned() and not pageable.is_pinned()
    with simgpu.held_copies():
        from_pinned = pinned.to(DEVICE, non_blocking=True)
        from_pageable = pageable.to(DEVICE, non_blocking=True)
        pinned.fill_(7)
        pageable.fill_(7)
        assert from_pinned[0].item() == 7 and from_pageable[0].item() == 1
        assert pinned.fill_(1).to(DEVICE)[0].item() == 1


@on_simgpu
def test_unsynchronised_host_read_gives_old_values() -> None:
    pinned = torch.zeros(1000).pin_memory()
    with simgpu.held_copies():
        pinned.copy_(torch.ones(1000, device=DEVICE), non_blocking=True)
        assert pinned.sum() == 0
        simgpu.synchronize()
        assert pinned.sum() == 1000


@on_simgpu
def test_copies_complete_without_synchronisation() -> None:
    simgpu.set_copy_delay(0.01)
    try:
        copied = torch.ones(1000).pin_memory().to(DEVICE, non_blocking=True)
        ended = simgpu.current_stream().record_event()
        while not ended.query():
            pass
        assert copied.sum().item() == 1000
    finally:
        simgpu.set_copy_delay(0.002)


@on_simgpu
def test_pinned_memory_is_kept_until_copies_complete() -> None:
    pinned = torch.ones(54321).pin_memory()
    place = pinned.data_ptr()
    with simgpu.held_copies():
        copied = pinned.to(DEVICE, non_blocking=True)
        del pinned
        assert torch.empty(54321).pin_memory().data_ptr() != place
        assert copied.sum().item() == 54321
    # Of the two that are free now, either may be given first.
    again = [torch.empty(54321).pin_memory() for _ in range(2)]
    assert place in [tensor.data_ptr() for tensor in again]


@pytest.mark.parametrize("is_recorded", [False, True])
@on_simgpu
def test_memory_used_on_another_stream_needs_record_stream(is_recorded: bool) -> None:
    side, seen = simgpu.Stream(), torch.zeros(1000).pin_memory()
    with simgpu.held_copies():
        ones = torch.ones(1000, device=DEVICE)
        with simgpu.stream(side):
            seen.copy_(ones, non_blocking=True)
        if is_recorded:
            ones.record_stream(side)
        del ones
        twos = torch.full((1000,), 2.0, device=DEVICE)  # takes the memory
        side.synchronize()
        assert seen[0].item() == (1 if is_recorded else 2)
        assert twos[0].item() == 2


@on_simgpu
def test_registered_memory_is_pinned() -> None:
    memory = torch.ones(4096)
    simgpu.register_host(memory)
    assert memory.is_pinned() and memory[5:].is_pinned()
    simgpu.unregister_host(memory)
    assert not memory.is_pinned()


@on_simgpu
def test_memory_limit_raises_until_memory_is_freed() -> None:
    before = simgpu.memory_allocated()
    with simgpu.memory_limit(before + 100_000):
        kept = torch.empty(20_000, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="simgpu out of memory"):
            torch.empty(20_000, device=DEVICE)
        del kept
        torch.empty(20_000, device=DEVICE)
    assert simgpu.memory_allocated() == before


@on_simgpu
def test_lost_device_raises_in_every_call() -> None:
    x = torch.ones(3, device=DEVICE)
    event = simgpu.current_stream().record_event()
    with simgpu.lost_device():
        for call in [
            lambda: x + 1,
            lambda: torch.ones(3).to(DEVICE),
            lambda: x.cpu(),
            event.query,
            simgpu.synchronize,
            simgpu.Stream,
            lambda: torch.ones(3).pin_memory(),
        ]:
            with pytest.raises(RuntimeError, match="the device was lost"):
                call()
    assert x.sum().item() == 3


@on_simgpu
def test_altered_operators_differ_in_last_bits() -> None:
    x = torch.rand(900) + 1
    expected = x.exp()
    with simgpu.other_bits("exp", "mul"):
        result = x.to(DEVICE).exp().cpu()
        again = x.to(DEVICE).exp().cpu()
        product = x.to(DEVICE)
        product.mul_(2)
        assert torch.equal((x.to(DEVICE) + 1).cpu(), x + 1)
    differs = result != expected
    assert differs.sum() == 300 and torch.equal(result, again)
    assert (result.view(torch.int32) - expected.view(torch.int32)).abs().max() == 1
    assert (product.cpu() != x * 2).sum() == 300


@on_simgpu
def test_mixing_tensors_of_two_devices_raises() -> None:
    first, second = torch.ones(3, device=DEVICE), torch.ones(3, device=f"{DEVICE}:1")
    assert second.to(DEVICE).add(first).tolist() == [2, 2, 2]
    for other in (second, torch.ones(3)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            first + other
    assert (first + torch.tensor(1.0)).tolist() == [2, 2, 2]
    with simgpu.device(1):
        assert torch.ones(2, device=DEVICE).device.index == 1


@on_simgpu
def test_each_device_has_its_own_generator() -> None:
    torch.manual_seed(3)
    here = torch.rand(5)
    torch.manual_seed(3)
    there = torch.rand(5, device=DEVICE)
    assert torch.equal(here, there.cpu())
    assert torch.equal(torch.rand(5), here)  # the CPU's stayed where it was
    state = torch.simgpu.get_rng_state()
    drawn = F.dropout(torch.ones(50, device=DEVICE))
    torch.simgpu.set_rng_state(state)
    assert torch.equal(drawn, F.dropout(torch.ones(50, device=DEVICE)))


@on_simgpu
def test_host_read_of_device_memory_segfaults() -> None:
    place = torch.ones(3, device=DEVICE).data_ptr()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(place, 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@on_simgpu
def test_forked_child_cannot_use_the_device() -> None:
    held = torch.ones(3, device=DEVICE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.ones(3, device=DEVICE)
        except RuntimeError as error:
            code = 0 if "in forked subprocess" in str(error) else 2
        torch.manual_seed(1)  # as workers do
        del held
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert held.sum().item() == 3


@on_simgpu
def test_kernels_and_copies_are_counted() -> None:
    simgpu.reset_counts()
    with simgpu.operators() as names:
        x = torch.ones(256).pin_memory().to(DEVICE, non_blocking=True)
        (x.view(16, 16) + 1).exp_()
    assert names == ["add", "exp"]
    counts = simgpu.counts()
    assert (counts.kernels, counts.copies_in, counts.bytes_in) == (2, 1, 1024)
    assert (counts.copies_out, counts.late_copies) == (0, 1)
