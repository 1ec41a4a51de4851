# SPDX-License-Identifier: Apache-2.0
"""What a report of a fault needs: facts about penstock, torch, this machine and its limits.

It is made where something is broken, so each fact that cannot be had is replaced by the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock._version import TORCH_MINORS, __version__
from penstock.cli.machine_facts import machine_facts
from penstock.cli.packages_on_path import packages_on_path

# By section and name, the lines of the value.
Report = dict[str, dict[str, list[str]]]

# Versions of other packages of which a fault may depend.
_PACKAGES = (
    "numpy", "cloudpickle", "torchvision", "torchdata", "lightning", "accelerate", "transformers",
    "datasets", "ray", "pyarrow",
)  # fmt: skip
# Libraries of the system's, or those that a wheel brings, with the function that tells the version.
_LIBRARIES = {"libzmq": None, "libsodium": "sodium_version_string", "libcrypto": "OpenSSL_version"}
# Beside PENSTOCK_*: what changes how processes find their code, their CPUs and each other.
_VARIABLES = re.compile(
    r"PENSTOCK_\w+|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|(OMP|MKL)_NUM_THREADS|LD_(PRELOAD|LIBRARY_PATH)"
    r"|PYTHON(PATH|HOME|SAFEPATH)|TMPDIR|RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|TORCH_LOGS|ZMQ_\w+"
    r"|SLURM_JOB_ID|KUBERNETES_SERVICE_HOST"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|_KEY$")
_LOADING_S_MAX = 120.0  # torch is imported by it
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def environment_report() -> Report:
    """Imports torch and the native part, if they can be."""
    return {
        "penstock": _facts(
            version=lambda: __version__,
            installed_in=lambda: _shown(str(Path(__file__).resolve().parents[1])),
            on_the_path=lambda: [
                f"{_shown(str(place.folder))} ({place.about})" for place in packages_on_path()
            ],
            torch_supported=lambda: f"{TORCH_MINORS[0]} to {TORCH_MINORS[-1]}",
            native_parts=_native_parts,
            native_part_loads=_native_part_loads,
        ),
        "python": _facts(
            version=lambda: " ".join(sys.version.split()),
            executable=lambda: _shown(sys.executable),
            environment=lambda: "virtual" if sys.prefix != sys.base_prefix else "the system's",
            free_threaded=lambda: "yes" if sysconfig.get_config_var("Py_GIL_DISABLED") else "no",
            packages=lambda: [f"{name} {found}" for name in _PACKAGES if (found := _version(name))],
        ),
        "torch": _torch_facts(),
        "libraries": _library_facts(),
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


def _native_parts() -> list[str]:
    build_info = import_module("penstock._build_info")
    cuda = build_info.CUDA_VERSION or "none"
    return [f"torch {build_info.TORCH_MINOR_VERSION}, CUDA {cuda}"]


def _native_part_loads() -> str:
    """In a process of its own, which a module that does not fit may end."""
    done = subprocess.run(
        [sys.executable, "-c", "from penstock import _C; print(_C.__file__)"],
        capture_output=True,
        text=True,
        timeout=_LOADING_S_MAX,
    )
    if done.returncode == 0:
        return f"yes, {done.stdout.strip()}"
    last = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
    return f"no: it ends with status {done.returncode}: {last[0]}"


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


def _library_facts() -> dict[str, list[str]]:
    """The libraries that the native parts have loaded into this process, with their files."""
    try:
        from penstock import _pool
    except ImportError as error:
        return {"not loaded": [_shown(str(error))]}
    found: dict[str, list[str]] = {name: [] for name in _LIBRARIES}
    for file in sorted(_loaded_files()):
        name = re.match(r"lib[a-z]+", Path(file).name)
        if name is not None and name[0] in _LIBRARIES:
            teller = _LIBRARIES[name[0]]
            told = _pool.zmq_version() if teller is None else _told_by(file, teller)
            found[name[0]].append(_shown(f"{told} ({file})"))
    return {
        name: lines or ["none of its own: it is part of a native module"]
        for name, lines in found.items()
    }


def _loaded_files() -> set[str]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return {fields[5] for line in maps.splitlines() if len(fields := line.split(None, 5)) == 6}


def _told_by(file: str, function: str) -> str:
    """A library that is loaded already says its version."""
    import ctypes

    ask = getattr(ctypes.CDLL(file), function)
    ask.restype = ctypes.c_char_p
    answer: bytes = ask(0)
    return answer.decode()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _redacted(name: str, value: str) -> str:
    if _SECRET.search(name):
        return f"set, {len(value)} characters that are not shown"
    return _shown(_LOGIN.sub("…@", value))


def _shown(text: str) -> str:
    """With the home directory, which has a person's name in it, written as ~."""
    home = str(Path.home())
    return text.replace(home, "~") if home not in ("", "/") else text
