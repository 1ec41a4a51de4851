# SPDX-License-Identifier: Apache-2.0
"""Writes the pages of the reference from docstrings, headers and the help of the commands."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import penstock
from penstock import errors
from penstock.cli.command_line import COMMANDS
from staged_pages import write_text

# Types of results, which programs do not construct.
RESULTS = (
    "LoaderStats",
    "LoaderReport",
    "StepTimes",
    "WorkerTimes",
    "SkippedSample",
    "SlowSample",
    "EpochEnd",
    "WorkerChoice",
    "Telemetry",
    "StepTrace",
)
# Types of a plan's fields, which have no public names.
PARTS_OF_PLANS = ("PlannedCall", "PlannedEdge", "CutTotals", "RunningPrice")


def write_reference(root: Path, folder: Path) -> None:
    write_text(folder / "reference" / "python.md", python_page())
    write_text(folder / "reference" / "commands.md", commands_page())
    write_text(folder / "reference" / "cpp.md", cpp_page(root))


def python_page() -> str:
    parts = [
        "# The Python API",
        "The names in `penstock.__all__`, with their docstrings. "
        "[Options](options.md) lists the options, variables and methods in one table.",
    ]
    for name in sorted(penstock.__all__, key=str.lower):
        value = getattr(penstock, name)
        if name not in RESULTS and not _is_error(value):
            parts.append(f"## {name}\n\n{_autodoc(f'penstock.{name}', value)}")
    paths = [f"penstock.{name}" for name in RESULTS]
    paths += [f"penstock.graph.plan_record.{name}" for name in PARTS_OF_PLANS]
    parts.append(
        "## Results\n\nTypes of the objects that functions and methods return. `WorkerChoice` is "
        "native: `_C.pyi` describes its fields `workers`, `reason`, `measured`, `limit`, "
        "`limited_by`, `cpus` and `fewer`."
    )
    for path in paths:
        parts.append(_directive("autoclass", path, ":members:", ":exclude-members: __init__"))
    parts.append(
        "## Errors\n\nWhere torch's DataLoader raises an exception, penstock raises one of the "
        "same type."
    )
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
        "`python -m penstock` is the same as `penstock`. This is the help of each command:",
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
        "The headers that `find_package(Penstock)` provides, with their comments. [Training loops "
        "in C++](../how-to/cpp.md) shows their use. Doxygen's pages, one for each class, are <a "
        'href="../cpp/index.html">separate</a>.',
    ]
    for header in [first, *(one for one in headers if one != first)]:
        parts.append(f"## {header}\n\n{_directive('doxygenfile', header)}")
    return "\n\n".join(parts) + "\n"
