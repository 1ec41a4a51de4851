# SPDX-License-Identifier: Apache-2.0
"""Select the files of a folder that are code and are sent to pool workers.

Modules are sent from any folder: ``.py``, ``.pyi``, ``.so``. Other files are sent if they are small
and lie in a package, which may read them as its data. Files that a program writes next to its code
(checkpoints, logs, caches) are not sent, since they would make each run a different job. Hidden
files and folders, virtual environments, and folders that cannot be imported are skipped, too. A
link to a folder is followed if the folder has modules, but not if it has only data.

Data files that look like secrets, such as keys, are not sent either, because other people may own
the pool's workers, too. They are sent only if the user names them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

_MODULE = re.compile(r"\.(py|pyi|so(\.\d+)*)$")  # or a library that a module is linked with
_WRITTEN_SUFFIXES = (".ckpt", ".log", ".onnx", ".pt", ".pth", ".pyc", ".pyo", ".safetensors")
_WRITTEN_PREFIXES = ("events.out.tfevents",)
_NEVER_CODE = ("__pycache__", "dist-packages", "node_modules", "site-packages")
_METADATA_SUFFIXES = (".dist-info", ".egg-info")  # which importlib.metadata reads
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")

# The usual names of such files. A file of tokens may be a vocabulary.
_SECRET = re.compile(
    r"""\.(secret|pem|key|p12|pfx|ppk|jks|keystore|kdbx)$
    |^id_(rsa|dsa|ecdsa|ed25519)
    |(^|[^a-z])(credentials?|secrets?|passwords?|passwd|netrc|htpasswd|kubeconfig)([^a-z]|$)
    |(^|[^a-z])(access|api|auth|bearer|github|gitlab|hf|refresh)[^a-z]?(token|key)s?([^a-z]|$)
    |^token(\.[a-z]+)?$
    |^service[^a-z]?account""",
    re.VERBOSE,
)

_MODULE_BYTES_MAX = 64 << 20
_DATA_BYTES_MAX = 8 << 20  # enough for a vocabulary, too little for a checkpoint
_NAMED_MAX = 5
_ADVICE = "name folders that contain only code in code_paths"


class CodeFile(NamedTuple):
    name: str  # below the folder, with slashes
    path: str
    byte_count: int


@dataclass(frozen=True, slots=True)
class CodeLimits:
    file_count: int
    byte_count: int
    entry_count: int  # entries examined, in all folders
    # The most entries of a folder that is not a package: a larger one is full of data. None: no
    # limit.
    plain_entry_count: int | None
    # The maximal nesting of folders without a module. None: no limit.
    empty_depth: int | None


# The limits of a folder that the user has named.
NAMED_LIMITS = CodeLimits(20_000, 256 << 20, 1_000_000, None, None)
# The limits of a program's folder, where the user may keep other files, too.
OWN_LIMITS = CodeLimits(2_000, 32 << 20, 100_000, 2_000, 2)


class TooMuchCodeError(ValueError):
    """The folder exceeds the limits of a search. The message names the largest files."""


class Code(NamedTuple):
    files: list[CodeFile]  # sorted
    too_large: list[CodeFile]  # left out
    secret: list[CodeFile]  # files that look like secrets; left out


def find_code(
    root: str,
    limits: CodeLimits,
    is_taken: Callable[[str], bool] | None = None,
    wanted: Set[str] = frozenset(),
) -> Code:
    """Return the code files of the folder ``root``.

    ``is_taken`` selects entries of ``root`` itself. ``wanted`` has files, with links resolved, that
    are sent although they look like secrets. A file that this process cannot read is left out: the
    process could not import it either. Raise TooMuchCodeError or OSError.
    """
    every = sorted(_Search(root, limits).below("", root, (root,), is_taken or _any))
    secret = [
        file
        for file in every
        if looks_secret(file.name) and os.path.realpath(file.path) not in wanted
    ]
    found = [file for file in every if file not in secret]
    files = [file for file in found if file.byte_count <= _byte_count_max(file)]
    if sum(file.byte_count for file in files) > limits.byte_count:
        raise TooMuchCodeError(
            f"{root!r} has more than {format_bytes(limits.byte_count)} of code, the limit for "
            f"workers (largest files: {format_files(files)}); {_ADVICE}"
        )
    too_large = [file for file in found if file.byte_count > _byte_count_max(file)]
    return Code(files, too_large, secret)


def looks_secret(name: str) -> bool:
    """Return whether the name suggests a key or a password. Modules never count as secrets."""
    base = name.rpartition("/")[2].lower()
    return _SECRET.search(base) is not None and _MODULE.search(base) is None


def format_limits() -> str:
    return f"modules up to {format_bytes(_MODULE_BYTES_MAX)}, data of packages up to " + (
        format_bytes(_DATA_BYTES_MAX)
    )


def format_files(files: Sequence[CodeFile]) -> str:
    """Format the names and sizes of the largest files."""
    by_size = sorted(files, key=lambda file: -file.byte_count)
    named = [f"{file.name} of {format_bytes(file.byte_count)}" for file in by_size[:_NAMED_MAX]]
    rest = len(files) - len(named)
    return ", ".join(named) + (f", and {rest} more" if rest else "")


def format_bytes(count: int) -> str:
    return f"{count / (1 << 20):.3g} MiB"


class _Search:
    def __init__(self, root: str, limits: CodeLimits) -> None:
        self._root = root
        self._limits = limits
        self._file_count = 0
        self._entry_count = 0

    def below(
        self,
        prefix: str,
        folder: str,
        above: tuple[str, ...],
        is_taken: Callable[[str], bool],
        is_package: bool = False,
        empty_depth: int = 0,
    ) -> Iterator[CodeFile]:
        """Yield the code files below ``folder``; ``above`` has its real parent folders."""
        try:
            names = self._names(folder, is_package or not prefix)
        except PermissionError:
            names = None
        if names is None:
            return
        is_package = is_package or (bool(prefix) and "__init__.py" in names)
        has_code = is_package or any(map(_MODULE.search, names))
        if not has_code and os.path.islink(folder):
            return
        depth = 0 if has_code else empty_depth
        can_go_on = self._limits.empty_depth is None or depth < self._limits.empty_depth
        for name in filter(is_taken, names):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                is_metadata = not prefix and name.endswith(_METADATA_SUFFIXES)
                is_data_folder = is_package or is_metadata
                if name in _NEVER_CODE or not (is_data_folder or name.isidentifier()):
                    continue
                real = os.path.realpath(path)
                if can_go_on and real not in above and not _is_environment(path):
                    yield from self.below(
                        f"{prefix}{name}/", path, (*above, real), _any, is_data_folder, depth + 1
                    )
            elif _MODULE.search(name) or (is_package and _is_data(name)):
                if os.path.isfile(path) and os.access(path, os.R_OK):
                    yield self._file(f"{prefix}{name}", path)

    def _names(self, folder: str, is_all_wanted: bool) -> list[str] | None:
        """Return the entries that are not hidden; None if there are too many for a code folder."""
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                names.append(entry.name)
                self._entry_count += 1
                if self._entry_count > self._limits.entry_count:
                    raise TooMuchCodeError(
                        f"{self._root!r} has more than {self._limits.entry_count} files and "
                        f"folders to search; {_ADVICE}"
                    )
                if is_all_wanted or self._limits.plain_entry_count is None:
                    continue
                if len(names) > self._limits.plain_entry_count and not os.path.exists(
                    os.path.join(folder, "__init__.py")
                ):
                    return None
        return sorted(name for name in names if not name.startswith("."))

    def _file(self, name: str, path: str) -> CodeFile:
        self._file_count += 1
        if self._file_count > self._limits.file_count:
            raise TooMuchCodeError(
                f"{self._root!r} has more than {self._limits.file_count} code files, the limit "
                f"for workers; {_ADVICE}"
            )
        return CodeFile(name, path, os.stat(path).st_size)


def _any(name: str) -> bool:
    return True


def _is_environment(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, mark)) for mark in _ENVIRONMENT_MARKS)


def _is_data(name: str) -> bool:
    return not name.endswith(_WRITTEN_SUFFIXES) and not name.startswith(_WRITTEN_PREFIXES)


def _byte_count_max(file: CodeFile) -> int:
    return _MODULE_BYTES_MAX if _MODULE.search(file.name) else _DATA_BYTES_MAX
