# SPDX-License-Identifier: Apache-2.0
"""Runs tests in a process that has the simulated GPU.

Torch takes one device of its kind a process, for good, and asks it about pinned memory from then
on, so the process that runs the other tests must not have it. Each pytest process keeps one child
for the tests of this device. A child that dies, as by an access to the device's memory, fails its
test and is replaced.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

SECONDS_MAX = 120.0
_F = TypeVar("_F", bound=Callable[..., Any])
_child: list[ProcessPoolExecutor] = []


def run_on_simgpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function of a module's, called in the child. Its errors are raised here."""
    if not _child:
        _child.append(
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)
        )
    done = _child[0].submit(_call, *_place_of(function), args, kwargs)
    try:
        return done.result(SECONDS_MAX)
    except (TimeoutError, BrokenProcessPool):
        for process in list(_child[0]._processes.values()):
            process.kill()
        _child.pop().shutdown(wait=False)
        raise


def run_on_new_simgpu(
    function: Callable[..., Any], *args: Any, seconds_max: float = SECONDS_MAX
) -> Any:
    """Run the function in a new child, which has no earlier measurements, and end the child."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=_begin) as child:
        done = child.submit(_call, *_place_of(function), args, {})
        return done.result(seconds_max)


def on_simgpu(test: _F) -> _F:
    """Make a test run in the child; its arguments must be picklable."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> Any:
        return run_on_simgpu(test, *args, **kwargs)

    return run  # type: ignore[return-value]


def _begin() -> None:
    import simgpu
    import torch

    # The default in a child is the method that started it, spawn; the test process has fork.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    simgpu.register()
    _add_bits(simgpu.NAME)


def _add_bits(device: str) -> None:
    """Make results here equal wherever they are on a GPU. Division is the CPU's, unchanged."""
    from penstock import _C

    for table in _C.device_bits_tables():
        text = table.replace("\ndevice cuda\n", f"\ndevice {device}\n")
        assert text != table
        _C.add_device_bits(text.replace("\nreciprocal ", "\nequal "))


def _place_of(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the folder, too: a test may have removed it from sys.path, where pytest put it."""
    folder = Path(sys.modules[function.__module__].__file__ or "").parent
    return str(folder), function.__module__, function.__qualname__


def _call(folder: str, module: str, name: str, args: Any, kwargs: Any) -> Any:
    import torch

    if folder not in sys.path:
        sys.path.insert(0, folder)
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    torch.manual_seed(20260)
    try:
        return getattr(function, "__wrapped__", function)(*args, **kwargs)
    except Exception as error:
        # An error that cannot be unpickled would leave the parent waiting.
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise
