# SPDX-License-Identifier: Apache-2.0
"""Pack modules at the trainer, and make them importable at a worker.

A folder becomes a zip file of its code files (selected by code_files.py). A worker extracts it into
a temporary folder and imports from it as if the folder were in its sys.path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import io
import os
import pkgutil
import shutil
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from penstock.errors import UnsupportedError
from penstock.pool.code_files import (
    NAMED_LIMITS,
    Code,
    CodeFile,
    CodeLimits,
    find_code,
    format_files,
    format_limits,
)
from penstock.program_line import warn

# Never unloaded, even if a job's code has modules of these names: they cannot be imported twice.
_IMPORTED_ONCE = {*sys.stdlib_module_names, "__main__", "cloudpickle", "numpy", "penstock", "torch"}


class PackedCode(NamedTuple):
    root: str  # the folder or file at the trainer, with links resolved
    data: bytes  # a zip file, the same for the same files
    id: bytes  # its SHA-256
    paths: frozenset[str]  # of its files at the trainer, with links resolved


def pack_code(
    code_paths: Sequence[str | os.PathLike[str]], wanted: Set[str] = frozenset()
) -> list[PackedCode]:
    """Pack folders and single .py files. Warn about files that are too large, and about files that
    look like secrets and are not in ``wanted``.

    Raise TypeError, ValueError or OSError for files that cannot be packed.
    """
    if isinstance(code_paths, (str, os.PathLike)):
        raise TypeError(
            f"code_paths must be a sequence of folders and .py files, got "
            f"{os.fspath(code_paths)!r}; put it into a list"
        )
    roots = dict.fromkeys(os.path.realpath(path) for path in code_paths)
    return [_pack(root, wanted) for root in roots]


def pack_folder(
    root: str,
    limits: CodeLimits,
    is_taken: Callable[[str], bool] | None = None,
    wanted: Set[str] = frozenset(),
) -> PackedCode:
    """Pack the code that :func:`~penstock.pool.code_files.find_code` finds, and raise its
    exceptions."""
    return _packed(root, find_code(root, limits, is_taken, wanted))


def extract_code(data: bytes, code_id: str, code_root: str) -> str:
    """Return the folder under ``code_root`` with the files of :func:`pack_code`, extracting it if
    needed.

    ``code_id`` identifies the content, so an existing folder of that name already has it; several
    processes may extract it concurrently. Raise OSError, or UnsupportedError for a file that cannot
    be extracted.
    """
    _make_private(code_root)
    code_root = os.path.realpath(code_root)
    folder = os.path.join(code_root, code_id)
    if os.path.isdir(folder):
        return folder
    made = tempfile.mkdtemp(prefix="new-", dir=code_root)
    try:
        _extract(data, made)
        try:
            os.rename(made, folder)
        except OSError:
            if not os.path.isdir(folder):  # else another process was first
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def put_first_in_path(folders: Sequence[str], code_root: str) -> None:
    """Make the modules of ``folders``, and of no other folder under ``code_root``, importable.

    Unload modules that were imported from other folders there, and modules whose names these
    folders also have, so that each job imports its own code. Return early if that is already so.
    """
    if is_first_in_path(folders, code_root):
        return
    gone = _in_use(code_root)
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in gone)]
    importlib.invalidate_caches()
    own_names = {module.name for module in pkgutil.iter_modules(folders)} - _IMPORTED_ONCE
    # All are found before one is unloaded: the path of a namespace package is read from its parent.
    unloaded = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in own_names or _comes_from(module, gone)
    ]
    for name in unloaded:
        del sys.modules[name]


def is_first_in_path(folders: Sequence[str], code_root: str) -> bool:
    """Return whether an import in a job would now find the job's code."""
    return _in_use(code_root) == list(folders)


def _in_use(code_root: str) -> list[str]:
    code_root = os.path.realpath(code_root)
    return [entry for entry in sys.path if os.path.dirname(entry) == code_root]


def _comes_from(module: Any, folders: Iterable[str]) -> bool:
    try:
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    except TypeError:  # a placeholder of torch, which has any attribute
        return False
    heads = tuple(folder + os.sep for folder in folders)
    return any(isinstance(place, str) and f"{place}{os.sep}".startswith(heads) for place in places)


def _packed(root: str, code: Code) -> PackedCode:
    if code.secret:
        warn(
            f"files in {root!r} that look like secrets are not sent to workers: "
            f"{format_files(code.secret)}; if workers need one, and may have it, name the file "
            f"itself in code_paths",
        )
    return _zip(root, code.files)


def _pack(root: str, wanted: Set[str]) -> PackedCode:
    if os.path.isfile(root) and root.endswith(".py"):
        return _zip(root, [CodeFile(os.path.basename(root), root, os.stat(root).st_size)])
    if not os.path.isdir(root):
        raise ValueError(
            f"code_paths must name folders or .py files, got {root!r}; name the folder that "
            f"contains the modules, as in sys.path"
        )
    code = find_code(root, NAMED_LIMITS, wanted=wanted)
    if code.too_large:
        warn(
            f"files in {root!r} of code_paths are too large to be sent to workers: "
            f"{format_files(code.too_large)} (limits: {format_limits()}); if workers need "
            f"them, store them where all workers can read them",
        )
    return _packed(root, code)


def _zip(root: str, files: Sequence[CodeFile]) -> PackedCode:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            with open(file.path, "rb") as source:
                archive.writestr(_entry(file), source.read(file.byte_count))
    data = target.getvalue()
    paths = frozenset(os.path.realpath(file.path) for file in files)
    return PackedCode(root, data, hashlib.sha256(data).digest(), paths)


def _entry(file: CodeFile) -> zipfile.ZipInfo:
    """Return a zip entry without time or origin, so that equal files give equal bytes."""
    entry = zipfile.ZipInfo(file.name)  # with the default date in 1980
    entry.create_system = 3
    entry.compress_type = zipfile.ZIP_DEFLATED
    is_program = os.stat(file.path).st_mode & stat.S_IXUSR
    entry.external_attr = (stat.S_IFREG | (0o700 if is_program else 0o600)) << 16
    return entry


def _make_private(code_root: str) -> None:
    """Create ``code_root``, and check that no other user may write to it: code runs from here."""
    os.makedirs(code_root, mode=0o700, exist_ok=True)
    found = os.lstat(code_root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UnsupportedError(
            f"the folder for the code of jobs must belong to this user ({os.geteuid()}) and be "
            f"writable by no other user, got {code_root!r} with mode "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; remove or change it"
        )


def _extract(data: bytes, folder: str) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            _check_entries(archive.infolist())
            for entry in archive.infolist():
                path = os.path.join(folder, *entry.filename.split("/"))
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                mode = 0o700 if entry.external_attr >> 16 & stat.S_IXUSR else 0o600
                with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
                    file.write(archive.read(entry))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError) as error:
        raise UnsupportedError(
            f"its code is not a readable zip file: {error}; send the job again with the same "
            f"version of penstock on both sides"
        ) from error


def _check_entries(entries: Sequence[zipfile.ZipInfo]) -> None:
    names = [entry.filename for entry in entries]
    reason = ""
    if sum(entry.file_size for entry in entries) > NAMED_LIMITS.byte_count:
        reason = f"has more than {NAMED_LIMITS.byte_count >> 20} MiB"
    elif len(names) > NAMED_LIMITS.file_count:
        reason = f"has more than {NAMED_LIMITS.file_count} files"
    elif len(set(names)) < len(names):
        reason = "has a file twice"
    elif unsafe := [name for name in names if not _is_safe(name)]:
        reason = f"has a file named {unsafe[0]!r}"
    if reason:
        raise UnsupportedError(
            f"its code {reason}, which penstock never packs; send the job again with the same "
            f"version of penstock on both sides"
        )


def _is_safe(name: str) -> bool:
    parts = name.split("/")
    return "\\" not in name and "\0" not in name and not {"", ".", ".."} & set(parts)


class CodeFolder:
    """The temporary folder into which a pool worker extracts the modules of jobs, with mode 0700;
    it exists from construction until :meth:`remove`.

    The process that started the worker owns the folder, since a killed worker cannot remove it. A
    folder left by a killed owner is removed by the next owner that the same user starts. A folder
    in use is locked. Its process id would not be enough: containers that share /tmp have separate
    process ids, and ids are reused.
    """

    def __init__(self) -> None:
        _remove_orphans()
        self.path, self._lock_fd = _make_locked()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _folder_prefix() -> str:
    return f"penstock-code-{os.getuid()}-"


def _make_locked() -> tuple[str, int | None]:
    while True:
        # The process id is for people who look into /tmp.
        path = tempfile.mkdtemp(prefix=f"{_folder_prefix()}{os.getpid()}-")
        try:
            lock_fd = _try_lock(path)
        except OSError:
            return path, None  # this file system has no locks, so the folder is never removed early
        if lock_fd is not None:
            return path, lock_fd
        # Another process took the folder for an orphan before it was locked.


def _try_lock(path: str) -> int | None:
    """Return a descriptor that locks the folder until it is closed; None if another process has
    locked or removed the folder.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, lock_fd)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(lock_fd), os.lstat(path))
        except (BlockingIOError, FileNotFoundError):
            return None
        if is_there:
            stack.pop_all()
            return lock_fd
    return None


def _remove_orphans() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_folder_prefix()}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.getuid():
                continue
            lock_fd = _try_lock(str(path))
            if lock_fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock_fd)
