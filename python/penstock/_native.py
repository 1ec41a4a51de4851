# SPDX-License-Identifier: Apache-2.0
"""Find the native module for the installed torch, and refuse to load an incompatible one.

`lib/torch_2_11` next to this file has the parts built for torch 2.11: the module `_C`, the library
for C++ programs, and CMake's record of the build. Torch's C++ interface is not stable: with another
torch, a module would report an undefined symbol or crash.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from penstock._packages_on_path import FoundPackage, packages_on_path
from penstock._version import TORCH_MINORS, __version__

PACKAGE = Path(__file__).resolve().parent
_RANGE = f"{TORCH_MINORS[0]} to {TORCH_MINORS[-1]}"
_PIP_RANGE = f"torch>={TORCH_MINORS[0]},<2.{int(TORCH_MINORS[-1].partition('.')[2]) + 1}"
_BUILD = "pip install --no-build-isolation --force-reinstall ."


class NativePart(NamedTuple):
    """The files of a package for one minor version of torch."""

    folder: Path
    torch_minor: str
    penstock: str  # the version that it was built from
    torch: str  # the version that it was built with
    cuda: str | None  # torch's version of CUDA; None if the CUDA part was not built
    has_kernels: bool  # whether the CUDA part has kernels of penstock, which need nvcc
    module: Path | None  # None if there are only modules for other Pythons


def native_parts(package: Path = PACKAGE) -> list[NativePart]:
    """Return a package's native parts, by torch version; none for a source tree without build."""
    found = []
    for folder in package.glob("lib/torch_*"):
        about = folder / "build_info.json"
        if about.is_file() and (name := re.fullmatch(r"torch_(\d+)_(\d+)", folder.name)):
            facts = json.loads(about.read_text(encoding="utf-8"))
            modules = [folder / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
            module = next((path for path in modules if path.is_file()), None)
            minor = f"{name[1]}.{name[2]}"
            built, torch, cuda = facts["penstock"], facts["torch"], facts["cuda"]
            found.append(NativePart(folder, minor, built, torch, cuda, facts["kernels"], module))
    return sorted(found, key=lambda part: [int(one) for one in part.torch_minor.split(".")])


def c_library() -> str | None:
    """Return the GNU C library of this process, such as "glibc 2.36"; None for any other one."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def refusal(
    parts: Sequence[NativePart],
    torch_version: str,
    packages: Sequence[FoundPackage],
    package: Path = PACKAGE,
) -> str | None:
    """Return why none of ``parts`` can be loaded with a torch, and the remedy; None if one can.

    ``packages`` are the packages on Python's path, ``package`` the imported one.
    """
    minor = minor_of(torch_version)
    if not parts:
        return refusal_without_parts(packages, package)
    if minor not in TORCH_MINORS:
        return (
            f"penstock {__version__} supports torch {_RANGE}, got torch {torch_version}; install "
            f"a supported torch (pip install '{_PIP_RANGE}'), or a penstock that supports torch "
            f"{minor}"
        )
    part = next((part for part in parts if part.torch_minor == minor), None)
    if part is None:
        built = ", ".join(part.torch_minor for part in parts)
        return (
            f"this penstock was built for torch {built}, got torch {torch_version}; rebuild "
            f"penstock with this torch ({_BUILD}), install a penstock wheel, which supports torch "
            f"{_RANGE}, or install torch {built}"
        )
    if part.penstock != __version__:
        return (
            f"the Python files in {package} are of penstock {__version__} and its native parts of "
            f"penstock {part.penstock}: two penstocks were installed over each other; run "
            f"`pip uninstall penstock` until none is left, then install it again"
        )
    if part.module is None:
        running = f"{sys.version_info[0]}.{sys.version_info[1]}"
        built = ", ".join(sorted(path.name for path in part.folder.glob("_C*.so"))) or "nothing"
        return (
            f"the native parts in {part.folder} were not built for this Python, {running} "
            f"({sys.implementation.cache_tag}): found {built}; install penstock with this Python"
        )
    return None


def refusal_without_parts(
    packages: Sequence[FoundPackage] | None = None, package: Path = PACKAGE
) -> str:
    """Return the remedy for a penstock that was not built."""
    found = packages_on_path() if packages is None else packages
    others = [str(one.folder) for one in found if one.is_built]
    remedy = (
        f"another penstock, which has them, is in {' and '.join(others)}: remove the first one "
        "from the path (the folder in which the program is started, PYTHONPATH)"
        if others
        else "it is a source tree that was not built; install it with `pip install .`"
    )
    return f"the penstock in {package} has no native parts; {remedy}"


def import_torch() -> ModuleType:
    """Import torch, to which the native part links, after a check of their common requirement."""
    if c_library() is None:
        raise ImportError(
            "penstock's native parts and torch require the GNU C library, and this Python runs on "
            "another one (musl, as in Alpine Linux); use a Python of a distribution with glibc, "
            "such as Debian's"
        )
    return importlib.import_module("torch")


def load(name: str) -> ModuleType:
    """Return the native module for the installed torch, under ``name``.

    Raises:
        ImportError: there is none, or it is incompatible.
    """
    torch = import_torch()
    parts = native_parts()
    packages = packages_on_path()
    if reason := refusal(parts, torch.__version__, packages):
        raise ImportError(reason)
    warn_of_others(packages)
    part = next(part for part in parts if part.torch_minor == minor_of(torch.__version__))
    spec = importlib.util.spec_from_file_location(name, part.module)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ImportError(
            f"{part.module} cannot be loaded: {error}; it was built with torch {part.torch}, and "
            f"this is torch {torch.__version__} with {c_library()}. `python -m penstock env` "
            "shows details"
        ) from error
    return module


def warn_of_others(packages: Sequence[FoundPackage]) -> None:
    """Warn of two versions of penstock on the path: a data worker may find the other one."""
    other = [found for found in packages if found.is_built and found.version != __version__]
    if other:
        warnings.warn(
            f"two versions of penstock are on Python's path: {PACKAGE} (version {__version__}), "
            f"which is used, and {other[0].folder} (version {other[0].version}); processes with "
            "another path would use the other one. Uninstall one, or remove its folder from "
            "PYTHONPATH",
            RuntimeWarning,
            stacklevel=2,
        )
