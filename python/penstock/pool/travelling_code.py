# SPDX-License-Identifier: Apache-2.0
"""The user's modules that are sent with a loader's jobs: the program's modules, and named ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock.pool.code_files import looks_secret
from penstock.pool.job_code import PackedCode, pack_code
from penstock.pool.own_code import pack_own_code, place_in_path

CODE_PATHS_VARIABLE = "PENSTOCK_CODE_PATHS"


class CodePacker:
    """Packs modules once, when the loader first sends a job.

    Later epochs use the files as they were then, just as the trainer continues with the modules
    that it has imported: editing a file during training changes neither, and creates no new job.
    """

    def __init__(self) -> None:
        self._paths: list[str] | None = None
        self._packed: list[PackedCode] = []

    def packed(self, code_paths: Sequence[str | os.PathLike[str]] | None) -> list[PackedCode]:
        """Return the packed modules in import order. Pack again if ``code_paths`` have been
        assigned since. Raise the exceptions of pack_code for code that was named.
        """
        if code_paths is None:
            return []
        paths = [os.fspath(path) for path in code_paths]
        if paths != self._paths:
            self._packed = _pack(paths or _paths_of_variable())
            self._paths = paths
        return self._packed


def export_code_paths(paths: Sequence[str]) -> None:
    """Set the environment variable to ``paths`` for this process and its children."""
    os.environ[CODE_PATHS_VARIABLE] = os.pathsep.join(map(os.path.abspath, paths))


def _pack(paths: Sequence[str]) -> list[PackedCode]:
    wanted = {path: os.path.realpath(path) for path in paths if _is_single_secret(path)}
    secrets = frozenset(wanted.values())
    named = pack_code([path for path in paths if path not in wanted], secrets)
    own = pack_own_code({each.root for each in named}, secrets)
    of_each = {each.id: each for each in [*own, *named]}
    for path, real in wanted.items():
        if not any(real in each.paths for each in of_each.values()):
            raise ValueError(
                f"code_paths must name .py files, folders of modules, or files of a sent package "
                f"that look like secrets, got {path!r}; put the file into the package that reads "
                f"it"
            )
    return sorted(of_each.values(), key=lambda each: _place(each, is_named=each in named))


def _is_single_secret(path: str) -> bool:
    return looks_secret(path) and os.path.isfile(path)


def _place(code: PackedCode, is_named: bool) -> int:
    """Return a sort key by import order; named folders that are not in sys.path are first."""
    folder = os.path.dirname(code.root) if os.path.isfile(code.root) else code.root
    place = place_in_path(folder)
    return -1 if is_named and place == len(sys.path) else place


def _paths_of_variable() -> list[str]:
    paths = [path for path in os.environ.get(CODE_PATHS_VARIABLE, "").split(os.pathsep) if path]
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(
                f"the environment variable {CODE_PATHS_VARIABLE} must name existing folders or .py "
                f"files of your modules, separated by {os.pathsep!r}, got {path!r}"
            )
    return paths
