# SPDX-License-Identifier: Apache-2.0
"""Process settings, other than the dataset, that affect a dataset's results: settings of torch and
numpy, the working folder, environment variables and a few settings of libraries.

A job carries the trainer's settings. A worker applies them while it makes the job's batches, and
restores its own before another job. Below them is the set-up of the processes that make the batches
of a pool's jobs, for any parent process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import platform
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock._version import __version__
from penstock.compat.iterators import torch_collate
from penstock.pool.pool_status import format_numerics
from penstock.secret_names import looks_secret

logger = logging.getLogger(__name__)

# Variables that belong to a process, its launcher or its host, and therefore not to a job.
_PROCESS_VARIABLES = re.compile(
    r"(PENSTOCK|TORCHELASTIC|TORCHINDUCTOR|TRITON|SLURM|OMPI|PMI|PMIX|MPI|RAY|NCCL|GLOO|CUDA|NVIDIA"
    r"|KUBERNETES|OMP|MKL|KMP|GOMP|LD|PYTHON|PYTEST|COVERAGE|COV|XDG|SSH|LC|GPG|DBUS|TERM|VSCODE"
    r"|JPY|IPY|WANDB|MLFLOW)_.*"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|WORLD_NAME|NAME)|MASTER_(ADDR|PORT)|PATH|HOME|USER"
    r"|LOGNAME|SHELL|PWD|OLDPWD|TMPDIR|TEMP|TMP|HOSTNAME|DISPLAY|LINES|COLUMNS|SHLVL|TERM|_"
    r"|PYTHONPATH|PYTHONHASHSEED|PYTHONUNBUFFERED|VIRTUAL_ENV|ATEN_CPU_CAPABILITY"
)
_ENVIRONMENT_BYTES_MAX = 128 << 10  # a job's header has 1 MiB

# Settings that programs make at their start, by module and name, with the library's default values.
_LIBRARY_DEFAULTS: Mapping[tuple[str, str], Any] = {
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES"): False,
    ("PIL.Image", "MAX_IMAGE_PIXELS"): int(1024 * 1024 * 1024 // 4 // 3),
    ("torchvision", "_image_backend"): "PIL",
}

# The settings of torch that affect results, and their types in a job.
_KINDS_OF_TORCH: Mapping[str, type] = {
    "default_dtype": str,
    "flushes_denormals": bool,
    "deterministic": bool,
    "deterministic_warns": bool,
    "mkldnn": bool,
    "float32_matmul": str,
    "matmul_precision": str,
    "conv_precision": str,
}


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings as a job carries them. The default has no effect."""

    torch: dict[str, Any] = field(default_factory=dict)
    numpy_errors: dict[str, str] = field(default_factory=dict)
    folder: str | None = None
    # Variables changed by the program since its process started; None for a removed one.
    environment: dict[str, str | None] = field(default_factory=dict)
    libraries: dict[str, Any] = field(default_factory=dict)  # by "module:name"

    @staticmethod
    def here() -> JobSettings:
        """Return the current settings of this process."""
        return JobSettings(
            torch=_torch_settings(),
            numpy_errors={name: str(how) for name, how in np.geterr().items()},
            folder=_folder(),
            environment=_changed_environment(),
            libraries={
                f"{module}:{name}": value
                for (module, name), value in _library_values().items()
                if value != _LIBRARY_DEFAULTS[module, name]
            },
        )

    @staticmethod
    def of_fields(fields: Any) -> JobSettings:
        """Return the settings in a job's header. Raise TypeError for any other value."""
        made = JobSettings(**fields)
        is_right = (
            type(made.torch) is dict
            and all(_KINDS_OF_TORCH.get(name) is type(value) for name, value in made.torch.items())
            and _is_text_by_text(made.numpy_errors)
            and (made.folder is None or type(made.folder) is str)
            and type(made.environment) is dict
            and all(value is None or type(value) is str for value in made.environment.values())
            and type(made.libraries) is dict
        )
        if not is_right:
            raise TypeError("a setting of the process has the wrong type")
        return made

    def apply(self) -> None:
        """Apply the settings to this process. Skip a folder or a library that this host does not
        have."""
        _apply_to_torch(self.torch)
        if self.numpy_errors:
            np.seterr(**self.numpy_errors)  # type: ignore[arg-type]
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.folder)
        _set_environment(self.environment)
        for place, value in self.libraries.items():
            module, _, name = place.partition(":")
            if (module, name) in _LIBRARY_DEFAULTS:
                with contextlib.suppress(ImportError):
                    setattr(importlib.import_module(module), name, value)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """All such settings of this process at one time, for restoring them."""

    torch: dict[str, Any]
    thread_count: int
    has_gradients: bool
    numpy_errors: dict[str, str]
    folder: str | None
    environment: dict[str, str]
    libraries: dict[tuple[str, str], Any]

    @staticmethod
    def now() -> ProcessState:
        return ProcessState(
            torch=_torch_settings(),
            thread_count=torch.get_num_threads(),
            has_gradients=torch.is_grad_enabled(),
            numpy_errors={name: str(how) for name, how in np.geterr().items()},
            folder=_folder(),
            environment=dict(os.environ),
            libraries=_library_values(),
        )

    def restore(self) -> None:
        _apply_to_torch(self.torch)
        if torch.get_num_threads() != self.thread_count:
            torch.set_num_threads(self.thread_count)
        torch.set_grad_enabled(self.has_gradients)
        np.seterr(**self.numpy_errors)  # type: ignore[arg-type]
        if self.folder is not None:
            with contextlib.suppress(OSError):  # it may have been removed
                os.chdir(self.folder)
        gone: dict[str, str | None] = {
            name: None for name in os.environ if name not in self.environment
        }
        _set_environment({**gone, **self.environment})
        for (module, name), value in _library_values().items():
            before = self.libraries.get((module, name), _LIBRARY_DEFAULTS[module, name])
            if value != before:
                setattr(sys.modules[module], name, before)


def _torch_settings() -> dict[str, Any]:
    mkldnn: Any = torch.backends.mkldnn
    denormal = np.float32(1e-40)  # torch has no query for this flag of the current thread's CPU
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "flushes_denormals": bool(denormal * np.float32(1) == 0),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn": bool(mkldnn.enabled),
        "float32_matmul": _float32_matmul(),
        "matmul_precision": str(mkldnn.matmul.fp32_precision),
        "conv_precision": str(mkldnn.conv.fp32_precision),
    }


def _float32_matmul() -> str:
    """Return the precision by torch's older setting, which also sets each backend's precision.
    Return "" if the program has set a backend's precision separately, so that torch raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _apply_to_torch(settings: Mapping[str, Any]) -> None:
    """Apply settings that differ from the current ones."""
    now = _torch_settings()
    if settings.get("float32_matmul", "") not in ("", now["float32_matmul"]):
        torch.set_float32_matmul_precision(settings["float32_matmul"])
        now = _torch_settings()
    changed = {name: value for name, value in settings.items() if value != now[name]}
    mkldnn: Any = torch.backends.mkldnn
    if "default_dtype" in changed:
        torch.set_default_dtype(getattr(torch, settings["default_dtype"]))
    if "flushes_denormals" in changed:
        torch.set_flush_denormal(settings["flushes_denormals"])
    if changed.keys() & {"deterministic", "deterministic_warns"}:
        warns = settings["deterministic_warns"]
        torch.use_deterministic_algorithms(settings["deterministic"], warn_only=warns)
    if "mkldnn" in changed:
        mkldnn.enabled = settings["mkldnn"]
    if "matmul_precision" in changed:
        mkldnn.matmul.fp32_precision = settings["matmul_precision"]
    if "conv_precision" in changed:
        mkldnn.conv.fp32_precision = settings["conv_precision"]


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _library_values() -> dict[tuple[str, str], Any]:
    """Return the settings of the imported libraries."""
    return {
        (module, name): getattr(sys.modules[module], name)
        for module, name in _LIBRARY_DEFAULTS
        if hasattr(sys.modules.get(module), name)
    }


def _set_environment(values: Mapping[str, str | None]) -> None:
    zone = os.environ.get("TZ")
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value
    if os.environ.get("TZ") != zone:
        time.tzset()


def _changed_environment() -> dict[str, str | None]:
    """Return the variables changed since this process started, except variables of the process and
    its launcher, and variables that look like secrets."""
    before = _first_environment()
    if before is None:
        return {}
    changed: dict[str, str | None] = {}
    byte_count = 0
    for name in sorted(before.keys() | os.environ.keys()):
        value = os.environ.get(name)
        if value == before.get(name) or _PROCESS_VARIABLES.fullmatch(name) or looks_secret(name):
            continue
        byte_count += len(name) + len(value or "")
        if byte_count > _ENVIRONMENT_BYTES_MAX:
            logger.warning(
                "penstock: the program has changed environment variables of more than %s bytes; "
                "those from %s on are not sent to a pool's workers",
                _ENVIRONMENT_BYTES_MAX,
                name,
            )
            break
        changed[name] = value
    return changed


@functools.cache
def _first_environment() -> dict[str, str] | None:
    """Return the environment that this process was started with; None if it is not available."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in entries if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _is_text_by_text(value: Any) -> bool:
    return type(value) is dict and all(type(item) is str for pair in value.items() for item in pair)


def warm_up_libraries() -> None:
    """Call functions that import or build something at their first call, so that this is done
    before a job, and before a fork."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    torch_collate.default_collate([(torch.zeros(2), np.zeros(2), 0, 0.0, "")] * 2)
    ProcessState.now()


def ignore_end_signals() -> None:
    """Make SIGTERM and SIGINT have no effect here: the end of this process is requested in another
    way. They have a handler and are not ignored, because programs that a dataset starts would
    inherit ignored signals.

    Call this after `worker_process.set_up_process`, since torch installs a SIGTERM handler, and
    again if a job's modules may have replaced these handlers.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not _do_nothing:
            signal.signal(number, _do_nothing)


def _do_nothing(*_: object) -> None:
    pass


def about_worker(pid: int) -> str:
    """Describe a worker for people by its process and the versions that it makes batches with."""
    return (
        f"{socket.gethostname()}, process {pid}, penstock {__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {format_numerics()}"
    )
