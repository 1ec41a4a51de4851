# SPDX-License-Identifier: Apache-2.0
"""The commands ``penstock guide``, which prints the guide for coding assistants, and
``penstock env``: the facts for a bug report about penstock, its limits on this
machine, and the report of ``torch.utils.collect_env``.

As it is used where something is broken, each fact that cannot be determined is replaced by the
reason. Torch and the native parts are loaded in separate processes, which an incompatible library
may crash; run as a program, this module is the process that loads the native parts.
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from penstock._native import NativePart, native_parts
from penstock._packages_on_path import packages_on_path
from penstock._version import TORCH_MINORS, __version__
from penstock.cli.command_parser import CommandParser, run_subcommand
from penstock.secret_names import looks_secret
from penstock.tuning.process_resources import (
    memory_left_bytes,
    memory_limit_bytes,
    usable_cpus,
)

_NAME_COLUMNS = 22
# Below this, few connections fit in addition to a dataset's files. The same as
# _pool.DESCRIPTOR_LIMIT_LEAST, since this command runs without native parts.
DESCRIPTOR_LIMIT_LEAST = 4096
SCHEMA = "penstock.environment/1"
# By section and name, the lines of the value.
Report = dict[str, dict[str, list[str]]]

# Packages that may matter for a bug and that collect_env omits.
_PACKAGES = (
    "cloudpickle", "lightning", "accelerate", "transformers", "datasets", "ray", "pyarrow",
)  # fmt: skip
# Variables, in addition to PENSTOCK_*, that change how processes find their code, their CPUs and
# each other.
_VARIABLES = re.compile(
    r"PENSTOCK_\w+|CUDA_(VISIBLE_DEVICES|LAUNCH_BLOCKING)|(OMP|MKL)_NUM_THREADS|LD_(PRELOAD|LIBRARY_PATH)"
    r"|PYTHON(PATH|HOME|SAFEPATH)|TMPDIR|RANK|WORLD_SIZE|LOCAL_(RANK|WORLD_SIZE)|TORCH_LOGS|ZMQ_\w+"
    r"|SLURM_JOB_ID|KUBERNETES_SERVICE_HOST"
)
_KEY_FOLDER = "PENSTOCK_KEYS"  # contains the name of a folder, and no key
_STEP_S_MAX = 300.0  # includes the import of torch, which may read from a cold disk
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_ROOT = Path("/")
_GUIDE = Path(__file__).resolve().parents[1] / ".agents" / "skills" / "penstock" / "SKILL.md"
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
    return run_subcommand(
        {"env": _environment_command, "guide": _guide_command}, command, arguments
    )


def _guide_command(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "guide",
        "guide [--path]",
        """\
Prints the guide for coding assistants: how to replace torch's DataLoader, verify the batches, find
a program's bottleneck, and what to do for each error code. The file is an agent skill (SKILL.md) in
the folder .agents/skills of the installed package, where tools for skills find it.""",
    )
    parser.add_argument("--path", action="store_true", help="print the name of the file instead")
    args = parser.parse(arguments)
    print(_GUIDE if args.path else _GUIDE.read_text(encoding="utf-8"), end="\n" * args.path)
    return 0


def _environment_command(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "env",
        "env [--json]",
        """\
Prints system information for bug reports: the version and the native parts of penstock, the
libraries that these load, the limits on CPUs, memory and files, the relevant environment variables,
and the report of torch.utils.collect_env. Values that may be secret are omitted, and the home
directory is written as ~. The report is printed only; it is not sent anywhere.""",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse(arguments)
    report = environment_report()
    record = {"schema": SCHEMA, **report}
    print(json.dumps(record, indent=2) if args.json else _text(report))
    return 0


def _text(report: Report) -> str:
    lines = []
    for section, facts in report.items():
        lines.append(section)
        for name, value in facts.items():
            first, *rest = value or [""]
            lines.append(f"  {name:<{_NAME_COLUMNS}}{first}".rstrip())
            lines += [f"  {'':<{_NAME_COLUMNS}}{line}".rstrip() for line in rest]
    return "\n".join(lines)


def environment_report() -> Report:
    """Return the report. Two separate processes load torch and the native parts, at once: each
    takes some seconds."""
    with ThreadPoolExecutor(1) as beside:
        torch_lines = beside.submit(_torch_lines)
        loaded = _load_native_parts()
    return {
        "penstock": _facts(
            version=lambda: __version__,
            installed_in=lambda: str(Path(__file__).resolve().parents[1]),
            on_the_path=_packages,
            torch_supported=lambda: f"{TORCH_MINORS[0]} to {TORCH_MINORS[-1]}",
            native_parts=_native_parts,
            native_part_loads=lambda: loaded.outcome,
            numerics=lambda: loaded.numerics,
            pool_keys=_pool_keys,
            guide=lambda: str(_GUIDE),
            executable=lambda: sys.executable,
            packages=lambda: [f"{name} {found}" for name in _PACKAGES if (found := _version(name))],
        ),
        "libraries": _library_facts(loaded),
        "limits": _facts(**limit_facts()),
        "environment": {
            name: [_redacted(name, value)]
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
        "torch": _facts(collect_env=torch_lines.result),
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
        f"torch {part.torch_minor}, built with {part.torch}, {_cuda_part(part)}"
        f"{'' if part.module else ', for other Pythons'}"
        for part in native_parts()
    ] or ["none"]


def _cuda_part(part: NativePart) -> str:
    if part.cuda is None:
        return "without CUDA"
    return f"with CUDA {part.cuda}, {'with' if part.has_kernels else 'without'} kernels"


def _pool_keys() -> str:
    folder = Path(os.environ.get(_KEY_FOLDER, ""))
    if folder == Path():
        return f"{_KEY_FOLDER} is not set"
    names = sorted(os.listdir(folder))
    secrets = [name for name in names if name.endswith(".secret")]
    public_count = sum(name.endswith(".public") for name in names)
    mode = folder.stat().st_mode & 0o777
    return (
        f"{folder} (mode {mode:03o}): {', '.join(secrets) or 'no secret'}, "
        f"{public_count} public keys"
    )


class _Loaded(NamedTuple):
    """The report of a process that loads the native parts."""

    outcome: str
    numerics: str  # the kind of the kernels
    libraries: dict[str, list[str]]


def _load_native_parts() -> _Loaded:
    output, failure = _run_module("penstock.cli.environment_command")
    told: dict[str, Any] = {}
    for line in output.splitlines():
        told |= json.loads(line)
    outcome = f"no: {failure}" if failure else f"yes, {told['module']}"
    return _Loaded(outcome, told.get("numerics", "unknown"), told.get("libraries", {}))


def _torch_lines() -> list[str]:
    output, failure = _run_module("torch.utils.collect_env")
    if failure:  # collect_env would have reported these
        lines = [f"torch cannot be used: {failure}", f"Python {sys.version}", platform.platform()]
        return [" ".join(line.split()) for line in lines]
    return output.splitlines()[1:]  # the first line announces the report


def _run_module(name: str) -> tuple[str, str]:
    """Run a module as a program. Return its output, and the reason if it failed."""
    command = [sys.executable, "-m", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_S_MAX)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return done.stdout, ""
    last = done.stderr.strip().splitlines()[-1:] or ["no output"]
    return done.stdout, f"exit status {done.returncode}: {last[0]}"


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


def limit_facts(root: Path = _ROOT) -> dict[str, Callable[[], str | Iterable[str]]]:
    """Return the function that finds each fact, by name; each may raise. ``root`` contains proc,
    sys and dev."""
    return {
        "CPUs": lambda: (
            f"{os.cpu_count()} in total, {len(os.sched_getaffinity(0))} available to this "
            f"process, {usable_cpus(root)} by its cgroup quotas"
        ),
        "memory_left": lambda: _bytes(memory_left_bytes(root), "unknown"),
        "memory_limit": lambda: _bytes(memory_limit_bytes(root), "no cgroup limit"),
        "shared_memory": lambda: _file_system(root / "dev/shm"),
        "temporary_files": lambda: _file_system(Path(os.environ.get("TMPDIR", "/tmp"))),
        "limits": lambda: [f"{name}: {_limit(name)}" for name in _LIMITS] + _low_limits(),
        "container": lambda: _container(root),
    }


def _bytes(count: int | None, otherwise: str) -> str:
    return otherwise if count is None else in_units(count)


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
    from penstock.pool.pool_status import format_numerics

    told = {
        "libraries": loaded_libraries(_pool.zmq_version()),
        "module": _C.__file__,
        "numerics": format_numerics().removeprefix("numerics "),
    }
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
