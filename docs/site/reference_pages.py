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

# What public functions give and no program makes.
RESULTS = {
    "penstock.loader.stats.LoaderStats": "What `loader.stats()` gives.",
    "penstock.loader.step_times.StepTimes": "Where the time of steps went: `stats().ledger`.",
    "penstock.loader.step_times.WorkerTimes": "What one worker took, of `stats().workers`.",
    "penstock.loader.step_times.SlowSample": "One of `stats().slow_samples`.",
    "penstock.observing.open_telemetry.Telemetry": "What `penstock.to_opentelemetry()` gives.",
    "penstock.observing.step_trace.StepTrace": "What `penstock.trace()` gives.",
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
        parts.append(f"## {name}\n\n{_autodoc(f'penstock.{name}', value)}")
    parts.append("## Results")
    for path, text in RESULTS.items():
        parts.append(
            f"{text}\n\n{_directive('autoclass', path, ':members:', ':exclude-members: __init__')}"
        )
    parts.append(
        "## Errors\n\nThose that `penstock.errors` has besides. What torch's DataLoader raises, "
        "this one raises, too."
    )
    for name, value in sorted(vars(errors).items()):
        if inspect.isclass(value) and issubclass(value, (Exception, Warning)):
            if value.__module__ == errors.__name__ and name not in penstock.__all__:
                parts.append(
                    _directive("autoexception", f"penstock.errors.{name}", ":show-inheritance:")
                )
    return "\n\n".join(parts) + "\n"


def _autodoc(path: str, value: object) -> str:
    if inspect.isclass(value) and issubclass(value, (Exception, Warning)):
        return _directive("autoexception", path, ":show-inheritance:")
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
