# SPDX-License-Identifier: Apache-2.0
"""The user's own modules on their way to workers: packed at the trainer, importable at a worker.

An entry of ``code_paths`` is a folder, which is then importable from as if it were in sys.path, or
a single .py file. Left out are folders and files whose names begin with a dot, ``__pycache__``,
virtual environments, and, with a warning, files above 64 MiB, which are data rather than code.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import pkgutil
import shutil
import stat
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.errors import UnsupportedError

_FILE_BYTES_MAX = 64 << 20
_TOTAL_BYTES_MAX = 256 << 20
_FILES_MAX = 20_000
_ADVICE = "name a folder in code_paths that has the code alone"
# Never forgotten, even if a job's code has modules of these names: they cannot be imported twice.
_IMPORTED_ONCE = {*sys.stdlib_module_names, "__main__", "cloudpickle", "numpy", "penstock", "torch"}


class PackedCode(NamedTuple):
    name: str  # for people
    data: bytes  # a zip file, the same for the same files
    id: bytes  # its SHA-256


def pack_code(code_paths: Sequence[str | os.PathLike[str]]) -> list[PackedCode]:
    """Raises TypeError, ValueError and OSError for what cannot be packed."""
    if isinstance(code_paths, (str, os.PathLike)):
        raise TypeError(
            f"code_paths is {os.fspath(code_paths)!r}; a sequence of folders and .py files is "
            f"expected: put it into a list"
        )
    roots = dict.fromkeys(os.path.realpath(path) for path in code_paths)
    return [_pack(root) for root in roots]


def extract_code(data: bytes, code_id: str, code_root: str) -> str:
    """The folder under ``code_root`` that has what :func:`pack_code` packed.

    ``code_id`` names the content, so that a folder of that name already has it; several processes
    may be at it at once. Raises UnsupportedError for a file that cannot be extracted, OSError.
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


def put_in_front(folders: Sequence[str], code_root: str) -> None:
    """Makes the modules of ``folders``, and of no other folder under ``code_root``, importable.

    Modules that came from other folders there are forgotten, as are those that these folders have
    under the same name, so that each job imports its own. Does nothing when it is so already.
    """
    if is_in_front(folders, code_root):
        return
    gone = _in_use(code_root)
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in gone)]
    importlib.invalidate_caches()
    own_names = {module.name for module in pkgutil.iter_modules(folders)} - _IMPORTED_ONCE
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in own_names or _comes_from(module, gone):
            del sys.modules[name]


def is_in_front(folders: Sequence[str], code_root: str) -> bool:
    """Whether what a job imports now would come from its own code."""
    return _in_use(code_root) == list(folders)


def _in_use(code_root: str) -> list[str]:
    code_root = os.path.realpath(code_root)
    return [entry for entry in sys.path if os.path.dirname(entry) == code_root]


def _comes_from(module: Any, folders: Iterable[str]) -> bool:
    try:
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    except TypeError:  # one of torch's stand-ins, which has any attribute
        return False
    heads = tuple(folder + os.sep for folder in folders)
    return any(isinstance(place, str) and f"{place}{os.sep}".startswith(heads) for place in places)


class _File(NamedTuple):
    name: str  # in the zip file
    path: str


def _pack(root: str) -> PackedCode:
    if os.path.isdir(root):
        files = sorted(_files_below(root, "", root, (root,)))
    elif os.path.isfile(root) and root.endswith(".py"):
        files = [_File(os.path.basename(root), root)]
    else:
        raise ValueError(
            f"code_paths has {root!r}, which is neither a folder nor a .py file; name the folder "
            f"that has the modules, as one would in sys.path"
        )
    target = io.BytesIO()
    left_out: list[str] = []
    byte_count = 0
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            with open(file.path, "rb") as source:
                data = source.read(_FILE_BYTES_MAX + 1)
            if len(data) > _FILE_BYTES_MAX:
                left_out.append(file.name)
                continue
            byte_count += len(data)
            if byte_count > _TOTAL_BYTES_MAX:
                raise ValueError(
                    f"code_paths has {root!r} with more than {_TOTAL_BYTES_MAX >> 20} MiB of "
                    f"files, the most that travels as code; {_ADVICE}"
                )
            archive.writestr(_entry(file), data)
    if left_out:
        warnings.warn(
            f"code_paths has {root!r} with files above {_FILE_BYTES_MAX >> 20} MiB, which do not "
            f"travel to workers: {', '.join(left_out[:10])}; if workers need them, put them where "
            f"all workers can read them",
            stacklevel=2,
        )
    data = target.getvalue()
    return PackedCode(os.path.basename(root), data, hashlib.sha256(data).digest())


def _entry(file: _File) -> zipfile.ZipInfo:
    """Says nothing of when and where, so that the same files give the same bytes."""
    entry = zipfile.ZipInfo(file.name)  # of 1980
    entry.create_system = 3
    entry.compress_type = zipfile.ZIP_DEFLATED
    is_program = os.stat(file.path).st_mode & stat.S_IXUSR
    entry.external_attr = (stat.S_IFREG | (0o700 if is_program else 0o600)) << 16
    return entry


def _files_below(root: str, prefix: str, folder: str, above: tuple[str, ...]) -> Iterator[_File]:
    """``above`` are the folders that lead here, as links resolve."""
    count = 0
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith(".") or name == "__pycache__" or name.endswith(".pyc"):
            continue
        if os.path.islink(path):
            _check_link(root, path)
        if os.path.isdir(path):
            real = os.path.realpath(path)
            if real in above:
                raise ValueError(
                    f"code_paths has {root!r}, in which {path!r} links to a folder that it is in; "
                    f"remove the link, or {_ADVICE}"
                )
            if os.path.exists(os.path.join(path, "pyvenv.cfg")):
                continue
            found = _files_below(root, f"{prefix}{name}/", path, (*above, real))
        elif os.path.isfile(path):
            found = iter((_File(f"{prefix}{name}", path),))
        else:
            continue  # a socket, a pipe, a link to nothing
        for file in found:
            count += 1
            if count > _FILES_MAX:
                raise ValueError(
                    f"code_paths has {root!r} with more than {_FILES_MAX} files, the most that "
                    f"travel as code; {_ADVICE}"
                )
            yield file


def _check_link(root: str, path: str) -> None:
    target = os.path.realpath(path)
    if target != root and not target.startswith(root + os.sep):
        raise ValueError(
            f"code_paths has {root!r}, in which {path!r} links to {target!r}, outside of it; a "
            f"folder with all its files is expected, so copy the file there, or name what it links "
            f"to in code_paths as well"
        )


def _make_private(code_root: str) -> None:
    """Code is run from here: nobody else may write to it."""
    os.makedirs(code_root, mode=0o700, exist_ok=True)
    found = os.lstat(code_root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UnsupportedError(
            f"the folder for the code of jobs, {code_root!r}, has mode "
            f"{stat.filemode(found.st_mode)} and belongs to user {found.st_uid}; one of this user "
            f"({os.geteuid()}) that nobody else may write to is expected, so remove or change it"
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
            f"its code is no zip file that can be read: {error}; send the job again with the same "
            f"version of penstock on both sides"
        ) from error


def _check_entries(entries: Sequence[zipfile.ZipInfo]) -> None:
    names = [entry.filename for entry in entries]
    reason = ""
    if sum(entry.file_size for entry in entries) > _TOTAL_BYTES_MAX:
        reason = f"has more than {_TOTAL_BYTES_MAX >> 20} MiB"
    elif len(names) > _FILES_MAX:
        reason = f"has more than {_FILES_MAX} files"
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
