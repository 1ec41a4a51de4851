# SPDX-License-Identifier: Apache-2.0
"""Runs a user's program like ``python``, with torch's DataLoader replaced: a file, or a module
after -m, at the end of a command line.

The program becomes the module ``__main__``, so pickle finds its classes there and multiprocessing
finds its file for the processes that it spawns. Its tracebacks start with the program's frames.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from penstock.cli.command_parser import CommandError, did_you_mean

PROGRAM_USAGE = """\
{command} [OPTION ...] PROGRAM.py [ARGUMENT ...]
{command} [OPTION ...] -m MODULE [ARGUMENT ...]"""


class ProgramError(Exception):
    """The program does not exist; the message is one line with the reason."""


def run_file(
    path: str,
    arguments: list[str],
    prepare: Callable[[], None] = lambda: None,
    *,
    keeps_loader: bool = False,
) -> None:
    """Run a file as ``python path arguments`` does. Raises the program's exceptions. ``prepare`` is
    called before the program starts, if the file exists. With ``keeps_loader`` torch's loader is
    not replaced."""
    absolute = os.path.join(os.getcwd(), path)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        raise ProgramError(f"can't open file {absolute!r}: {reason}") from None
    prepare()
    if not keeps_loader:
        _install_loader()
    _set_first_import_folder(os.path.dirname(os.path.realpath(path)))
    sys.argv = [path, *arguments]
    main = ModuleType("__main__")
    main.__file__ = absolute
    main.__loader__ = SourceFileLoader("__main__", absolute)
    main.__dict__["__cached__"] = None
    with _OwnFramesHidden():
        _run(compile(source, absolute, "exec", dont_inherit=True), main)


def run_module(
    name: str,
    arguments: list[str],
    prepare: Callable[[], None] = lambda: None,
    *,
    keeps_loader: bool = False,
) -> None:
    """Run a module as ``python -m name arguments`` does. Raises the program's exceptions.
    ``prepare`` is called first: a package may already run while its module is located. With
    ``keeps_loader`` torch's loader is not replaced."""
    prepare()
    if not keeps_loader:
        _install_loader()
    _set_first_import_folder(os.getcwd())
    # The arguments as seen by a package that is imported on the way.
    sys.argv = ["-m", *arguments]
    with _OwnFramesHidden():
        spec = _find_program(name)
        loader: Any = spec.loader
        code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
        if code is None:
            raise ProgramError(f"{name} has no code to run")
        sys.argv[0] = spec.origin or name
        main = ModuleType("__main__")
        main.__spec__ = spec
        main.__loader__ = loader
        main.__package__ = spec.parent
        main.__file__ = spec.origin
        main.__dict__["__cached__"] = spec.cached
        _run(code, main)


def _install_loader() -> None:
    # Imported here, as it imports torch: a command that was called wrongly ends without it.
    from penstock.drop_in import install

    install()


def _find_program(name: str) -> ModuleSpec:
    """Return the spec of the module to run; for a package, of its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a parent package fails to import another module
        spec = None
    except ValueError:
        spec = None  # not a module name
    if spec is None:
        raise ProgramError(f"no module named {name}")
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            raise ProgramError(f"{name} is a package and cannot be run")
        return _find_program(f"{name}.__main__")
    return spec


def _set_first_import_folder(folder: str) -> None:
    # If Python was asked to prepend no folder, the program gets none either.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder


def _run(code: CodeType, main: ModuleType) -> None:
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # later versions evaluate a module's annotations lazily
        main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


class _OwnFramesHidden:
    """Makes Python print an error that leaves the block without the frames of the block's
    caller."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while traceback is not None and traceback.tb_frame.f_globals is globals():
            traceback = traceback.tb_next
        hook = sys.excepthook

        def print_error(
            kind: type[BaseException], value: BaseException, full: TracebackType | None
        ) -> None:
            own = traceback if value is error else full
            hook(kind, value.with_traceback(own), own)

        if error is not None:
            sys.excepthook = print_error


def start_of(program: list[str], command: str) -> Callable[..., None]:
    """Return the call that runs the program. It accepts a function to call right before."""
    match program:
        case ["-m", module, *rest]:
            return functools.partial(run_module, module, rest)
        case ["-m"]:
            raise CommandError("-m requires a module name", command)
        case [path, *rest]:
            return functools.partial(run_file, path, rest)
        case _:
            raise CommandError("missing program; name a file, or a module with -m", command)


@contextlib.contextmanager
def named_if_missing(program: list[str]) -> Iterator[None]:
    """Report a missing program as a usage error."""
    try:
        yield
    except ProgramError as error:
        folder, name = os.path.split(program[0])
        meant = ""
        with contextlib.suppress(OSError):
            if name.endswith(".py"):
                files = [file for file in os.listdir(folder or ".") if file.endswith(".py")]
                meant = did_you_mean(name, files)
        raise CommandError(f"{error}{meant}", None, "program-missing") from error
