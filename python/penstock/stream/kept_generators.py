# SPDX-License-Identifier: Apache-2.0
"""Running a model's code once more than the program does, without a trace in its later draws."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from penstock.seams.devices import module_in_use
from penstock.stream.batch_seeds import GeneratorsKept


class AllGeneratorsKept(GeneratorsKept):
    """Puts the global generators back as they were: those of torch, also on its devices, of Python
    and of NumPy."""

    def __enter__(self) -> None:
        super().__enter__()
        self._of_devices = device_states()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.put_back()

    def put_back(self) -> None:
        """Puts them back as they were when the block began; may be called after its end."""
        super().__exit__(None, None, None)
        if self._of_devices:
            module = module_in_use()
            assert module is not None
            module.set_rng_state_all(self._of_devices)


def torch_states() -> list[torch.Tensor]:
    """The states of torch's generators, those of its devices included."""
    return [torch.get_rng_state(), *device_states()]


def device_states() -> list[Any]:
    module = module_in_use()
    return [] if module is None else list(module.get_rng_state_all())
