# SPDX-License-Identifier: Apache-2.0
"""Includes and imports follow the arrows of the map, and every outside library has its one door.

`find_faults` reads a source tree; no build is needed. It is tested on trees with planted faults.
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
    "wire": ("base",),
    "cache": ("base",),
    "shm": ("wire", "cache"),
    "net": ("wire",),
    "session": ("wire",),
    "scheduling": ("session",),
    "costs": ("session",),
    "simulator": ("scheduling",),
    "sampling": ("base",),
    "image": ("base",),
    "graph": ("base",),
    "visits": ("graph",),
    "capture": ("graph",),
    "runtime": ("capture",),
    "include": (),
    "dataset": ("include", "wire"),
    "device": ("wire",),
    "loader": ("shm", "net", "session", "sampling", "device"),
    "pool_client": ("loader", "costs"),
    "server": ("shm", "net", "costs"),
    "worker": ("server", "runtime", "dataset"),
    "replica": ("loader", "worker"),
    "controller": ("net", "scheduling", "costs"),
    "api": ("pool_client", "worker"),
    "programs": ("include", "server"),
    "bindings": (
        "pool_client",
        "worker",
        "replica",
        "controller",
        "simulator",
        "sampling",
        "image",
        "visits",
    ),
}

# The same of the packages of python/penstock. "" is the façade: the modules in the root. `__init__`
# and `__main__` there may import every package, and none imports them. The module `drop_in` is a
# room by itself, since it hands out the loader, and so are `filtering` and `trainer_state`,
# which use loaders.
PYTHON_ARROWS: dict[str, tuple[str, ...]] = {
    "": (),
    "compat": ("",),
    "tuning": ("",),
    "ranks": ("compat",),
    "sampling": ("ranks",),
    "stream": ("sampling",),
    "images": ("stream",),
    "worker": ("stream", "images", "tuning"),
    "pool": ("worker",),
    "graph": ("compat",),
    "tracking": ("graph",),
    "loader": ("pool", "tracking", "tuning"),
    "observing": ("loader",),
    "cut": ("loader",),
    "explanation": ("cut",),
    "engines": ("pool",),
    "doctor": ("explanation",),
    "live": ("pool", "graph"),
    "drop_in": ("loader",),
    "filtering": ("loader",),
    "caching": ("loader",),
    "trainer_state": ("drop_in",),
    "cli": ("doctor", "observing", "engines", "live", "drop_in"),
}

# An outside header, and the files of csrc that may include it. The first entry that matches a
# header counts, so the special cases of torch stand before torch.
DOORS: tuple[tuple[str, str], ...] = (
    (
        r"pybind11/|Python\.h|torch/extension\.h|torch/python\.h|torch/csrc/.*py(thon|bind)",
        "bindings/",
    ),
    (r"torch/script\.h|torch/jit\.h|torch/csrc/jit/", "capture/|bindings/|include/|api/"),
    (
        r"(c10|ATen)/cuda/|cuda|thrust/|cub/",
        r"device/(cuda_part\.cpp|cuda_host_reads\.cpp|cuda_calls\.h|widen_kernels\.cu)",
    ),
    # The kernels compile without torch.
    (
        r"torch/|ATen/|c10/|caffe2/",
        r"capture/|runtime/|include/|dataset/|device/(?!widen_kernels\.)|loader/|pool_client/|"
        r"worker/|replica/|api/|bindings/",
    ),
    (r"zmq", r"net/(tcp_)?socket\.h"),
    (r"sodium", r"net/keys\.cpp"),
    (r"openssl/", r"(net/seal|graph/sha256)\.cpp"),
    (r"jpeglib", r"image/jpeg_decoder\.h"),
    (r"libdeflate", r"image/png\.cpp"),
    (r"nlohmann/", r"(dataset/json_value|controller/pool_status)\.cpp"),
    (r"condition_variable$", "base/"),
)

# Packages that penstock's Python may import, as well as the standard library. torch writes sizes
# with sympy.
PACKAGES = {"penstock", "torch", "numpy", "cloudpickle", "sympy"}
# Packages that only one module or folder imports, inside functions: a program may run without them.
OPTIONAL_PACKAGES: dict[str, str | tuple[str, ...]] = {
    "PIL": "python/penstock/images/",
    "torchvision": ("python/penstock/images/", "python/penstock/stream/batch_types.py"),
    "tensordict": "python/penstock/stream/batch_types.py",
    "torch_geometric": "python/penstock/stream/batch_types.py",
    "opentelemetry": "python/penstock/observing/open_telemetry.py",
    "tqdm": "python/penstock/observing/waiting_meter.py",
    "transformers": "python/penstock/trainer_state.py",
    "accelerate": "python/penstock/trainer_state.py",
}
# What the package penstock_simulator may import, as well as the standard library.
SIMULATOR_MODULES = {"penstock.cli.command_parser", "penstock_simulator"}
# Packages that some modules import at their top. Other modules import these inside functions.
OPTIONAL_MODULES: dict[str, tuple[str, ...]] = {
    "rich": ("python/penstock/live/top_screen.py",),
    "PIL": ("python/penstock/images/lazy_images.py", "python/penstock/images/library_calls.py"),
}

INCLUDE = re.compile(r'^\s*#\s*include\s+(?:<([^>]+)>|"([^"]+)")', re.MULTILINE)
CPP_SUFFIXES = (".h", ".cpp", ".cu")
SPDX = "SPDX-License-Identifier: Apache-2.0"


def find_faults(root: Path) -> list[str]:
    """Return the violations of arrows, doors and the rules for files in a tree, sorted."""
    return sorted(
        [
            *include_faults(root),
            *import_faults(root),
            *simulator_faults(root),
            *room_faults(root),
            *compat_faults(root),
            *name_faults(root),
            *tag_faults(root),
        ]
    )


def reachable(room: str, arrows: dict[str, tuple[str, ...]] = ARROWS) -> set[str]:
    """The room itself and every room that its arrows lead to, however far."""
    found = {room}
    for other in arrows[room]:
        found |= reachable(other, arrows)
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
    target = "include" if target == "penstock" else target  # as programs include them
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
        for_types = {id(node) for block in type_checking(tree) for node in ast.walk(block)}
        own = {package for package, home in OPTIONAL_PACKAGES.items() if name.startswith(home)}
        always = {package for package, homes in OPTIONAL_MODULES.items() if name in homes}
        for node in ast.walk(tree):
            is_lazy = id(node) in lazy or id(node) in for_types
            for fault in module_faults(node, is_engine, is_lazy, own, always):
                yield f"{name}:{getattr(node, 'lineno', 0)}: {fault}"


def module_faults(
    node: ast.AST, is_engine: bool, is_lazy: bool, optional: set[str], always: set[str]
) -> Iterator[str]:
    """Yield the faults of an import statement; none for any other node. Its module may import
    ``optional`` packages lazily, and the packages ``always`` anywhere."""
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
    for module in [*modules, *(f"{modules[0]}.{alias.name}" for alias in node.names)]:
        home = f"python/{module.replace('.', '/')}.py"
        packages = {package for package, homes in OPTIONAL_MODULES.items() if home in homes}
        if packages - always and not is_lazy:
            yield f"imports {module} lazily, inside a function, as its package is optional"
    for top in [module.partition(".")[0] for module in modules]:
        if top in sys.stdlib_module_names or top == "penstock" or top in always:
            continue
        if top in optional and is_lazy:
            continue
        if is_engine and not is_lazy:
            yield f"an engine imports {top} lazily, inside a function"
        elif not is_engine and top not in PACKAGES:
            yield f"imports {top}, which penstock does not depend on"


def simulator_faults(root: Path) -> Iterator[str]:
    package = root / "simulator" / "penstock_simulator"
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.pyi")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = {alias.name for alias in node.names}
            else:
                modules = {node.module or "."} if isinstance(node, ast.ImportFrom) else set()
            for module in sorted(modules - SIMULATOR_MODULES):
                if module.partition(".")[0] not in sys.stdlib_module_names:
                    yield f"{path.relative_to(root).as_posix()}: may not import {module}"


def room_faults(root: Path) -> Iterator[str]:
    """Imports between the packages of python/penstock against their arrows, and circles of modules.

    Imports for type checking and those inside of functions count too.
    """
    imports = own_imports(root)
    for name, imported in sorted(imports.items()):
        room, shown = python_room(name), f"python/{name.replace('.', '/')}.py"
        if room not in PYTHON_ARROWS:
            yield f"{shown}: {room} is not a room of the map"
            continue
        if name in ("penstock", "penstock.__main__"):
            continue
        allowed = reachable(room, PYTHON_ARROWS)
        for other in sorted(imported):
            if other == "penstock":
                yield f"{shown}: imports the façade, which imports everything"
            elif python_room(other) not in allowed:
                yield f"{shown}: {other} goes against the arrows"
    for circle in circles(imports):
        yield f"python: a circle of imports: {', '.join(circle)}"


def compat_faults(root: Path) -> Iterator[str]:
    """Yield private names of torch outside of compat, and in it names that no module looks for.

    A name is private if it or a module in its path starts with one underscore. Attributes of
    objects are known by the names that compat looks for.
    """
    package = root / "python" / "penstock"
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    modules = {path for path in trees if path.parent.name == "compat"}
    looked_for = {path: set(required_names(trees[path])) for path in modules}
    # Iterators of ours override methods of torch's, and call each other's.
    attributes = {
        name.rpartition(".")[2]
        for path, names in looked_for.items()
        if path.stem != "iterators"
        for name in names
    }
    for path, tree in trees.items():
        shown = path.relative_to(root).as_posix()
        for full_name in torch_names(tree):
            name = full_name.partition(".__")[0]
            if not any(is_private(part) for part in name.split(".")):
                continue
            if path not in modules:
                yield f"{shown}: {name} is private to torch; it belongs into penstock.compat"
            elif not any(f"{wanted}.".startswith(f"{name}.") for wanted in looked_for[path]):
                yield f"{shown}: {name} is used and not looked for"
        for node in ast.walk(tree) if path not in modules else ():
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                if node.attr in attributes and not is_own:
                    yield f"{shown}: .{node.attr} is private to torch; penstock.compat has it"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def required_names(tree: ast.AST) -> Iterator[str]:
    """The names that a module lists by its call of `require`."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if is_call and node.func.id == "require":
            names = ast.literal_eval(node.args[1])
            yield from names


def torch_names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name of torch that a module imports or reads, in full."""
    homes = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            for alias in node.names:
                homes[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if f"{a.name}.".startswith("torch."))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts: list[str] = []
            below: ast.AST = node
            while isinstance(below, ast.Attribute):
                parts.append(below.attr)
                below = below.value
            if isinstance(below, ast.Name) and below.id in homes:
                yield ".".join([homes[below.id], *reversed(parts)])


def python_room(name: str) -> str:
    """`penstock.loader.stats` is in the room `loader`, `penstock.errors` in the façade."""
    parts = name.split(".")
    is_room = len(parts) > 2 or parts[-1] in PYTHON_ARROWS
    return parts[1] if is_room else ""


def own_imports(root: Path) -> dict[str, set[str]]:
    """Which modules of penstock each module of penstock imports, both by full name."""
    package = root / "python" / "penstock"
    files = {}
    for path in package.rglob("*.py"):
        parts = ("penstock", *path.relative_to(package).with_suffix("").parts)
        files[".".join(parts).removesuffix(".__init__")] = path
    return {
        name: {*named_modules(ast.parse(path.read_text()), {*files, "penstock"})} - {name}
        for name, path in files.items()
    }


def named_modules(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name for name in names if name.partition(".")[0] == "penstock")
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("penstock."):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in ours:
                    yield full
                elif not (node.module == "penstock" and alias.name.startswith("_")):
                    yield str(node.module)  # a name of the module; native modules are no files here


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that import each other, by Tarjan's algorithm (SIAM J. Comput. 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(imports.get(name, ())):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            place = stack.index(name)
            if len(stack) - place > 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return found


def type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that only type checkers read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            yield node


def functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name_faults(root: Path) -> Iterator[str]:
    # The public headers are named after what programs use, and are in a separate folder.
    own = [path for path in cpp_files(root) if "include" not in path.relative_to(root).parts]
    counts = Counter(path.name for path in own)
    for name, count in counts.items():
        if count > 1:
            yield f"csrc: {count} files are named {name}"


def tag_faults(root: Path) -> Iterator[str]:
    for folder in ("csrc", "python", "simulator", "tests", "bench", "examples", "third_party"):
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


def test_source_tree_has_no_faults() -> None:
    assert find_faults(ROOT) == []


def test_source_tree_was_read() -> None:
    assert ROOT / "csrc/base/result.h" in cpp_files(ROOT)


def test_allowed_includes_and_imports_are_no_faults(tmp_path: Path) -> None:
    files = {
        "csrc/base/mutex.h": "#include <condition_variable>",
        "csrc/net/socket.h": '#include <zmq.hpp>\n#include "base/mutex.h"',
        "csrc/loader/client.cpp": '#include <ATen/core/Tensor.h>\n#include "net/socket.h"',
        "csrc/device/cuda_part.cpp": "#include <c10/cuda/CUDAStream.h>",
        "csrc/capture/capture.cpp": '#include <torch/script.h>\n#include "graph/ir.h"',
        "csrc/worker/local_server.cpp": '#include "graph/ir.h"  // through runtime',
        "csrc/bindings/module.cpp": (
            '#include <torch/extension.h>\n#include "worker/local_server.h"'
        ),
        "python/penstock/graph/plan.py": "import os\nimport torch.fx\nfrom penstock import _C",
        "python/penstock/engines/ray.py": "import os\ndef start():\n    import ray",
        "simulator/penstock_simulator/x.py": "import os\nfrom penstock_simulator import _simulator",
    }
    assert plant(tmp_path, files) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("csrc/base/x.h", '#include "loader/counters.h"', "against the arrows"),
        ("python/penstock/observing/waiting_meter.py", "import tqdm", "does not depend on"),
        ("python/penstock/loader/x.py", "def f():\n    import tqdm", "does not depend on"),
        ("csrc/net/x.h", '#include "loader/client.h"', "against the arrows"),
        ("csrc/session/x.cpp", '#include "net/socket.h"', "against the arrows"),
        ("csrc/session/x.cpp", '#include "scheduling/roster.h"', "against the arrows"),
        ("csrc/scheduling/x.cpp", '#include "costs/cost_ledger.h"', "against the arrows"),
        ("csrc/loader/x.cpp", '#include "scheduling/roster.h"', "against the arrows"),
        ("csrc/loader/x.cpp", '#include "pool_client/pool_io.h"', "against the arrows"),
        ("csrc/loader/x.cpp", '#include "costs/cost_meter.h"', "against the arrows"),
        ("csrc/graph/x.cpp", '#  include "runtime/executor.h"', "against the arrows"),
        ("csrc/loader/x.cpp", '#include "worker/local_server.h"', "against the arrows"),
        ("csrc/worker/x.cpp", '#include "loader/client.h"', "against the arrows"),
        ("csrc/server/x.cpp", '#include "worker/batch_server.h"', "against the arrows"),
        ("csrc/runtime/x.cpp", '#include "bindings/raise.h"', "against the arrows"),
        ("csrc/base/x.cpp", '#include "x.h"', "is not"),
        ("csrc/base/x.cpp", '#include "../loader/client.h"', "is not"),
        ("csrc/utils/x.h", "", "not a room"),
        ("csrc/wire/x.h", "#include <c10/core/ScalarType.h>", "alone"),
        ("csrc/session/x.h", "#include <torch/torch.h>", "alone"),
        ("csrc/controller/x.h", "#include <ATen/ATen.h>", "alone"),
        ("csrc/server/x.h", "#include <ATen/ATen.h>", "alone"),
        ("csrc/graph/effects.cpp", "#include <ATen/core/Tensor.h>", "alone"),
        ("csrc/graph/x.h", '#include "capture/schema.h"', "against the arrows"),
        ("csrc/runtime/x.cpp", "#include <torch/script.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <c10/cuda/CUDAStream.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <cuda_runtime_api.h>", "alone"),
        ("csrc/device/cuda_device.cpp", "#include <cuda_runtime_api.h>", "alone"),
        ("csrc/device/widen_kernels.cu", "#include <ATen/ATen.h>", "alone"),
        ("csrc/device/x.cpp", '#include "loader/batch.h"', "against the arrows"),
        ("csrc/wire/frame.cpp", "#include <zmq.h>", "alone"),
        ("csrc/net/server_socket.cpp", "#include <zmq.h>", "alone"),
        ("csrc/net/tcp_socket.cpp", "#include <zmq.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <zmq.hpp>", "alone"),
        ("csrc/loader/client.cpp", "#include <sodium.h>", "alone"),
        ("csrc/net/key_folder.cpp", "#include <sodium.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <Python.h>", "alone"),
        ("csrc/worker/collate.cpp", "#include <pybind11/pybind11.h>", "alone"),
        ("csrc/worker/collate.cpp", "#include <torch/extension.h>", "alone"),
        ("csrc/loader/x.h", "#include <torch/csrc/autograd/python_variable.h>", "alone"),
        ("csrc/loader/client.cpp", "#include <condition_variable>", "alone"),
        ("python/penstock/x.py", "import pandas", "does not depend on"),
        ("python/penstock/x.py", "import penstock_simulator", "does not depend on"),
        ("simulator/penstock_simulator/x.py", "import torch", "may not import torch"),
        ("simulator/penstock_simulator/x.py", "from penstock import _C", "may not import penstock"),
        ("python/penstock/x.py", "from rich.table import Table", "does not depend on"),
        ("python/penstock/live/top_state.py", "def f():\n    import rich", "does not depend on"),
        ("python/penstock/cli/x.py", "from penstock.live.top_screen import y", "lazily"),
        ("python/penstock/cli/x.py", "from penstock.live import top_screen", "lazily"),
        ("python/penstock/x.py", "def f():\n    from ray import init", "does not depend on"),
        ("python/penstock/x.py", "from . import plan", "relative import"),
        ("python/penstock/graph/x.py", "from penstock.graph.plan import *", "imports *"),
        ("python/penstock/engines/ray.py", "import ray", "lazily"),
        ("python/penstock/utils/x.py", "", "not a room"),
        ("python/penstock/graph/x.py", "import penstock", "the façade"),
        ("python/penstock/graph/x.py", "from penstock.cut import y", "against the arrows"),
        ("python/penstock/cut/x.py", "from torch._ops import OpOverload", "private to torch"),
        ("python/penstock/cut/x.py", "from torch.utils import _pytree", "private to torch"),
        ("python/penstock/cut/x.py", "import torch._dynamo", "private to torch"),
        ("python/penstock/cut/x.py", "torch._C._is_tracing()", "private to torch"),
        ("python/penstock/compat/x.py", "from torch._ops import OpOverload", "not looked for"),
    ],
)
def test_planted_fault_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    found = plant(tmp_path, {name: text})
    assert len(found) == 1 and name in found[0] and fault in found[0], found


def test_declared_dependencies_match_imports() -> None:
    """rich was, for examples that show progress bars."""
    imported = set()
    for path in (ROOT / "python" / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    # The engine ray is for who has it, and asks for it when it is used; so are optional packages.
    optional = {"ray", *OPTIONAL_PACKAGES, *OPTIONAL_MODULES}
    assert imported - sys.stdlib_module_names - optional == PACKAGES
    listed = re.search(
        r"^dependencies = \[\n(.*?)^\]",
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert listed is not None
    names = set(re.findall(r'^  "([\w-]+)', listed[1], re.MULTILINE))
    assert names == PACKAGES - {"penstock", "sympy"}  # which comes with torch


def test_import_cycle_is_found(tmp_path: Path) -> None:
    files = {
        "python/penstock/graph/a.py": "from penstock.graph.b import x",
        "python/penstock/graph/b.py": "def f():\n    from penstock.graph import c",
        "python/penstock/graph/c.py": "if TYPE_CHECKING:\n    from penstock.graph.a import y",
    }
    found = plant(tmp_path, files)
    assert found == [
        "python: a circle of imports: penstock.graph.a, penstock.graph.b, penstock.graph.c"
    ]


def test_duplicate_file_names_are_found(tmp_path: Path) -> None:
    found = plant(tmp_path, {"csrc/loader/batch.h": "", "csrc/worker/batch.h": ""})
    assert found == ["csrc: 2 files are named batch.h"]


def test_missing_spdx_tag_is_found(tmp_path: Path) -> None:
    (tmp_path / "csrc/base").mkdir(parents=True)
    (tmp_path / "csrc/base/x.h").write_text("#pragma once\n")
    assert find_faults(tmp_path) == ["csrc/base/x.h: the first line is not the SPDX tag"]
