# SPDX-License-Identifier: Apache-2.0
"""Access to devices of whatever type: which one is current, and its streams."""

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
    """``device`` with its number: the current one where it has none."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return torch.empty(0, device=device).device


def accelerator_type() -> str | None:
    """The type of this process's devices beside the CPU, or None."""
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else accelerator.type


def module_in_use() -> Any:
    """The module of this process's devices beside the CPU, `torch.cuda` say, once the process works
    with them; None before, and without. Initialises none."""
    kind = accelerator_type()
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    is_initialized = getattr(module, "is_initialized", None)
    return module if is_initialized is None or is_initialized() else None


def is_capturing(device: torch.device) -> bool:
    """Whether the calling thread's current stream of ``device`` is being captured into a graph."""
    module = torch.get_device_module(device.type)
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which the calling thread works on ``device``; None for a device without."""
    if accelerator_type() != device.type:
        return None
    return torch.accelerator.current_stream(device)


@contextlib.contextmanager
def on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """Work that is started here runs on ``stream``, and the calling thread's current stream of
    that device waits for it."""
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
