# SPDX-License-Identifier: Apache-2.0
"""Runs a program of the user's as ``python`` does, with torch's DataLoader replaced: a file, or a
module after -m, at the end of a command line.

The program becomes the module ``__main__``, so pickle finds its classes there and multiprocessing
finds its file for the processes that it spawns. Its tracebacks begin with its own frames.
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
    """There is no such program; says why in one line."""


def run_file(path: str, arguments: list[str], prepare: Callable[[], None] = lambda: None) -> None:
    """As ``python path arguments``. Raises the program's exceptions. ``prepare`` is called before
    the program begins, once there is one."""
    absolute = os.path.join(os.getcwd(), path)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        raise ProgramError(f"can't open file {absolute!r}: {reason}") from None
    prepare()
    _install_loader()
    _set_first_import_folder(os.path.dirname(os.path.realpath(path)))
    sys.argv = [path, *arguments]
    main = ModuleType("__main__")
    main.__file__ = absolute
    main.__loader__ = SourceFileLoader("__main__", absolute)
    main.__dict__["__cached__"] = None
    with _OurFramesUnprinted():
        _run(compile(source, absolute, "exec", dont_inherit=True), main)


def run_module(name: str, arguments: list[str], prepare: Callable[[], None] = lambda: None) -> None:
    """As ``python -m name arguments``. Raises the program's exceptions. ``prepare`` is called
    first: a package may begin to run while its module is looked for."""
    prepare()
    _install_loader()
    _set_first_import_folder(os.getcwd())
    # The arguments as a package sees them that is imported on the way.
    sys.argv = ["-m", *arguments]
    with _OurFramesUnprinted():
        spec = _find_program(name)
        loader: Any = spec.loader
        code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
        if code is None:
            raise ProgramError(f"{name} has no code that could be run")
        sys.argv[0] = spec.origin or name
        main = ModuleType("__main__")
        main.__spec__ = spec
        main.__loader__ = loader
        main.__package__ = spec.parent
        main.__file__ = spec.origin
        main.__dict__["__cached__"] = spec.cached
        _run(code, main)


def _install_loader() -> None:
    # Here, since it imports torch: a command that was called wrongly ends without it.
    from penstock.drop_in import install

    install()


def _find_program(name: str) -> ModuleSpec:
    """The module to run, of a package its ``__main__``."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package on the way to it misses something else
        spec = None
    except ValueError:
        spec = None  # not a name of a module
    if spec is None:
        raise ProgramError(f"there is no module named {name}")
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            raise ProgramError(f"{name} is a package; it cannot be run")
        return _find_program(f"{name}.__main__")
    return spec


def _set_first_import_folder(folder: str) -> None:
    # Where Python was told to put no folder first, the program gets none either.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder


def _run(code: CodeType, main: ModuleType) -> None:
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):  # later a module makes its annotations when asked for them
        main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


class _OurFramesUnprinted:
    """Makes Python print an error that leaves the block as if the block's caller had not been."""

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
    """The call that runs the program. It may be given what is to be called right before."""
    match program:
        case ["-m", module, *rest]:
            return functools.partial(run_module, module, rest)
        case ["-m"]:
            raise CommandError("-m is to be followed by the name of a module", command)
        case [path, *rest]:
            return functools.partial(run_file, path, rest)
        case _:
            raise CommandError("the program is missing: name a file, or a module with -m", command)


@contextlib.contextmanager
def named_if_missing(program: list[str]) -> Iterator[None]:
    """A program that there is not is an error of the call."""
    try:
        yield
    except ProgramError as error:
        folder, name = os.path.split(program[0])
        meant = ""
        with contextlib.suppress(OSError):
            if name.endswith(".py"):
                files = [file for file in os.listdir(folder or ".") if file.endswith(".py")]
                meant = did_you_mean(name, files)
        raise CommandError(f"{error}{meant}", None) from error
