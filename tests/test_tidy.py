# SPDX-License-Identifier: Apache-2.0
"""Includes and imports follow the arrows of the map, and every outside library has its one door.

`find_faults` reads a source tree; nothing need be built. It is tested on trees with planted faults.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Which rooms each room's arrows lead to; what those lead to may be included as well.
ARROWS: dict[str, tuple[str, ...]] = {
    "base": (),
    "telemetry": ("base",),
    "transport": ("base", "telemetry", "cluster"),
    "cluster": ("base",),
    "graph": ("base",),
    "runtime": ("graph",),
    "loader": ("transport", "cluster", "telemetry"),
    "worker": ("transport", "cluster", "runtime", "telemetry"),
    "controller": ("transport", "cluster", "telemetry"),
    "bindings": ("loader", "worker", "controller"),
}

# An outside header, and the files of csrc that may include it. The first entry that matches a
# header counts, so the special cases of torch stand before torch.
DOORS: tuple[tuple[str, str], ...] = (
    (
        r"pybind11/|Python\.h|torch/extension\.h|torch/python\.h|torch/csrc/.*py(thon|bind)",
        "bindings/",
    ),
    (r"torch/script\.h|torch/jit\.h|torch/csrc/jit/", "graph/capture|bindings/"),
    (r"(c10|ATen)/cuda/|cuda|thrust/|cub/", r"loader/device_stage|loader/.*\.cu"),
    (r"torch/|ATen/|c10/|caffe2/", "graph/capture|runtime/|loader/|worker/|bindings/"),
    (
        r"zmq",
        r"transport/((curve_)?socket|authenticator|connection_monitor|message_part|readiness"
        r"|ready_set)\.cpp",
    ),
    (r"sodium", r"transport/keys\.cpp"),
    (r"condition_variable$", "base/"),
)

# What penstock's Python may import besides the standard library. sympy is how torch writes a size.
PACKAGES = {"penstock", "torch", "numpy", "cloudpickle", "sympy"}

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)
CPP_SUFFIXES = (".h", ".cpp", ".cu")
SPDX = "SPDX-License-Identifier: Apache-2.0"


def find_faults(root: Path) -> list[str]:
    """Everything in a tree that goes against an arrow, a door or the rules for files, sorted."""
    return sorted(
        [*include_faults(root), *import_faults(root), *name_faults(root), *tag_faults(root)]
    )


def reachable(room: str) -> set[str]:
    """The room itself and every room that its arrows lead to, however far."""
    found = {room}
    for other in ARROWS[room]:
        found |= reachable(other)
    return found


def cpp_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "csrc").rglob("*") if path.suffix in CPP_SUFFIXES)


def include_faults(root: Path) -> Iterator[str]:
    for path in cpp_files(root):
        name = path.relative_to(root / "csrc").as_posix()
        room = name.partition("/")[0]
        if room not in ARROWS:
            yield f"csrc/{name}: {room} is not a room of the map"
            continue
        for outside, ours in INCLUDE.findall(path.read_text()):
            fault = arrow_fault(room, ours) if ours else door_fault(name, outside)
            if fault:
                yield f"csrc/{name}: {fault}"


def arrow_fault(room: str, header: str) -> str | None:
    target, slash, _ = header.partition("/")
    if not slash or target not in ARROWS:
        return f'"{header}" is not "room/file.h"'
    if target not in reachable(room):
        return f'"{header}" goes against the arrows: {room} may not include {target}'
    return None


def door_fault(name: str, header: str) -> str | None:
    for pattern, allowed in DOORS:
        if re.match(pattern, header):
            return None if re.match(allowed, name) else f"<{header}> is for {allowed} alone"
    return None


def import_faults(root: Path) -> Iterator[str]:
    package = root / "python" / "penstock"
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        name = path.relative_to(root).as_posix()
        is_engine = "engines" in path.relative_to(package).parts[:-1]
        tree = ast.parse(path.read_text(), filename=name)
        lazy = {id(node) for function in functions(tree) for node in ast.walk(function)}
        for node in ast.walk(tree):
            for fault in module_faults(node, is_engine, is_lazy=id(node) in lazy):
                yield f"{name}:{getattr(node, 'lineno', 0)}: {fault}"


def module_faults(node: ast.AST, is_engine: bool, is_lazy: bool) -> Iterator[str]:
    """What is wrong with one import statement; nothing for any other node."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
        if node.level:
            yield "relative import; modules are imported by full name"
            return
        if any(alias.name == "*" for alias in node.names):
            yield f"imports * from {node.module}"
    else:
        return
    for top in [module.partition(".")[0] for module in modules]:
        if top in sys.stdlib_module_names or top == "penstock":
            continue
        if is_engine and not is_lazy:
            yield f"an engine imports {top} lazily, inside a function"
        elif not is_engine and top not in PACKAGES:
            yield f"imports {top}, which penstock does not depend on"


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name_faults(root: Path) -> Iterator[str]:
    counts = Counter(path.name for path in cpp_files(root))
    for name, count in counts.items():
        if count > 1:
            yield f"csrc: {count} files are named {name}"


def tag_faults(root: Path) -> Iterator[str]:
    for folder in ("csrc", "python", "tests", "bench", "examples", "third_party"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (*CPP_SUFFIXES, ".py", ".pyi", ".cmake") and path.is_file():
                lines = path.read_text().splitlines()[:2]
                if lines and lines[0].startswith("#!"):
                    del lines[0]
                if not lines or SPDX not in lines[0]:
                    yield f"{path.relative_to(root).as_posix()}: the first line is not the SPDX tag"


def plant(root: Path, files: dict[str, str]) -> list[str]:
    """Writes a tree, each file with its tag, and returns its faults."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        comment = "//" if path.suffix in CPP_SUFFIXES else "#"
        path.write_text(f"{comment} {SPDX}\n{text}\n")
    return find_faults(root)


def test_this_tree_has_no_faults() -> None:
    assert find_faults(ROOT) == []


def test_this_tree_was_read() -> None:
    assert ROOT / "csrc/base/result.h" in cpp_files(ROOT)


def test_arrows_and_doors_kept_are_no_faults(tmp_path: Path) -> None:
    files = {
        "csrc/base/mutex.h": "#include <condition_variable>",
        "csrc/net/socket.cpp": '#include <zmq.hpp>\n#include "base/mutex.h"',
        "csrc/loader/client.cpp": '#include <ATen/core/Tensor.h>\n#include "net/socket.h"',
        "csrc/loader/device_stage.cpp": "#include <c10/cuda/CUDAStream.h>",
        "csrc/capture/capture.cpp": '#include <torch/script.h>\n#include "graph/ir.h"',
        "csrc/worker/server.cpp": '#include "graph/ir.h"  // through runtime',
        "csrc/bindings/module.cpp": '#include <torch/extension.h>\n#include "worker/server.h"',
        "python/penstock/plan.py": "import os\nimport torch.fx\nfrom penstock import _C",
        "python/penstock/engines/ray.py": "import os\ndef start():\n    import ray",
    }
    assert plant(tmp_path, files) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("csrc/base/x.h", '#include "loader/counters.h"', "against the arrows"),
        ("csrc/transport/x.h", '#include "loader/client.h"', "against the arrows"),
        ("csrc/cluster/x.cpp", '#include "wire/frame.h"', "against the arrows"),
        ("csrc/graph/x.cpp", '#  include "runtime/executor.h"', "against the arrows"),
        ("csrc/loader/x.cpp", '#include "worker/server.h"', "against the arrows"),
        ("csrc/worker/x.cpp", '#include "loader/client.h"', "against the arrows"),
        ("csrc/runtime/x.cpp", '#include "bindings/raise.h"', "against the arrows"),
        ("csrc/base/x.cpp", '#include "x.h"', "is not"),
        ("csrc/base/x.cpp", '#include "../loader/client.h"', "is not"),
        ("csrc/utils/x.h", "", "not a room"),
        ("csrc/transport/x.h", "#include <c10/core/ScalarType.h>", "alone"),
        ("csrc/cluster/x.h", "#include <torch/torch.h>", "alone"),
        ("csrc/controller/x.h", "#include <ATen/ATen.h>", "alone"),
        ("csrc/graph/effects.cpp", "#include <ATen/core/Tensor.h>", "alone"),
        ("csrc/runtime/x.cpp", "#include <torch/script.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <c10/cuda/CUDAStream.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <cuda_runtime_api.h>", "alone"),
        ("csrc/wire/frame.cpp", "#include <zmq.h>", "alone"),
        ("csrc/net/server_socket.cpp", "#include <zmq.h>", "alone"),
        ("csrc/net/curve_socket.h", "#include <zmq.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <zmq.hpp>", "alone"),
        ("csrc/loader/client.cpp", "#include <sodium.h>", "alone"),
        ("csrc/net/key_folder.cpp", "#include <sodium.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <Python.h>", "alone"),
        ("csrc/worker/collate.cpp", "#include <pybind11/pybind11.h>", "alone"),
        ("csrc/worker/collate.cpp", "#include <torch/extension.h>", "alone"),
        ("csrc/loader/x.h", "#include <torch/csrc/autograd/python_variable.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <condition_variable>", "alone"),
        ("python/penstock/x.py", "import pandas", "does not depend on"),
        ("python/penstock/x.py", "from rich.table import Table", "does not depend on"),
        ("python/penstock/x.py", "def f():\n    from ray import init", "does not depend on"),
        ("python/penstock/x.py", "from . import plan", "relative import"),
        ("python/penstock/x.py", "from penstock.plan import *", "imports *"),
        ("python/penstock/engines/ray.py", "import ray", "lazily"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    found = plant(tmp_path, {name: text})
    assert len(found) == 1 and name in found[0] and fault in found[0], found


def test_what_is_installed_with_penstock_is_what_it_imports() -> None:
    """rich was, for examples that show progress bars."""
    imported = set()
    for path in (ROOT / "python" / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == PACKAGES
    listed = re.search(
        r"^dependencies = \[\n(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert listed is not None
    names = set(re.findall(r'^  "([\w-]+)', listed[1], re.MULTILINE))
    assert names == PACKAGES - {"penstock", "sympy"}  # which comes with torch


def test_two_files_of_one_name_are_found(tmp_path: Path) -> None:
    found = plant(tmp_path, {"csrc/loader/batch.h": "", "csrc/worker/batch.h": ""})
    assert found == ["csrc: 2 files are named batch.h"]


def test_a_file_without_its_tag_is_found(tmp_path: Path) -> None:
    (tmp_path / "csrc/base").mkdir(parents=True)
    (tmp_path / "csrc/base/x.h").write_text("#pragma once\n")
    assert find_faults(tmp_path) == ["csrc/base/x.h: the first line is not the SPDX tag"]
