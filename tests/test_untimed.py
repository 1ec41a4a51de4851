# SPDX-License-Identifier: Apache-2.0
"""No test is timed, and none is run again until it passes.

A machine that does much else is slow, and a test that holds a measured time to a number fails
there. Times are measured in bench/. Tests compare figures with one another, take the
clock as an argument, or wait for an event, up to a limit that only a hang reaches.
`find_faults` looks for the other kinds in the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Their seconds are made up: they test functions of numbers.
PURE = {"test_advice.py", "test_simulate.py", "test_step_model.py", "test_worker_choice.py"}
PURE_ROOMS = {  # of tests/cpp
    "session",
    "scheduling",
    "costs",
    "graph",
    "sampling",
    "simulator",
}

MEASURED = re.compile(r"(^|_)(s|ms|us|ns|seconds|share|elapsed|duration)$")
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "process_time", "thread_time", "time_ns"}
HANG_LIMIT = re.compile(r"_MAX$")
# Zero, one, roundings, and ratios of units.
PLAIN_NUMBERS = {0, 1, 60, 3600, 1000, 1e6, 1e9, 1e-3, 1e-6, 1e-9}
CPP_TIMED = re.compile(r"(EXPECT|ASSERT)_(LT|LE|GT|GE)\(.*\b(now|clock_now)\(\)")
CPP_HANG_LIMIT = re.compile(r"deadline|minutes\(|hours\(")
# One measured time against another.
CPP_SIDE = r"[^,()]*(?:\([^()]*\)[^,()]*)*_(?:s|ms|us|ns)\b[^,()]*"
CPP_COMPARED = re.compile(rf"(EXPECT|ASSERT)_(LT|LE|GT|GE)\({CPP_SIDE},{CPP_SIDE}\)")
RERUN = re.compile(r"mark\.flaky|\breruns\b|rerunfailures")


def find_faults(root: Path) -> list[str]:
    return sorted([*timed_assertions(root), *timed_cpp_assertions(root), *reruns(root)])


def timed_assertions(root: Path) -> Iterator[str]:
    for path in sorted((root / "tests").rglob("*.py")):
        if path.name in PURE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                for compared in ast.walk(node.test):
                    if isinstance(compared, ast.Compare) and is_timed(compared):
                        where = f"{path.relative_to(root)}:{node.lineno}"
                        yield f"{where}: {ast.unparse(compared)} holds a time to a number"


def is_timed(compared: ast.Compare) -> bool:
    sides = [compared.left, *compared.comparators]
    if not any(is_measured(part) for side in sides for part in ast.walk(side)):
        return False
    if any(isinstance(operator, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for operator in compared.ops):
        return any(is_number(part) for side in sides for part in parts_of(side))
    tolerances = [
        keyword.value
        for side in sides
        for call in ast.walk(side)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg in ("abs", "rel")
    ]
    return any(is_number(part) for tolerance in tolerances for part in ast.walk(tolerance))


def is_measured(part: ast.AST) -> bool:
    if isinstance(part, ast.Call):
        return isinstance(part.func, ast.Attribute) and part.func.attr in CLOCKS
    return bool(MEASURED.search(name_of(part)))


def is_number(part: ast.AST) -> bool:
    """Whether it stands for a number, hang limits apart."""
    if isinstance(part, ast.Constant):
        return isinstance(part.value, (int, float)) and part.value not in PLAIN_NUMBERS
    name = name_of(part)
    return name.isupper() and not HANG_LIMIT.search(name)


def name_of(part: ast.AST) -> str:
    if isinstance(part, ast.Name):
        return part.id
    if isinstance(part, ast.Attribute):
        return part.attr
    if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant):
        return str(part.slice.value)
    return ""


def parts_of(side: ast.AST) -> Iterator[ast.AST]:
    """All but indices, which are no amounts."""
    yield side
    for child in ast.iter_child_nodes(side):
        if not (isinstance(side, ast.Subscript) and child is side.slice):
            yield from parts_of(child)


def timed_cpp_assertions(root: Path) -> Iterator[str]:
    for path in sorted((root / "tests").rglob("*")):
        if path.suffix in (".h", ".cpp"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                name = path.relative_to(root)
                if CPP_TIMED.search(line) and not CPP_HANG_LIMIT.search(line):
                    yield f"{name}:{number}: {line.strip()} holds a time to a number"
                elif CPP_COMPARED.search(line) and path.parent.name not in PURE_ROOMS:
                    yield f"{name}:{number}: {line.strip()} holds a time to another"


def reruns(root: Path) -> Iterator[str]:
    files = [root / "pyproject.toml", *(root / ".make").rglob("*"), *(root / "tests").rglob("*.py")]
    for path in files:
        if path.is_file() and path.suffix != ".pyc" and path.name != Path(__file__).name:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if RERUN.search(line):
                    yield f"{path.relative_to(root)}:{number}: {line.strip()} runs a test again"


def test_no_test_is_timed_or_rerun() -> None:
    assert find_faults(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "assert times.dataset_s > 0.4",
        "assert 0.05 <= seen['step_s'] < 0.5",
        "assert a_s < 0.2 * b_s",
        "assert whole_s >= 6 * STEP_S",
        "assert time.monotonic() - began < 50",
        "assert total_s == pytest.approx(whole_s, rel=0.02)",
        "assert waiting_share > 0.5",
    ],
)
def test_comparison_of_time_with_number_is_found(tmp_path: Path, line: str) -> None:
    assert len(faults_of(tmp_path, "tests/python/test_x.py", line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "assert 0 <= first_s <= times[2].second_s",
        "assert times.total_s == pytest.approx(sum(parts_s))",
        "assert 0 < waiting_share <= 1",
        "assert time.monotonic() < deadline",
        "assert time.monotonic() - began < SECONDS_MAX",
        "assert record['spent_ms'] == 77",
        "assert count > 40",
    ],
)
def test_comparison_of_measurements_is_allowed(tmp_path: Path, line: str) -> None:
    assert faults_of(tmp_path, "tests/python/test_x.py", line) == []


def test_timed_cpp_assertion_is_found(tmp_path: Path) -> None:
    timed = "EXPECT_LT(Clock::now() - begun, seconds(1));"
    assert len(faults_of(tmp_path, "tests/cpp/x_test.cpp", timed)) == 1
    limit = "ASSERT_LT(Clock::now(), deadline);"
    assert faults_of(tmp_path, "tests/cpp/x_test.cpp", limit) == []


@pytest.mark.parametrize(
    "line",
    [
        "EXPECT_GT(calibration.value().node_s[1], calibration.value().node_s[0]);",
        "ASSERT_LE(first_ms, times(2).second_ms) << 2;",
    ],
)
def test_comparison_of_cpp_times_is_found(tmp_path: Path, line: str) -> None:
    assert len(faults_of(tmp_path / "measured", "tests/cpp/x/x_test.cpp", line)) == 1
    assert faults_of(tmp_path / "pure", "tests/cpp/session/x_test.cpp", line) == []


@pytest.mark.parametrize(
    "line",
    [
        "EXPECT_GT(calibration.value().node_s[1], 0);",
        "EXPECT_LT(calibration.value().node_s.at(0), 1000);",
        "EXPECT_EQ(last.cpu_ns, first.cpu_ns);",
        "EXPECT_GT(rows_count, elements);",
    ],
)
def test_other_cpp_comparisons_are_allowed(tmp_path: Path, line: str) -> None:
    assert faults_of(tmp_path, "tests/cpp/x/x_test.cpp", line) == []


@pytest.mark.parametrize("line", ["x = pytest.mark.flaky()", "mark(reruns=3)"])
def test_rerun_of_a_test_is_found(tmp_path: Path, line: str) -> None:
    assert len(faults_of(tmp_path, "tests/python/test_x.py", line)) == 1


def faults_of(root: Path, name: str, line: str) -> list[str]:
    """Of a tree with one file of one line."""
    root.mkdir(exist_ok=True)
    (root / "pyproject.toml").touch()
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    return find_faults(root)
