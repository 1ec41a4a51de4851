# SPDX-License-Identifier: Apache-2.0
"""The command ``penstock env``: the facts for a bug report about penstock, torch, this machine and
its limits.

As it is used where something is broken, each fact that cannot be determined is replaced by the
reason. Run as a program, this module loads the native parts and prints which libraries they loaded:
`penstock env` does so in a separate process, which an incompatible part may crash.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import resource
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from penstock._native import c_library, native_parts
from penstock._packages_on_path import packages_on_path
from penstock._version import TORCH_MINORS, __version__
from penstock.cli.command_parser import CommandParser, run_subcommand
from penstock.secret_names import looks_secret
from penstock.tuning.process_resources import usable_cpus

_NAME_COLUMNS = 22
# Below this, few connections fit in addition to a dataset's files. The same as
# _pool.DESCRIPTOR_LIMIT_LEAST, since this command runs without native parts.
DESCRIPTOR_LIMIT_LEAST = 4096
# By section and name, the lines of the value.
Report = dict[str, dict[str, list[str]]]

# Versions of other packages that may matter for a bug.
_PACKAGES = (
    "numpy", "cloudpickle", "torchvision", "torchdata", "lightning", "accelerate", "transformers",
    "datasets", "ray", "pyarrow",
)  # fmt: skip
# Variables, in addition to PENSTOCK_*, that change how processes find their code, their CPUs and
# each other.
_VARIABLES = re.compile(
    r"PENSTOCK_\w+|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|(OMP|MKL)_NUM_THREADS|LD_(PRELOAD|LIBRARY_PATH)"
    r"|PYTHON(PATH|HOME|SAFEPATH)|TMPDIR|RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|TORCH_LOGS|ZMQ_\w+"
    r"|SLURM_JOB_ID|KUBERNETES_SERVICE_HOST"
)
_KEY_FOLDER = "PENSTOCK_KEYS"  # contains the name of a folder, and no key
_LOADING_S_MAX = 300.0  # includes the import of torch, which may read from a cold disk
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_ROOT = Path("/")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LIMITS = {
    "files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "address space": resource.RLIMIT_AS,
    "locked memory": resource.RLIMIT_MEMLOCK,
}
_BYTE_LIMITS = ("address space", "locked memory")
# Libraries of the system or of a wheel, with the function that returns the version.
_VERSION_FUNCTIONS = {"libsodium": "sodium_version_string", "libcrypto": "OpenSSL_version"}


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run the command; return the exit code. Raises CommandError for arguments that it does not
    accept."""
    return run_subcommand({command: _environment_command}, command, arguments)


def _environment_command(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "env",
        "env [--json]",
        """\
Prints system information for bug reports: the versions of penstock, torch, CUDA, Python and the
system libraries, the native part in use, the limits on CPUs, memory and files, and the relevant
environment variables. Values that may be secret are omitted, and the home directory is written as
~. The report is printed only; it is not sent anywhere.""",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse(arguments)
    report = environment_report()
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0


def _text(report: Report) -> str:
    lines = []
    for section, facts in report.items():
        lines.append(section)
        for name, value in facts.items():
            first, *rest = value or [""]
            lines.append(f"  {name:<{_NAME_COLUMNS}}{first}".rstrip())
            lines += [f"  {'':<{_NAME_COLUMNS}}{line}" for line in rest]
    return "\n".join(lines)


def environment_report() -> Report:
    """Return the report. Imports torch, if possible. A separate process loads the native parts."""
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
            environment=lambda: "virtual" if sys.prefix != sys.base_prefix else "system",
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
        except Exception as error:  # the rest is reported even if this part is broken
            lines = [f"unknown: {type(error).__name__}: {error}"]
        found[name.replace("_", " ")] = [_shown(line) for line in lines]
    return found


def _packages() -> list[str]:
    return [
        f"{found.folder} ({found.version}{'' if found.is_built else ', without native parts'})"
        for found in packages_on_path()
    ]


def _native_parts() -> list[str]:
    return [
        f"torch {part.torch_minor}, built with {part.torch}, "
        f"{f'with CUDA {part.cuda}' if part.cuda else 'without CUDA'}"
        f"{'' if part.module else ', for other Pythons'}"
        for part in native_parts()
    ] or ["none"]


class _Loaded(NamedTuple):
    """The report of a process that loads the native parts."""

    outcome: str
    libraries: dict[str, list[str]]


def _load_native_parts() -> _Loaded:
    """Load the native parts in a separate process, which an incompatible module may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.environment_command"],
            capture_output=True,
            text=True,
            timeout=_LOADING_S_MAX,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _Loaded(f"unknown: {type(error).__name__}: {error}", {})
    told: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        told |= json.loads(line)
    if done.returncode == 0:
        return _Loaded(f"yes, {told['module']}", told["libraries"])
    last = done.stderr.strip().splitlines()[-1:] or ["no output"]
    outcome = f"no: exit status {done.returncode}: {last[0]}"
    return _Loaded(outcome, told.get("libraries", {}))


def _torch_facts() -> dict[str, list[str]]:
    try:
        import torch
    except Exception as error:  # the report is for such cases
        return {"version": [f"torch cannot be imported: {type(error).__name__}: {error}"]}

    def devices() -> list[str]:
        if not torch.cuda.is_available():
            return ["none available to torch"]
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]

    return _facts(
        version=lambda: torch.__version__,
        installed_in=lambda: str(Path(torch.__file__).parent),
        built_for_CUDA=lambda: torch.version.cuda or "no",
        GPUs=devices,
        GPU_driver=_gpu_driver,
        threads=lambda: (
            f"{torch.get_num_threads()} intra-op, {torch.get_num_interop_threads()} inter-op"
        ),
        sharing_strategy=torch.multiprocessing.get_sharing_strategy,
        start_method=lambda: (
            torch.multiprocessing.get_start_method(allow_none=True)
            or f"not set; {torch.multiprocessing.get_all_start_methods()[0]} by default"
        ),
    )


def _gpu_driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "none"


def _library_facts(loaded: _Loaded) -> dict[str, list[str]]:
    """Return the libraries loaded by the native parts, with their files."""
    if not loaded.libraries:
        return {"not loaded": [_shown(loaded.outcome)]}
    return {
        name: [_shown(line) for line in lines] or ["not loaded as a separate library"]
        for name, lines in loaded.libraries.items()
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _redacted(name: str, value: str) -> str:
    if looks_secret(name) and name != _KEY_FOLDER:
        return f"set, {len(value)} characters (not shown)"
    return _shown(_LOGIN.sub("…@", value))


def _shown(text: str) -> str:
    """Write the home directory, which contains a person's name, as ~."""
    home = str(Path.home())
    return text.replace(home, "~") if home not in ("", "/") else text


def machine_facts(root: Path = _ROOT) -> dict[str, Callable[[], str | Iterable[str]]]:
    """Return the function that finds each fact, by name; each may raise. ``root`` contains proc,
    sys and etc."""
    return {
        "system": lambda: f"{_distribution(root)}; {platform.system()} {platform.release()}",
        "C_library": lambda: c_library() or "not glibc",
        "machine": platform.machine,
        "CPU": lambda: _field(root / "proc/cpuinfo", "model name|Processor|cpu model"),
        "CPUs": lambda: (
            f"{os.cpu_count()} in total, {len(os.sched_getaffinity(0))} available to this "
            f"process, {usable_cpus(root)} by its cgroup quotas"
        ),
        "memory": lambda: (
            f"{_kibibytes(root, 'MemTotal')}, of which {_kibibytes(root, 'MemAvailable')} are free"
        ),
        "memory_limit": lambda: _memory_limit(root),
        "shared_memory": lambda: _file_system(root / "dev/shm"),
        "temporary_files": lambda: _file_system(Path(os.environ.get("TMPDIR", "/tmp"))),
        "limits": lambda: [f"{name}: {_limit(name)}" for name in _LIMITS] + _low_limits(),
        "container": lambda: _container(root),
    }


def _distribution(root: Path) -> str:
    text = (root / "etc/os-release").read_text(encoding="utf-8")
    name = re.search(r'^PRETTY_NAME="?(.*?)"?$', text, re.MULTILINE)
    return name[1] if name else "unknown"


def _field(path: Path, names: str) -> str:
    found = re.search(rf"^(?:{names})\s*:\s*(.*)$", path.read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def _kibibytes(root: Path, name: str) -> str:
    kibibytes, _, _ = _field(root / "proc/meminfo", name).partition(" ")
    return in_units(int(kibibytes) * 1024)


def _memory_limit(root: Path) -> str:
    """Return the smallest limit of this process's cgroups."""
    limits = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        name = "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            mount, name = mount / "memory", "memory.limit_in_bytes"
        folder = mount / group.lstrip("/")
        for place in (folder, *folder.parents):
            if place == mount.parent:
                break
            if (place / name).is_file():
                text = (place / name).read_text().strip()
                # cgroups v1 represents "none" by a huge number.
                if text.isdecimal() and int(text) < 1 << 60:
                    limits.append(int(text))
    return in_units(min(limits)) if limits else "no cgroup limit"


def _file_system(folder: Path) -> str:
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    return f"{in_units(free)} free of {in_units(size)} in {folder}"


def _limit(name: str) -> str:
    def shown(value: int) -> str:
        if value == resource.RLIM_INFINITY:
            return "no limit"
        return in_units(value) if name in _BYTE_LIMITS else str(value)

    soft, hard = resource.getrlimit(_LIMITS[name])
    return shown(soft) if soft == hard else f"{shown(soft)}, may be raised to {shown(hard)}"


def _low_limits() -> list[str]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= DESCRIPTOR_LIMIT_LEAST:
        return []
    return [
        f"files are too few for a pool's processes: {DESCRIPTOR_LIMIT_LEAST} or more are "
        f"recommended; raise the hard limit (ulimit -Hn, LimitNOFILE of a systemd unit)"
    ]


def _container(root: Path) -> str:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return "yes"
    return "yes, Kubernetes" if os.environ.get("KUBERNETES_SERVICE_HOST") else "none detected"


def in_units(count: int) -> str:
    """Format a number of bytes: "23.5 GiB"."""
    power = min(max(0, count.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"


def main() -> None:
    """Print the libraries as a line of JSON before the step that may fail, and another line after
    it."""
    from penstock import _pool

    print(json.dumps({"libraries": loaded_libraries(_pool.zmq_version())}), flush=True)
    from penstock import _C

    told = {"libraries": loaded_libraries(_pool.zmq_version()), "module": _C.__file__}
    print(json.dumps(told), flush=True)


def loaded_libraries(zmq_version: str) -> dict[str, list[str]]:
    """Return a version and a file for each library that this process has loaded, by name: Python
    may have loaded another library of the same name."""
    found: dict[str, list[str]] = {"libzmq": [], **{name: [] for name in _VERSION_FUNCTIONS}}
    for file in sorted(_loaded_files()):
        name = re.match(r"lib[a-z]+", Path(file).name)
        if name is not None and name[0] in found:
            told = (
                zmq_version
                if name[0] == "libzmq"
                else _version_of_library(file, _VERSION_FUNCTIONS[name[0]])
            )
            found[name[0]].append(f"{told} ({file})")
    return found


def _loaded_files() -> set[str]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return {fields[5] for line in maps.splitlines() if len(fields := line.split(None, 5)) == 6}


def _version_of_library(file: str, function: str) -> str:
    ask = getattr(ctypes.CDLL(file), function)
    ask.restype = ctypes.c_char_p
    answer: bytes = ask(0)
    return answer.decode()


if __name__ == "__main__":
    main()
