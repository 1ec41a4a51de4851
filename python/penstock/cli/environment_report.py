# SPDX-License-Identifier: Apache-2.0
"""What a report of a fault needs: facts about penstock, torch, this machine and its limits.

It is made where something is broken, so each fact that cannot be had is replaced by the reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from penstock._native import native_parts
from penstock._packages_on_path import packages_on_path
from penstock._version import TORCH_MINORS, __version__
from penstock.cli.machine_facts import machine_facts
from penstock.secret_names import looks_secret

# By section and name, the lines of the value.
Report = dict[str, dict[str, list[str]]]

# Versions of other packages of which a fault may depend.
_PACKAGES = (
    "numpy", "cloudpickle", "torchvision", "torchdata", "lightning", "accelerate", "transformers",
    "datasets", "ray", "pyarrow",
)  # fmt: skip
# Beside PENSTOCK_*: what changes how processes find their code, their CPUs and each other.
_VARIABLES = re.compile(
    r"PENSTOCK_\w+|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|(OMP|MKL)_NUM_THREADS|LD_(PRELOAD|LIBRARY_PATH)"
    r"|PYTHON(PATH|HOME|SAFEPATH)|TMPDIR|RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|TORCH_LOGS|ZMQ_\w+"
    r"|SLURM_JOB_ID|KUBERNETES_SERVICE_HOST"
)
_KEY_FOLDER = "PENSTOCK_KEYS"  # has the name of a folder, and no key
_LOADING_S_MAX = 300.0  # torch is imported by it, at first from a cold disk
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def environment_report() -> Report:
    """Imports torch, if it can be. The native parts are loaded by a process of their own."""
    loaded = _load_native_parts()
    return {
        "penstock": _facts(
            version=lambda: __version__,
            installed_in=lambda: str(Path(__file__).resolve().parents[1]),
            on_the_path=_packages,
            torch_supported=lambda: f"{TORCH_MINORS[0]} to {TORCH_MINORS[-1]}",
            native_parts=_native_parts,
            native_part_loads=lambda: loaded.outcome,
        ),
        "python": _facts(
            version=lambda: " ".join(sys.version.split()),
            executable=lambda: _shown(sys.executable),
            environment=lambda: "virtual" if sys.prefix != sys.base_prefix else "the system's",
            free_threaded=lambda: "yes" if sysconfig.get_config_var("Py_GIL_DISABLED") else "no",
            packages=lambda: [f"{name} {found}" for name in _PACKAGES if (found := _version(name))],
        ),
        "torch": _torch_facts(),
        "libraries": _library_facts(loaded),
        "machine": _facts(**machine_facts()),
        "environment": {
            name: [_redacted(name, value)]
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
    }


def _facts(**sources: Callable[[], str | Iterable[str]]) -> dict[str, list[str]]:
    found = {}
    for name, source in sources.items():
        try:
            value = source()
            lines = [value] if isinstance(value, str) else list(value)
        except Exception as error:  # whatever is broken here, the rest is to be told
            lines = [f"not known: {type(error).__name__}: {error}"]
        found[name.replace("_", " ")] = [_shown(line) for line in lines]
    return found


def _packages() -> list[str]:
    return [
        f"{found.folder} ({found.version}{'' if found.is_built else ', without native parts'})"
        for found in packages_on_path()
    ]


def _native_parts() -> list[str]:
    return [
        f"torch {part.torch_minor}, built beside {part.torch}, "
        f"{f'with CUDA {part.cuda}' if part.cuda else 'without CUDA'}"
        f"{'' if part.module else ', for other Pythons'}"
        for part in native_parts()
    ] or ["none"]


class _Loaded(NamedTuple):
    """What a process tells that loads the native parts."""

    outcome: str
    libraries: dict[str, list[str]]


def _load_native_parts() -> _Loaded:
    """In a process of its own, which a module that does not fit may end."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.loaded_libraries"],
            capture_output=True,
            text=True,
            timeout=_LOADING_S_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _Loaded(f"not known: {type(error).__name__}: {error}", {})
    told: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        told |= json.loads(line)
    if done.returncode == 0:
        return _Loaded(f"yes, {told['module']}", told["libraries"])
    last = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
    outcome = f"no: it ends with status {done.returncode}: {last[0]}"
    return _Loaded(outcome, told.get("libraries", {}))


def _torch_facts() -> dict[str, list[str]]:
    try:
        import torch
    except Exception as error:  # the report is for such cases
        return {"version": [f"torch cannot be imported: {type(error).__name__}: {error}"]}

    def devices() -> list[str]:
        if not torch.cuda.is_available():
            return ["none that torch can use"]
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

    return _facts(
        version=lambda: torch.__version__,
        installed_in=lambda: str(Path(torch.__file__).parent),
        built_for_CUDA=lambda: torch.version.cuda or "no",
        GPUs=devices,
        GPU_driver=_gpu_driver,
        threads=lambda: (
            f"{torch.get_num_threads()} of one operator, "
            f"{torch.get_num_interop_threads()} beside each other"
        ),
        sharing_strategy=torch.multiprocessing.get_sharing_strategy,
        start_method=lambda: (
            torch.multiprocessing.get_start_method(allow_none=True)
            or f"not chosen; {torch.multiprocessing.get_all_start_methods()[0]} by default"
        ),
    )


def _gpu_driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "none"


def _library_facts(loaded: _Loaded) -> dict[str, list[str]]:
    """The libraries that the native parts have loaded, with their files."""
    if not loaded.libraries:
        return {"not loaded": [_shown(loaded.outcome)]}
    return {
        name: [_shown(line) for line in lines] or ["none of its own"]
        for name, lines in loaded.libraries.items()
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _redacted(name: str, value: str) -> str:
    if looks_secret(name) and name != _KEY_FOLDER:
        return f"set, {len(value)} characters that are not shown"
    return _shown(_LOGIN.sub("…@", value))


def _shown(text: str) -> str:
    """With the home directory, which has a person's name in it, written as ~."""
    home = str(Path.home())
    return text.replace(home, "~") if home not in ("", "/") else text
