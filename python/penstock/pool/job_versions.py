# SPDX-License-Identifier: Apache-2.0
"""Record the software versions that a job was made with, and compare them with another process."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock._version import __version__

# Modules of the standard library and of the program, and packages that are compared separately.
_LEFT_OUT = {*sys.stdlib_module_names, "__main__", "__mp_main__", "penstock", "torch"}


@dataclass(frozen=True, slots=True)
class Versions:
    python: str
    torch: str
    penstock: str
    packages: dict[str, str]  # by the name of the distribution

    @staticmethod
    def here(packages: Mapping[str, str]) -> Versions:
        python = ".".join(str(part) for part in sys.version_info[:3])
        return Versions(python, str(torch.__version__), __version__, dict(packages))


@dataclass(frozen=True, slots=True)
class Imports:
    """The origin of the modules that a pickle refers to."""

    packages: dict[str, str]  # version by distribution
    modules: dict[str, str]  # other modules, with the sys.path folder needed to import each


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def imports_of(modules: Iterable[str], sent: Collection[str] = ()) -> Imports:
    """Find the origins of ``modules``. ``sent`` has the files, with links resolved, of modules that
    are sent to the worker even if it has them."""
    found = Imports({}, {})
    for module in sorted(modules):
        top = module.partition(".")[0]
        if top in _LEFT_OUT or _is_sent(module, sent):
            continue
        package = _package_of(module, top)
        if package is None:
            folder = _folder_of(top)
            if folder is not None and top not in _distributions():
                found.modules[top] = folder
        elif (version := installed_version(package)) is not None:
            found.packages[package] = version
    return found


def reason_to_refuse(
    made_with: Versions, here: Versions, installed: Callable[[str], str | None], worker: str
) -> str | None:
    """Return why a job cannot run in the process ``worker``, whose versions are ``here``, or None
    if it can."""
    for name, theirs, ours, is_same in (
        ("Python", made_with.python, here.python, _is_same_minor),
        ("torch", made_with.torch, here.torch, _is_same_minor),
        ("penstock", made_with.penstock, here.penstock, str.__eq__),
    ):
        if not is_same(theirs, ours):
            return (
                f"the trainer has {name} {theirs}, but this worker ({worker}) has {name} {ours}; "
                f"install the same version on both"
            )
    for package, theirs in made_with.packages.items():
        version = installed(package)
        if version is None:
            return (
                f"the trainer has {package} {theirs}, but this worker ({worker}) has no {package}; "
                f"install it on the worker"
            )
        if _compatible_part(version) != _compatible_part(theirs):
            return (
                f"the trainer has {package} {theirs}, but this worker ({worker}) has {package} "
                f"{version}; install the same version on both"
            )
    return None


def _is_same_minor(a: str, b: str) -> bool:
    return a.split(".")[:2] == b.split(".")[:2]


def _compatible_part(version: str) -> tuple[str, ...]:
    """Return the major version; for 0.x, which promises no compatibility beyond x, both numbers."""
    numbers = re.match(r"(?:\d+!)?(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        return (version,)
    major, minor = numbers.groups()
    return (major,) if major != "0" else (major, minor or "0")


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return distributions by the top-level names that they install; reading all takes 0.3 s."""
    if sys.version_info >= (3, 11):
        return importlib.metadata.packages_distributions()
    # Python 3.10's function finds only distributions with a top_level.txt, which few wheels have.
    found: dict[str, set[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]  # parses all of the metadata
        for file in distribution.files or ():
            is_inside = len(file.parts) > 1
            top = file.parts[0] if is_inside else inspect.getmodulename(file.name)
            if top is not None and top.isidentifier():
                found.setdefault(top, set()).add(name)
    return {top: sorted(names) for top, names in found.items()}


def _is_sent(module: str, sent: Collection[str]) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and os.path.realpath(file) in sent


def _package_of(module: str, top: str) -> str | None:
    """Return the distribution that a module belongs to, if it is unique."""
    candidates = set(_distributions().get(top, ()))
    if len(candidates) > 1:  # of a namespace such as google: take the one with the module's file
        file = getattr(sys.modules.get(module), "__file__", None)
        candidates = {name for name in candidates if file is not None and _has_file(name, file)}
    return candidates.pop() if len(candidates) == 1 else None


def _has_file(package: str, path: str) -> bool:
    files = importlib.metadata.files(package) or ()
    return any(str(file.locate()) == path for file in files)


def _folder_of(top: str) -> str | None:
    """Return the sys.path entry in which a module was found."""
    module: Any = sys.modules.get(top)
    file: str | None = getattr(module, "__file__", None)
    if file is None:
        portions: list[str] = list(getattr(module, "__path__", ()))
        return os.path.dirname(portions[0]) if portions else None
    is_package = hasattr(module, "__path__")
    return os.path.dirname(os.path.dirname(file) if is_package else file)
