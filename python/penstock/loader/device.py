# SPDX-License-Identifier: Apache-2.0
"""The loader's ``device=`` option:
resolve its device, and move a batch that no device stage has moved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, TypeGuard

import torch

from penstock.errors import UnsupportedError

AUTO = "auto"  # batches stay on the host; parts that the program copies are copied ahead


def gpu_uuid(device: torch.device | str | int | None) -> str:
    """Return the NVIDIA GPU of ``device``, or else of torch's current device, as `nvidia-smi -L`
    shows it. Return "" if there is none, or if this process does not use CUDA yet: CUDA is not
    initialised for it."""
    if torch.version.cuda is None or not torch.cuda.is_initialized():
        return ""
    wanted = staged_device(device)
    if wanted is not None and wanted.type != "cuda":
        return ""
    index = torch.cuda.current_device() if wanted is None else wanted.index
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def is_auto(device: torch.device | str | int | None) -> bool:
    return isinstance(device, str) and device == AUTO


def names_device(
    device: torch.device | str | int | None,
) -> TypeGuard[torch.device | str | int]:
    """Return whether the option names a device for the batches, including the CPU."""
    return device is not None and not is_auto(device)


def has_device() -> bool:
    """Return whether torch finds a device in addition to the CPU. Does not initialise CUDA."""
    return torch.accelerator.is_available()


def staged_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return the device that batches are moved to, with its index, or None if they stay (None,
    "auto" or the CPU).

    Raises UnsupportedError when torch has no such device here, or when it cannot be used. Does not
    initialise CUDA, since workers may be forked later.
    """
    if device is None or is_auto(device):
        return None
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return None
    if wanted.type == "cuda":
        return _cuda(device, wanted)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != wanted.type:
        there = "no device" if accelerator is None else f"{accelerator.type} devices"
        raise UnsupportedError(
            f"device={device!r} is not available: torch finds {there} besides the CPU; pass an "
            f"available device, or device=None"
        )
    if wanted.index is None:
        return torch.device(wanted.type, torch.accelerator.current_device_index())
    return _counted(device, wanted, torch.accelerator.device_count())


def _cuda(device: torch.device | str | int, wanted: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device={device!r} is not available: torch finds no CUDA device ({_cuda_error()}); "
            f"pass device=None, or use a machine with a CUDA device"
        )
    if wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return _counted(device, wanted, torch.cuda.device_count())


def _counted(
    device: torch.device | str | int, wanted: torch.device, device_count: int
) -> torch.device:
    if wanted.index >= device_count:
        kind = wanted.type
        there = f"only {kind}:0" if device_count == 1 else f"{kind}:0 to {kind}:{device_count - 1}"
        raise UnsupportedError(
            f"device={device!r} is not available: torch finds {there}; pass an available device, "
            f"or device=None"
        )
    return wanted


def _cuda_error() -> str:
    """Return torch's reason: a driver that is missing or too old, a build without CUDA."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as err:
        return str(err).partition("\n")[0]
    return "its device count is 0"


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``.

    Containers keep their types as with torch's ``pin_memory``: one that supports neither
    ``update()`` and ``batch[i] = x`` nor construction from a dict or a list becomes a dict or a
    list. An object that has a ``to()`` method is moved by it. Other objects, and with the CPU the
    whole batch, are returned unchanged.
    """
    return batch if device.type == "cpu" else _move(batch, device)


def _move(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (str, bytes)):
        return batch
    if callable(to := getattr(batch, "to", None)):
        return to(device)
    if isinstance(batch, Mapping):
        return _as_mapping(batch, {key: _move(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_move(item, device) for item in batch))
    if isinstance(batch, tuple):
        return type(batch)(_move(item, device) for item in batch)
    if isinstance(batch, Sequence):
        return _as_sequence(batch, [_move(item, device) for item in batch])
    return batch


def _as_mapping(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return moved
    try:
        if not isinstance(batch, MutableMapping):
            return type(batch)(moved)  # type: ignore[call-arg]
        clone = copy.copy(batch)
        clone.update(moved)
        return clone
    except TypeError:
        return moved


def _as_sequence(batch: Sequence[Any], moved: list[Any]) -> Any:
    if type(batch) is list:
        return moved
    try:
        if not isinstance(batch, MutableSequence):
            return type(batch)(moved)  # type: ignore[call-arg]
        clone = copy.copy(batch)
        for place, item in enumerate(moved):
            clone[place] = item
        return clone
    except TypeError:
        return moved
