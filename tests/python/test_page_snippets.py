# SPDX-License-Identifier: Apache-2.0
"""The code on the pages for users runs; page_snippets.py describes how."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpp_programs import configure, run
from engine_pools import needs_ray, needs_slurm
from native_build import native_folder
from page_snippets import (
    ROOT,
    RUN,
    Snippet,
    commands_in,
    cpp_of,
    pages,
    penstock_arguments,
    program_of,
    snippets_of,
)
from pool_processes import SECONDS_MAX
from slurm_cluster import SlurmCluster

PRELUDE = "from snippet_world import *"
RUN_S_MAX = 240
# Fences that are only compiled. Each has its reason on its page; another one needs a good reason.
NOT_RUN_MAX = 2
INLINE = re.compile(r"`(penstock(?:-worker)? [^`\n]+)`")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(what: str) -> list[Path]:
    found = {
        "python": lambda page: program_of(snippets_of(page), PRELUDE) is not None,
        "cpp": lambda page: cpp_of(snippets_of(page)) is not None,
        **{
            mark: functools.partial(lambda mark, page: bool(commands_of(page, mark)), mark)
            for mark in RUN
        },
    }[what]
    return [page for page in pages() if found(page)]


def test_fences_not_run_are_few_and_have_reasons() -> None:
    reasons = [one.reason_not_run for page in pages() for one in snippets_of(page)]
    kept = [reason for reason in reasons if reason is not None]
    assert all(len(reason.split()) >= 3 for reason in kept), kept
    assert len(kept) <= NOT_RUN_MAX, kept


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("page", pages_with("python"), ids=named)
def test_python_snippets_of_page_run(page: Path, tmp_path: Path) -> None:
    program = program_of(snippets_of(page), PRELUDE)
    assert program is not None
    (tmp_path / "page.py").write_text(program)
    done = bounded([sys.executable, "page.py"], tmp_path)
    assert done.returncode == 0, f"{named(page)} is page.py\n{done.stdout}{done.stderr}"


def commands_of(page: Path, mark: str) -> list[str]:
    found = [one for one in snippets_of(page) if mark in one.marks]
    return [command for one in found for command in commands_in(one)]


def check_commands(page: Path, mark: str, folder: Path) -> None:
    """They run, and processes that they leave behind end when asked to."""
    for one in snippets_of(page):
        if one.file_name is not None:
            (folder / one.file_name).write_text(one.code)
    commands = commands_of(page, mark)
    end = "trap 'running=$(jobs -p); [ -z \"$running\" ] || kill $running || true; wait' EXIT"
    done = bounded(["bash", "-c", "\n".join(["set -eu", end, *commands, ""])], folder)
    logs = "".join(f"== {one.name}\n{one.read_text()}" for one in sorted(folder.glob("*.log")))
    script = "\n".join(commands)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}{logs}"
    assert running_in(folder) == []


def running_in(folder: Path) -> list[str]:
    """The commands of processes that were started in a folder and are still running."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("run"), ids=named)
def test_commands_of_page_run(page: Path, tmp_path: Path) -> None:
    check_commands(page, "run", tmp_path)


@needs_slurm
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("run on slurm"), ids=named)
def test_commands_of_page_run_on_slurm(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = SlurmCluster(tmp_path / "slurm")
    try:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "page").mkdir()
        check_commands(page, "run on slurm", tmp_path / "page")
    finally:
        cluster.close()


@needs_ray
@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("run on ray"), ids=named)
def test_commands_of_page_run_on_ray(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    program = [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cluster:
        assert cluster.stdout is not None
        lines = iter(cluster.stdout.readline, "")
        address = next(line for line in lines if line.startswith("address ")).split()[1]
        monkeypatch.setenv("RAY_ADDRESS", address)
        check_commands(page, "run on ray", tmp_path)
        cluster.communicate("", timeout=SECONDS_MAX)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("cpp"), ids=named)
def test_cpp_snippets_of_page_compile(page: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    program = cpp_of(snippets_of(page))
    assert program is not None
    (source / "page.cpp").write_text(program)
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\n"
        "project(page LANGUAGES CXX)\n"
        "find_package(Penstock REQUIRED)\n"
        "add_executable(page page.cpp)\n"
        "target_compile_options(page PRIVATE -O0)\n"
        "target_link_libraries(page penstock::penstock)\n"
    )
    configured = configure(source, tmp_path / "build")
    assert configured.returncode == 0, configured.stderr
    built = run("cmake", "--build", tmp_path / "build")
    assert built.returncode == 0, f"{named(page)} is\n{program}\n{built.stdout}"


@pytest.mark.parametrize("page", pages(), ids=named)
def test_commands_in_pages_use_existing_options(page: Path) -> None:
    faults = []
    for command in [*fenced_commands(page), *INLINE.findall(page.read_text(encoding="utf-8"))]:
        for call in penstock_arguments(command.replace("...", "")):
            faults += [f"{command}: {fault}" for fault in faults_of(call)]
    assert faults == []


def fenced_commands(page: Path) -> Iterator[str]:
    for one in snippets_of(page):
        yield from commands_in(one)


@pytest.mark.parametrize("page", pages(), ids=named)
def test_json_snippets_of_page_parse(page: Path) -> None:
    for one in snippets_of(page):
        if one.language == "json":
            json.loads(one.code)


def test_cmake_snippets_match_the_minimal_example() -> None:
    blocks = [one.code for page in pages() for one in snippets_of(page) if one.language == "cmake"]
    example = (ROOT / "examples" / "cpp" / "minimal" / "CMakeLists.txt").read_text()
    assert blocks and all(block == example for block in blocks)


def faults_of(call: list[str]) -> list[str]:
    """The mistake in a call of penstock: an unknown command or option. The arguments after a
    program's name belong to the program."""
    name, *arguments = call
    if not arguments or arguments[0].startswith("-"):
        help_text, options = help_of(name), arguments
    else:
        command, *options = arguments
        if not command.islower():
            return []  # COMMAND, which stands for any
        try:
            help_text = help_of(name, command)
        except subprocess.CalledProcessError as error:
            return [error.stderr.strip()]
        if command in ("run", "explain"):
            options = before_program(options)
    known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_text))
    given = [option.partition("=")[0] for option in options if option.startswith("-")]
    return [f"there is no {option}" for option in given if option not in known]


def before_program(options: list[str]) -> list[str]:
    ends = [k for k, one in enumerate(options) if one == "-m" or one.endswith(".py")]
    return options[: ends[0]] if ends else options


@functools.cache
def help_of(name: str, *command: str) -> str:
    program = [sys.executable, "-m", "penstock"]
    if name == "penstock-worker":
        program = [str(native_folder() / name)]
    done = subprocess.run(
        [*program, *command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def bounded(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new session and ends all processes that it has started."""
    # Socket names are short, and a test's folder is not.
    with tempfile.TemporaryDirectory(prefix="p") as temporary:
        return bounded_with(command, folder, {"TMPDIR": temporary, "HOME": str(folder)})


def bounded_with(
    command: list[str], folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).parent)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=RUN_S_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return subprocess.CompletedProcess(command, 124, output, f"not done in {RUN_S_MAX} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def page_of(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_program_keeps_the_line_numbers_of_its_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, "# Title\n\ntext\n\n```python\none()\n```\n\n```python\ntwo()\n```\n")
    program = program_of(snippets_of(page), "begin()")
    assert program is not None
    lines = program.splitlines()
    assert (lines[0], lines[5], lines[9]) == ("begin()", "one()", "two()")


def test_unknown_snippet_mark_is_rejected(tmp_path: Path) -> None:
    page = page_of(tmp_path, "<!-- snippet: perhaps -->\n```python\none()\n```\n")
    with pytest.raises(ValueError, match="there is no mark 'perhaps'"):
        snippets_of(page)


def test_snippet_mark_without_a_fence_is_rejected(tmp_path: Path) -> None:
    page = page_of(tmp_path, "<!-- snippet: run -->\ntext\n")
    with pytest.raises(ValueError, match="a fence is expected"):
        snippets_of(page)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("penstock worker --controler tcp://a:1", "there is no --controler"),
        ("A=1 penstock run --cod x train.py --epochs 3", "there is no --cod"),
        ("true | penstock statuss &", "there is no command statuss"),
        ("torchrun --no-python penstock up --engin ray", "there is no --engin"),
    ],
)
def test_wrong_option_or_command_is_found(command: str, fault: str) -> None:
    found = [one for call in penstock_arguments(command) for one in faults_of(call)]
    assert any(fault in one for one in found), found


def test_cpp_snippet_is_wrapped_in_a_function() -> None:
    snippets = [
        Snippet("cpp", "int there = 1;\n", 1, is_hidden=True),
        Snippet("cpp", "#include <vector>\nfor (;;) { ... }\n", 5),
    ]
    program = cpp_of(snippets)
    assert program is not None
    assert "#include <vector>\n" in program
    assert "void snippet_1() {\nint there = 1;\nfor (;;) {  }\n}" in program
