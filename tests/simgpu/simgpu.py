# SPDX-License-Identifier: Apache-2.0
"""A second device for torch: the kernels are the CPU's, all else is as on a GPU. See README.md.

`register()` makes it known to torch, as `simgpu` with two devices and as the module `torch.simgpu`,
for the rest of the process: torch takes one such device, once, and asks it about pinned memory from
then on. So tests use it in separate processes (`device_process.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

NAME = "simgpu"


@dataclass(frozen=True)
class Counts:
    """The numbers of requests to the device."""

    kernels: int
    copies_in: int  # from the host
    bytes_in: int
    copies_out: int
    bytes_out: int
    late_copies: int  # of either kind, that did not wait


def register() -> None:
    """Makes the device known to torch, once."""
    if hasattr(torch, NAME):
        return
    from native_build import build_folder

    library = build_folder() / "tests" / "libsimgpu.so"
    if not library.exists():
        raise FileNotFoundError(
            f"{library} is missing; `sh .make/install.sh --with-tests` builds it"
        )
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(library))
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _controls() -> Any:
    return torch.ops.simgpu


# ---- Controls of the device


@contextlib.contextmanager
def held_copies() -> Iterator[None]:
    """Hold copies back until they are awaited: by an event, a stream or a later kernel."""
    _controls().set_held(True)
    try:
        yield
    finally:
        _controls().set_held(False)


def set_copy_delay(seconds: float) -> None:
    """Set the additional seconds of a copy that is not awaited (default: 0.002)."""
    _controls().set_copy_delay(round(seconds * 1e6))


@contextlib.contextmanager
def memory_limit(bytes_max: int, device: int = 0) -> Iterator[None]:
    """Limit the memory: allocations beyond it raise `torch.OutOfMemoryError`."""
    _controls().set_memory_limit(device, bytes_max)
    try:
        yield
    finally:
        _controls().set_memory_limit(device, 0)


@contextlib.contextmanager
def other_bits(*operators: str) -> Iterator[None]:
    """These operators ("div", "exp") give another last bit than the CPU's in every third number."""
    _controls().alter_operators([f"aten::{name}" for name in operators])
    try:
        yield
    finally:
        _controls().alter_operators([])


@contextlib.contextmanager
def lost_device() -> Iterator[None]:
    """Every call raises; copies under way never end."""
    _controls().set_lost(True)
    try:
        yield
    finally:
        _controls().set_lost(False)


@contextlib.contextmanager
def operators() -> Iterator[list[str]]:
    """A list that has, once the block is left, the operators that the device ran in it."""
    names: list[str] = []
    _controls().record_operators(True)
    try:
        yield names
    finally:
        _controls().record_operators(False)
        names += [name.removeprefix("aten::") for name in _controls().recorded_operators()]


def counts() -> Counts:
    return Counts(*_controls().counts())


def reset_counts() -> None:
    _controls().reset_counts()


def register_host(tensor: torch.Tensor) -> None:
    """Makes the memory of a tensor pinned, as cudaHostRegister does."""
    _controls().register_host(tensor.data_ptr(), tensor.untyped_storage().nbytes())


def unregister_host(tensor: torch.Tensor) -> None:
    _controls().unregister_host(tensor.data_ptr())


# ---- What torch asks of the module of a device


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(_controls().is_used())


def init() -> None:
    _controls().start()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(_controls().is_in_bad_fork())


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


class device:  # as torch.cuda has it
    """Within it, the device is the current one."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self.index)

    def __exit__(self, *error: object) -> None:
        set_device(self._before)


def get_device_name(device: Any = None) -> str:
    return f"simulated GPU {_index(device)}"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (9, 0)


def get_device_properties(device: Any = None) -> Any:
    raise RuntimeError("simgpu has no properties")


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **pack: Any) -> Stream:
        if pack:
            return super().__new__(cls, **pack)
        return super().__new__(cls, device=f"{NAME}:{_index(device)}", priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
    """A function, since `elapsed_time()` takes no subclasses."""
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: Any = None) -> torch.Stream:
    index = _index(device)
    return torch.Stream(stream_id=0, device_index=index, device_type=_DEVICE_TYPE)


_DEVICE_TYPE = 20  # PrivateUse1


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Within it, the stream is the current one of its device."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device_index)
    with device(stream.device_index):
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def manual_seed(seed: int) -> None:
    _controls().seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _controls().seed(index, seed)


def initial_seed() -> int:
    return int(_controls().seed_of(current_device()))


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    state: torch.Tensor = _controls().get_rng_state(_index(device))
    return state


def set_rng_state(new_state: torch.Tensor, device: Any = NAME) -> None:
    _controls().set_rng_state(_index(device), new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def memory_allocated(device: Any = None) -> int:
    return int(_controls().allocated_bytes(_index(device)))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()
