# SPDX-License-Identifier: Apache-2.0
"""Settings of the process that change the meaning of operators. Workers have the defaults.

Autocast is another matter: its casts are operators of their own once a graph is written down, so
workers need not know of it. Its settings are part of a graph's meaning.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from penstock.graph.sizes import Unlowerable
from penstock.seams.devices import accelerator_type
from penstock.seams.operators import is_under_transform


class AutocastState(NamedTuple):
    """Autocast's settings now, on the CPU and on the process's other devices."""

    cpu: torch.dtype | None  # None: it is off
    device: torch.dtype | None

    @classmethod
    def now(cls) -> AutocastState:
        return cls(_autocast_dtype("cpu"), _autocast_dtype(device_type()))

    @property
    def enabled(self) -> list[tuple[str, torch.dtype]]:
        """The types of devices for which it is on, and the dtypes that it casts to."""
        pairs = (("cpu", self.cpu), (device_type(), self.device))
        return [(device, dtype) for device, dtype in pairs if dtype is not None]


def _autocast_dtype(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


class autocast_put_back:  # noqa: N801 - used as a function
    """Leaves autocast as it was, also when an error leaves a region of a graph in the middle.

    No generator of contextlib's: that writes to the error's ``__traceback__``, which the classes of
    some errors refuse.
    """

    def __enter__(self) -> None:
        self._enabled = [
            (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
            for d in ("cpu", device_type())
        ]
        self._depth = _autocast_depth()
        self._is_cached = torch.is_autocast_cache_enabled()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        while _autocast_depth() > self._depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for device, is_enabled, dtype in self._enabled:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._is_cached)


def device_type() -> str:
    """The type of the process's devices beside the CPU: "cuda" where it has none."""
    return accelerator_type() or "cuda"


def _autocast_depth() -> int:
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def refuse_by_surroundings() -> None:
    """Raises Unlowerable where the meaning of operators depends on more than their arguments."""
    if torch.get_default_dtype() is not torch.float32:
        raise Unlowerable(f"the default dtype is {torch.get_default_dtype()}, not torch.float32")
    if is_under_transform():
        raise Unlowerable("forward runs under a torch.func transform")
