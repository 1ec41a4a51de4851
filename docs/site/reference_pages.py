# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the reference: of docstrings, of headers, and of what the commands say."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import penstock
from penstock import errors
from penstock.cli.command_line import COMMANDS
from staged_pages import write_text

# What public functions and attributes give and no program makes.
RESULTS = {
    "LoaderStats": "What `loader.stats()` gives.",
    "StepTimes": "Where the time of steps went: `stats().ledger`.",
    "WorkerTimes": "What one worker took, of `stats().workers`.",
    "SlowSample": "One of `stats().slow_samples`.",
    "EpochEnd": "How an epoch of all ranks ended: `stats().epoch_end`.",
    "LoaderReport": "What `loader.report()` gives.",
    "WorkerChoice": "What `loader.worker_choice` gives.",
    "Telemetry": "What `penstock.to_opentelemetry()` gives.",
    "StepTrace": "What `penstock.trace()` gives.",
}


def write_reference(root: Path, folder: Path) -> None:
    write_text(folder / "reference" / "python.md", python_page())
    write_text(folder / "reference" / "commands.md", commands_page())
    write_text(folder / "reference" / "cpp.md", cpp_page(root))


def python_page() -> str:
    parts = [
        "# The Python API",
        "What `import penstock` has: every name in `penstock.__all__`, from its docstring. "
        "[Options](options.md) has the options, variables and methods in one table.",
    ]
    for name in sorted(penstock.__all__, key=str.lower):
        value = getattr(penstock, name)
        if name not in RESULTS and not _is_error(value):
            parts.append(f"## {name}\n\n{_autodoc(f'penstock.{name}', value)}")
    parts.append("## Results\n\nThe types of results, for annotations.")
    for name, text in RESULTS.items():
        options = (":members:", ":exclude-members: __init__")
        parts.append(f"{text}\n\n{_directive('autoclass', f'penstock.{name}', *options)}")
    parts.append("## Errors\n\nWhere torch's DataLoader raises, this one raises torch's type.")
    for name, value in sorted(vars(errors).items()):
        if _is_error(value) and value.__module__ == errors.__name__:
            parts.append(_directive("autoexception", f"penstock.{name}", ":show-inheritance:"))
    return "\n\n".join(parts) + "\n"


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, (Exception, Warning))


def _autodoc(path: str, value: object) -> str:
    if inspect.isclass(value):
        return _directive("autoclass", path, ":members:")
    return _directive("autofunction", path)


def _directive(kind: str, path: str, *options: str) -> str:
    lines = [f".. {kind}:: {path}", *(f"   {option}" for option in options)]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```"


def commands_page() -> str:
    parts = [
        "# The commands",
        "`python -m penstock` is the same as `penstock`. Each command tells about itself:",
        f"```text\n{help_of()}```",
    ]
    for name in COMMANDS:
        parts.append(f"## penstock {name}\n\n```text\n{help_of(name)}```")
    return "\n\n".join(parts) + "\n"


def help_of(*command: str) -> str:
    """What `penstock COMMAND --help` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *command, "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout


def cpp_page(root: Path) -> str:
    headers = sorted(path.name for path in (root / "csrc" / "include" / "penstock").glob("*.h"))
    first = "penstock.h"
    parts = [
        "# The C++ API",
        "The headers that `find_package(Penstock)` brings, from their comments. [Training loops in "
        "C++](../how-to/cpp.md) shows their use. Doxygen's own pages, one for each class, are "
        '<a href="../cpp/index.html">beside these</a>.',
    ]
    for header in [first, *(one for one in headers if one != first)]:
        parts.append(f"## {header}\n\n{_directive('doxygenfile', header)}")
    return "\n\n".join(parts) + "\n"
