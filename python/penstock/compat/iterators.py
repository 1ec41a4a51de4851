# SPDX-License-Identifier: Apache-2.0
"""Access to torch's loader: its iterators, its workers' set-up, its errors and collation."""

from __future__ import annotations

from typing import Any

from penstock.compat.require import require

require(
    "iterators",
    (
        "torch._utils.ExceptionWrapper",
        "torch.multiprocessing._set_thread_name",
        "torch.utils.data._DatasetKind.Iterable",
        "torch.utils.data._DatasetKind.Map",
        "torch.utils.data._DatasetKind.create_fetcher",
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL",
        "torch.utils.data._utils.python_exit_status",
        "torch.utils.data._utils.collate.collate_float_fn",
        "torch.utils.data._utils.collate.collate_int_fn",
        "torch.utils.data._utils.collate.collate_numpy_array_fn",
        "torch.utils.data._utils.collate.collate_numpy_scalar_fn",
        "torch.utils.data._utils.collate.collate_str_fn",
        "torch.utils.data._utils.collate.collate_tensor_fn",
        "torch.utils.data._utils.collate.default_collate_fn_map",
        "torch.utils.data._utils.fetch._MapDatasetFetcher",
        "torch.utils.data._utils.pin_memory.pin_memory",
        "torch.utils.data._utils.signal_handling._error_if_any_worker_fails",
        "torch.utils.data._utils.signal_handling._remove_worker_pids",
        "torch.utils.data._utils.signal_handling._set_SIGCHLD_handler",
        "torch.utils.data._utils.signal_handling._set_worker_pids",
        "torch.utils.data._utils.signal_handling._set_worker_signal_handlers",
        "torch.utils.data._utils.worker.WorkerInfo",
        "torch.utils.data._utils.worker._generate_state",
        "torch.utils.data._utils.worker._worker_info",
        "torch.utils.data.dataloader._BaseDataLoaderIter._next_data",
        "torch.utils.data.dataloader._BaseDataLoaderIter._next_index",
        "torch.utils.data.dataloader._BaseDataLoaderIter._reset",
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "torch.utils.data.dataloader._SingleProcessDataLoaderIter",
    ),
    needed_by="penstock.DataLoader",
    without="torch.utils.data.DataLoader works without it.",
)

from torch._utils import ExceptionWrapper as ExceptionWrapper
from torch.multiprocessing import _set_thread_name
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data import _utils
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import signal_handling, worker
from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory
from torch.utils.data._utils.worker import WorkerInfo as WorkerInfo
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseIterator
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as MultiProcessingIterator
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as SingleProcessIterator

__all__ = [
    "SIGNAL_MODULE",
    "STATUS_INTERVAL_S",
    "BaseIterator",
    "DatasetKind",
    "ExceptionWrapper",
    "MapDatasetFetcher",
    "MultiProcessingIterator",
    "SingleProcessIterator",
    "WorkerInfo",
    "exit_status",
    "forget_worker_pids",
    "handle_child_deaths",
    "numpy_seed",
    "pin_memory",
    "raise_if_a_worker_failed",
    "set_thread_name",
    "set_worker_info",
    "set_worker_signal_handlers",
    "torch_collate",
    "watch_worker_pids",
    "worker_info",
]

# The module of torch's handler of SIGCHLD.
SIGNAL_MODULE: str = signal_handling.__name__
# Interval in seconds at which torch checks whether a process has ended.
STATUS_INTERVAL_S: float = _utils.MP_STATUS_CHECK_INTERVAL


def worker_info() -> WorkerInfo | None:
    """Return the result of `torch.utils.data.get_worker_info()` in this process."""
    return worker._worker_info


def set_worker_info(info: WorkerInfo | None) -> None:
    worker._worker_info = info


def numpy_seed(base_seed: int, worker_id: int) -> Any:
    """Return the words with which torch seeds NumPy's global generator in a worker."""
    return worker._generate_state(base_seed, worker_id)


def set_worker_signal_handlers() -> None:
    """Install torch's handlers for a worker's SIGBUS, SIGSEGV and SIGTERM."""
    signal_handling._set_worker_signal_handlers()


def set_thread_name(name: str) -> None:
    _set_thread_name(name)


def handle_child_deaths() -> None:
    """Make torch's handler of SIGCHLD raise for workers registered by `watch_worker_pids`."""
    signal_handling._set_SIGCHLD_handler()


def watch_worker_pids(key: int, pids: tuple[int, ...]) -> None:
    signal_handling._set_worker_pids(key, pids)


def forget_worker_pids(key: int) -> None:
    signal_handling._remove_worker_pids(key)


def raise_if_a_worker_failed() -> None:
    """Raise torch's RuntimeError if a watched worker failed."""
    signal_handling._error_if_any_worker_fails()


def exit_status() -> bool | None:
    """Return True while the interpreter exits, None after torch's modules are freed, else False."""
    return None if _utils is None else _utils.python_exit_status
