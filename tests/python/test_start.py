# SPDX-License-Identifier: Apache-2.0
"""The modules that a start of penstock loads: `penstock --version` took 5 s and 630 MB, as did
every pool command, since each imported torch, Dynamo and sympy and needed none of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import process_traces
import pytest

import penstock
from penstock import _C, _pool
from penstock_simulator import _simulator

pytestmark = pytest.mark.slow

SECONDS_MAX = 90.0
MEGABYTES_MAX = 40.0
IMPORTED = re.compile(r"^import time: +\d+ \| +\d+ \| +(\S+)$", re.MULTILINE)
HEAVY = ("torch", "sympy", "numpy", "cloudpickle", "penstock._C")
# Prints the imported modules only, so that an assertion's message can be read.
TELL_MODULES = "import json, sys; print(json.dumps(sorted(sys.modules)))"
# A process's peak includes its memory before it became another program. The tests' process has
# torch loaded; this one is small.
LAUNCH = """
import json, os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024]))
"""


def imported(stderr: str) -> set[str]:
    return set(IMPORTED.findall(stderr))


def heavy_among(modules: set[str]) -> list[str]:
    return [name for name in HEAVY if name in modules]


def modules_after(program: str) -> set[str]:
    command = [sys.executable, "-c", f"{program}\n{TELL_MODULES}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    own = {"XDG_RUNTIME_DIR": str(runtime), "PENSTOCK_POOL": "tcp://127.0.0.1:9"}
    return {**os.environ, **own}


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        ("--version", 0),
        ("--help", 0),
        ("", 2),
        ("statsu", 2),
        ("keys keys", 0),
        ("controller --help", 0),
        ("worker --help", 0),
        ("status --timeout 0.1", 1),  # without a server
        ("drain 3f2a --timeout 0.1", 1),
        ("simulate --seeds 1", 0),
        ("run --help", 0),
        ("explain --help", 0),
        ("explain --formt json train.py", 2),
    ],
)
def test_commands_without_torch_do_not_import_it(
    environment: dict[str, str], tmp_path: Path, arguments: str, exit_code: int
) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "penstock", *arguments.split()]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCH, *command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    code, megabytes = json.loads(done.stdout.splitlines()[-1])
    assert code == exit_code, done.stderr
    assert heavy_among(imported(done.stderr)) == []
    assert megabytes < MEGABYTES_MAX


@contextlib.contextmanager
def serving(
    arguments: Sequence[str], environment: dict[str, str], errors: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that keeps running, with the line in which it prints its address."""
    command = [sys.executable, "-X", "importtime", "-m", "penstock", *arguments]
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "listens at tcp://" in line, errors.read_text()
            yield process, line
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS_MAX) == 0
        finally:
            process.kill()


def peak_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) / 1024


def test_controller_and_worker_parent_load_no_torch(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """On a host of 64 workers only the processes that make batches need it."""
    errors = {name: tmp_path / name for name in ("controller", "worker")}
    bind = ["controller", "--bind", "tcp://127.0.0.1:0"]
    with serving(bind, environment, errors["controller"]) as (controller, line):
        endpoint = line.split("listens at ")[1].split(",")[0]
        work = ["worker", "--controller", endpoint]
        with serving(work, environment, errors["worker"]) as (worker, line):
            pid = int(line.rpartition("process ")[2])
            assert pid != worker.pid  # a child of it serves, and has a child with torch
            (warm,) = process_traces.children(pid)
            assert "/libtorch" in Path(f"/proc/{warm}/maps").read_text()
            for without in (controller.pid, worker.pid, pid):
                assert "/libtorch" not in Path(f"/proc/{without}/maps").read_text()
                assert peak_megabytes(without) < MEGABYTES_MAX
    for path in errors.values():
        assert heavy_among(imported(path.read_text())) == [], path


def test_modules_for_commands_do_not_link_torch() -> None:
    def needed(module: str) -> str:
        command = ["readelf", "--dynamic", "--wide", module]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert _pool.__file__ is not None and _C.__file__ is not None
    assert "libzmq" in needed(_pool.__file__)
    for module in (_pool, _simulator):
        assert not re.search("torch|c10|cuda", needed(str(module.__file__)))
    assert "libzmq" not in needed(_simulator.__file__)
    assert "libtorch" in needed(_C.__file__)


def test_import_penstock_does_not_import_torch() -> None:
    assert heavy_among(modules_after("import penstock; penstock.PenstockError")) == []
    assert heavy_among(modules_after("from penstock.errors import WorkerError")) == []


LOADING = """
from penstock import DataLoader
assert [int(batch) for batch in DataLoader(range(2), num_workers={workers})] == [0, 1]
"""
# Modules that only `offload`, a pool or `explain` needs.
NOT_FOR_LOADING = {
    "penstock.graph.capture",
    "penstock.explanation.explanation",
    "penstock.cut.offloading",
    "penstock.loader.pool_source",
    "penstock.graph.planning",
    "penstock.loader.pool_iterator",
    "penstock.pool.pool_job",
    "penstock.pool.pool_worker",
    "sympy",
    "torch._dynamo",
}


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    ["import penstock; penstock.DataLoader", LOADING.format(workers=0), LOADING.format(workers=1)],
    ids=["named", "in-process", "workers"],
)
def test_loading_data_imports_neither_dynamo_nor_pool(program: str) -> None:
    torchs_own = modules_after("import torch.utils.data")
    assert modules_after(program) & NOT_FOR_LOADING <= torchs_own


@pytest.mark.long
def test_penstock_run_imports_neither_dynamo_nor_pool(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(TELL_MODULES)
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "run", str(program)],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    loaded = set(json.loads(done.stdout))
    assert "penstock.loader.dataloader" in loaded
    assert loaded & NOT_FOR_LOADING <= modules_after("import torch.utils.data")


def test_public_names_are_listed_before_first_use() -> None:
    assert set(penstock.__all__) <= set(dir(penstock))
    listed = "import penstock; names = dir(penstock); from penstock import *; "
    modules_after(listed + "assert set(penstock.__all__) <= {*names} & {*globals()}")
    assert all(hasattr(penstock, name) for name in penstock.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'DataLoadr'"):
        penstock.DataLoadr  # noqa: B018


OTHER_TORCH = """
import sys
from penstock import _native
parts = [_native.NativePart(_native.PACKAGE, "1.2", "0.1.0", "1.2.3", None, False, None)]
_native.native_parts = lambda: parts
import penstock
def refusal(statement):
    try:
        exec(statement)
    except ImportError as error:
        return str(error)
"""


@pytest.mark.long
def test_wrong_torch_is_rejected_before_loading_native_code() -> None:
    statements = [
        "penstock.DataLoader",
        "from penstock import DataLoader",
        "from penstock import _C",
        "from penstock.cut.offloading import offload",
    ]
    said = "this penstock was built for torch 1.2, got torch"
    program = OTHER_TORCH + "".join(
        f"assert {said!r} in refusal({statement!r})\n" for statement in statements
    )
    assert "penstock._C" not in modules_after(program)


def test_commands_without_torch_run_with_an_unsupported_torch() -> None:
    program = (
        "from penstock.cli.command_line import main\nsys.argv = ['penstock', '--version']\nmain()"
    )
    assert "torch" not in modules_after(OTHER_TORCH + program)
