# SPDX-License-Identifier: Apache-2.0
"""Collect the modules of the program itself, which are sent to pool workers without being named.

A program finds modules in its own folder, or where the user has put them. From the folder that it
was started from, all code that it could import is sent, since a dataset may import while it is
read. From other folders (``PYTHONPATH``, ``sys.path``, a package installed from its sources), only
modules and packages that are already imported are sent. Python's library and installed packages are
not sent: workers have their own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Set
from typing import NamedTuple

from penstock.pool.code_files import OWN_LIMITS, TooMuchCodeError
from penstock.pool.job_code import PackedCode, pack_folder
from penstock.program_line import warn

_NOT_OWN = {*sys.stdlib_module_names, "__main__", "__mp_main__", "penstock", "torch"}
_INSTALLED = ("dist-packages", "site-packages")


class OwnFolder(NamedTuple):
    path: str  # with links resolved
    modules: frozenset[str] | None  # the top-level names that are sent; None: all


def pack_own_code(left_out: set[str], wanted: Set[str] = frozenset()) -> list[PackedCode]:
    """Pack the folders that :func:`own_folders` finds, except folders in ``left_out``. ``wanted``
    has files that are sent although they look like secrets.

    Never raise for files found there; a warning names the files that are not sent.
    """
    packed = (_pack(folder, wanted) for folder in own_folders() if folder.path not in left_out)
    return [each for each in packed if each is not None and each.paths]


def own_folders() -> list[OwnFolder]:
    """Return the folders of the program's modules, in import order."""
    imported: dict[str, set[str]] = {}
    for name, folder in _imported_modules():
        imported.setdefault(folder, set()).add(name)
    folders = {path: OwnFolder(path, frozenset(names)) for path, names in imported.items()}
    program = _program_folder()
    if program is not None:
        folders[program] = OwnFolder(program, None)
    return sorted(folders.values(), key=lambda folder: (place_in_path(folder.path), folder.path))


def place_in_path(folder: str) -> int:
    """Return the index of a folder in ``sys.path``; the number of entries if it is not there."""
    for place, entry in enumerate(sys.path):
        with contextlib.suppress(OSError):  # "" is the working directory, which may be gone
            if os.path.realpath(entry) == folder:
                return place
    return len(sys.path)


def _pack(folder: OwnFolder, wanted: Set[str]) -> PackedCode | None:
    modules = folder.modules
    if modules is None:
        try:
            return pack_folder(folder.path, OWN_LIMITS, wanted=wanted)
        except (TooMuchCodeError, OSError) as error:
            modules = frozenset(name for name, place in _imported_modules() if place == folder.path)
            _warn(folder, f"only the modules that the program has imported ({error})")
    taken = modules

    def is_taken(name: str) -> bool:
        return name.partition(".")[0] in taken

    try:
        return pack_folder(folder.path, OWN_LIMITS, is_taken, wanted)
    except (TooMuchCodeError, OSError) as error:
        _warn(folder, f"none ({error})")
        return None


def _warn(folder: OwnFolder, what: str) -> None:
    warn(
        f"the program's modules in {folder.path!r} that are sent to the pool's workers: {what}",
    )


def _program_folder() -> str | None:
    """Return the folder that the program was started from, if imports search it first."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None:  # interactive
        try:
            folder = os.getcwd()
        except OSError:
            return None
    else:
        spec = getattr(main, "__spec__", None)
        folder = os.path.dirname(os.path.realpath(file))
        for _ in range(spec.name.count(".") if spec is not None else 0):  # python -m
            folder = os.path.dirname(folder)
    folder = os.path.realpath(folder)
    if not _is_own(folder) or folder in map(os.path.realpath, _folders_of_commands()):
        return None
    library = place_in_path(os.path.realpath(sysconfig.get_path("stdlib")))
    return folder if place_in_path(folder) < library else None


def _imported_modules() -> Iterator[tuple[str, str]]:
    """Yield the program's top-level modules, each with the folder to import it from."""
    for name, module in list(sys.modules.items()):
        if "." in name or name in _NOT_OWN or not isinstance(module, types.ModuleType):
            continue
        for folder in _folders_to_import(name, module):
            if _is_own(folder):
                yield name, folder


def _folders_to_import(name: str, module: types.ModuleType) -> Iterator[str]:
    """Yield the folders from which an import finds the module. A module that was made from a file
    of another name has none."""
    names = object.__getattribute__(module, "__dict__")  # does not load a lazy module
    file, portions = names.get("__file__"), names.get("__path__")
    if isinstance(file, str):
        places = [file if portions is None else os.path.dirname(file)]
    else:
        places = [place for place in portions or () if isinstance(place, str)]
    for place in places:
        folder = os.path.dirname(place)
        is_by_name = os.path.basename(place).partition(".")[0] == name
        # Most modules are installed; skipping them avoids disk access, which may be slow.
        if is_by_name and not _is_installed(folder) and os.path.exists(place):
            yield os.path.realpath(folder)


def _is_own(folder: str) -> bool:
    return not _is_installed(folder) and os.path.isdir(folder)


def _is_installed(folder: str) -> bool:
    is_package = any(part in _INSTALLED for part in folder.split(os.sep))
    return is_package or f"{folder}{os.sep}".startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [sysconfig.get_path(name) for name in names]
    places += site.getsitepackages()
    if (of_user := site.getusersitepackages()) is not None:
        places.append(of_user)
    real = [os.path.realpath(place) for place in places]
    return tuple(place + os.sep for place in {*places, *real})


def _folders_of_commands() -> list[str]:
    return [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
