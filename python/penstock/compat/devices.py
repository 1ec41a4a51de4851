# SPDX-License-Identifier: Apache-2.0
"""Access to devices of all types: the current device, and its streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from penstock.compat.require import require

require(
    "devices",
    (
        "torch.accelerator.current_accelerator",
        "torch.accelerator.current_device_index",
        "torch.accelerator.current_stream",
        "torch.accelerator.set_stream",
        "torch.Stream.wait_event",
        "torch.Stream.record_event",
    ),
    needed_by="penstock.offload",
    without="penstock.DataLoader works without it.",
)


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` with its index; if it has none, with the current one."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.empty(0, device=device).device


def accelerator_type() -> str | None:
    """Return the type of this process's devices other than the CPU, or None."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def module_in_use() -> Any:
    """Return the module of this process's devices, such as `torch.cuda`, once they are in use.

    Return None before, and without devices other than the CPU. Initialises no device.
    """
    kind = accelerator_type()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is None or is_initialized() else None


def is_capturing(device: torch.device) -> bool:
    """Return whether the calling thread's current stream of ``device`` is captured into a graph."""
    module = torch.get_device_module(device.type)
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the calling thread's current stream of ``device``; None if it has no streams."""
    if accelerator_type() != device.type:
        return None
    return torch.accelerator.current_stream(device)


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Run work that is started here on ``stream``.

    At the end, the calling thread's current stream of that device waits for it.
    """
    current = None if stream is None else torch.accelerator.current_stream(stream.device)
    if stream is None or current is None or current == stream:
        yield
        return
    index = torch.accelerator.current_device_index()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(current)
        torch.accelerator.set_device_index(index)
    current.wait_event(stream.record_event())
