# SPDX-License-Identifier: Apache-2.0
"""No message of a pool worker is unpickled or run: no code does so, and pickles sent by workers
with a good key are never opened."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool_datasets import CODE, Augmented, Corrupt, StatefulShards
from pool_processes import PoolProcesses, pool_of
from worker_alterations import Trap

import penstock
from penstock import DataLoader, Pool
from penstock.errors import PenstockError, WorkerError
from penstock.worker import batch_pickle

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = ROOT / "python" / "penstock"
NATIVE = ROOT / "csrc"

# Functions that make objects, or code, from bytes.
OPENERS = re.compile(
    r"(_?pickle|_compat_pickle|cloudpickle|dill|marshal|joblib)\.(load|loads|Unpickler|_Unpickler)"
    r"|(multiprocessing\.reduction\.|torch\.multiprocessing\.reductions\.)?ForkingPickler\.loads"
    r"|shelve\.\w+|torch\.load|torch\.(jit|package|export)\.load|torch\.serialization\.\w*load\w*"
    r"|torch\.jit\.(load|CompilationUnit)|numpy\.load|pandas\.read_pickle"
    r"|eval|exec|compile|__import__|importlib\.(import_module|__import__)|runpy\.\w+|ctypes\.\w+"
    r"|penstock\.worker\.batch_pickle\.loads"
)
# Methods that unpickle, on any object.
OPENING_METHODS = {"recv", "load_module", "exec_module"}

# Each place that has one, and the source of its bytes.
WHOSE_BYTES = {
    ("__init__.py", "__getattr__", "importlib.import_module"): "names of our own modules",
    (
        "compat/require.py",
        "_exists",
        "importlib.import_module",
    ): "torch's, which a module of compat lists",
    (
        "worker/batch_pickle.py",
        "loads",
        "pickle.load",
    ): "local workers', and with trust_workers=True a "
    "pool's: check_nest() refuses a batch that needs it before it is called",
    (
        "caching/cached_dataset.py",
        "CachedDataset.__getitem__",
        "penstock.worker.batch_pickle.loads",
    ): "memory of this program's processes, which the digest of a sample must match",
    (
        "caching/cached_dataset.py",
        "CachedDataset._look_up",
        "penstock.worker.batch_pickle.loads",
    ): "the same memory",
    (
        "caching/cached_dataset.py",
        "CachedDataset._check_disk",
        "penstock.worker.batch_pickle.loads",
    ): "as the next line",
    (
        "caching/disk_store.py",
        "DiskStore.get",
        "penstock.worker.batch_pickle.loads",
    ): "a folder that only this user may write to: _check_folder()",
    ("engines/ray_engine.py", "_actor_class.PenstockWorker.__init__", "ctypes.CDLL"): "libc's",
    ("worker/batch_pickle.py", "_BatchUnpickler", "pickle.Unpickler"): "as the line above",
    (
        "loader/local_source.py",
        "LocalSource.ask_states",
        "pickle.loads",
    ): "states that local workers have just sent; PoolSource has a method of its own",
    (
        "stream/progress.py",
        "Progress.__init__",
        "pickle.loads",
    ): "what local workers sent, in the native account; decode_value() has a pool's",
    (
        "pool/process_settings.py",
        "JobSettings.apply",
        "importlib.import_module",
    ): "modules of a fixed list, whose settings a job carries",
    (
        "loader/pickle_watch.py",
        "PickleWatch.loads",
        "penstock.worker.batch_pickle.loads",
    ): "as batch_pickle.loads",
    (
        "loader/local_iterator.py",
        "LocalPoolIter._read_report",
        "pickle.loads",
    ): "reports that local workers sent with batches; PoolIter has a method of its own",
    (
        "loader/local_iterator.py",
        "LocalPoolIter._error_of",
        "pickle.loads",
    ): "a part of such a report; PoolIter has a method of its own",
    (
        "loader/local_source.py",
        "LocalSource.timeout_details",
        "pickle.loads",
    ): "this process's own: what it asked for; PoolSource has a method of its own",
    (
        "loader/pool_source.py",
        "OwnWorkers._address",
        ".recv",
    ): "a pipe's to a child of this trainer",
    ("worker/worker_start.py", "_Unpickler", "pickle.Unpickler"): "the parent's, in a local worker",
    ("pool/pool_job.py", "unpack_job", "pickle.loads"): "the trainer's, in a worker",
    ("cut/prefix_compiler.py", "main", "torch.load"): "the trainer's, in a process that it started",
    (
        "cli/command_line.py",
        "_home",
        "importlib.import_module",
    ): "names of our own modules",
    (
        "images/__init__.py",
        "open_natively",
        "importlib.import_module",
    ): "names of our own modules",
    (
        "stream/batch_types.py",
        "_class_of",
        "importlib.import_module",
    ): "the name of a class from a trusted worker",
    (
        "drop_in.py",
        "torchdata_class",
        "importlib.import_module",
    ): "the name of a module of torchdata's",
    ("_native.py", "import_torch", "importlib.import_module"): "torch",
    ("_native.py", "load", ".exec_module"): "our own module, beside this file",
    (
        "cli/environment_command.py",
        "_version_of_library",
        "ctypes.CDLL",
    ): "a library that is loaded already",
    (
        "cli/environment_command.py",
        "_version_of_library",
        "ctypes.c_char_p",
    ): "its version, a text of its own",
    ("stream/batch_seeds.py", "_numpy_words", "ctypes.string_at"): "the state of numpy's generator",
    ("doctor/program_runs.py", "end_with_parent", "ctypes.CDLL"): "the process's own C library",
    ("live/dashboard_server.py", "_Handler._refuse", ".recv"): "bytes that are thrown away",
    ("cli/program.py", "run_file", "compile"): "the user's own program",
    ("cli/program.py", "_run", "exec"): "the user's own program",
    ("pool/pool_job.py", "open_factory_job", "torch.jit.load"): "the trainer's, in a worker",
    ("pool/pool_job.py", "_make", "importlib.import_module"): "a name of the trainer's, in a "
    "worker: a module that is there",
    ("worker/request_feed.py", "indices_of", "pickle.loads"): "the trainer's, in a worker",
    ("worker/shared_list.py", "SharedList.__getitem__", "pickle.loads"): "the process's own memory",
    ("worker/shared_list.py", "SharedList.__iter__", "pickle.loads"): "the process's own memory",
}

# The same for native code: calls into Python's pickle or import, or loading of code.
NATIVE_OPENERS = re.compile(
    r"module_::import|py::(eval|exec)\b|PyRun_|PyMarshal|PyImport_(?!GetModuleDict)|PyEval_Eval"
    r"|jit::(load|import|unpickle|pickle_load)|torch::load|Unpickler|dlopen|AOTI\w+Runner\w*|loads_\(py::"
)
NATIVE_WHOSE_BYTES = {
    ("api/native_job.cpp", "torch::jit::load(stream)"): "the trainer's, in a worker",
    (
        "api/native_job.cpp",
        "::dlopen(plugin.path",
    ): "a path of the trainer's, in a worker: a library that is there",
    (
        "device/cuda_device.cpp",
        "::dlopen(file.c_str()",
    ): "our own library for CUDA, beside the one that loads it",
    (
        "bindings/bind_loader.cpp",
        'module_::import("penstock.pool.worker_errors").attr("make_error")',
    ): "a fixed name",
    (
        "bindings/bind_loader.cpp",
        'module_::import("penstock.pool.worker_errors").attr("name_sender")',
    ): "a fixed name",
    ("bindings/python_array.cpp", 'module_::import("numpy")'): "a fixed name",
    ("bindings/python_array.cpp", '"numpy").attr("dtype")'): "a fixed name",
    ("bindings/python_array.cpp", '"numpy").attr("ndarray")'): "a fixed name",
    ("bindings/python_array.cpp", '"numpy").attr("memmap")'): "a fixed name",
    ("bindings/python_array.cpp", '"torch").attr("as_tensor")'): "a fixed name",
    ("bindings/python_content.cpp", '"numpy").attr("ndarray")'): "a fixed name",
    ("bindings/python_content.cpp", '"numpy").attr("generic")'): "a fixed name",
    ("bindings/python_content.cpp", '"torch.nn").attr("Parameter")'): "a fixed name",
    (
        "bindings/python_nest.cpp",
        "loads_(py::bytes",
    ): "local workers', and a pool's that are trusted",
    ("bindings/python_rows.cpp", 'module_::import("numpy")'): "a fixed name",
    ("bindings/raise.cpp", 'module_::import("penstock.errors")'): "a fixed name",
    (
        "image/jpeg.cpp",
        "::dlopen(path.c_str()",
    ): "Pillow's own module, which is loaded already",
    ("pool_client/job_meter.cpp", "dlopen("): "a fixed name, of the system's own libraries",
    (
        "runtime/compiled_prefix.cpp",
        "AOTIModelContainerRunnerCpu runner",
    ): "the trainer's compiler's",
}


def openers(source: str) -> Iterator[tuple[str, str]]:
    """The names in ``source`` that open bytes, as (where, what)."""
    yield from _openers_below(ast.parse(source), (), _imported_names(ast.parse(source)))


def _imported_names(tree: ast.AST) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _openers_below(
    node: ast.AST, where: tuple[str, ...], names: dict[str, str]
) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = (*where, child.name)
        if isinstance(child, (ast.Name, ast.Attribute)):
            dotted = _dotted(child, names)
            if dotted is not None and OPENERS.fullmatch(dotted):
                yield ".".join(where), dotted
                continue
        if isinstance(child, ast.Attribute) and child.attr in OPENING_METHODS:
            yield ".".join(where), f".{child.attr}"
        yield from _openers_below(child, inside, names)


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """The full name of the object that ``node`` refers to, if it starts with a name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, names)
        return None if before is None else f"{before}.{node.attr}"
    return None


def test_python_unpickles_only_in_listed_places() -> None:
    found = {
        (str(path.relative_to(PYTHON)), where, what)
        for path in PYTHON.rglob("*.py")
        for where, what in openers(path.read_text())
    }
    assert found == set(WHOSE_BYTES)


def test_native_code_loads_code_only_in_listed_places() -> None:
    found = []
    for path in sorted([*NATIVE.rglob("*.cpp"), *NATIVE.rglob("*.h"), *NATIVE.rglob("*.cu")]):
        for line in path.read_text().splitlines():
            if NATIVE_OPENERS.search(line.partition("//")[0]):
                found.append((str(path.relative_to(NATIVE)), line))
    unknown = [
        (path, line)
        for path, line in found
        if not any(path == file and text in line for file, text in NATIVE_WHOSE_BYTES)
    ]
    assert unknown == []
    assert len(found) == len(NATIVE_WHOSE_BYTES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle\ndef f(b):\n  return pickle.loads(b)", [("f", "pickle.loads")]),
        ("import pickle as p\nopen_ = p.loads", [("", "pickle.loads")]),
        ("from pickle import loads as l\nl(b'')", [("", "pickle.loads")]),
        ("import _pickle\nclass A(_pickle.Unpickler): ...", [("A", "_pickle.Unpickler")]),
        ("import torch\nclass A:\n  def f(s): torch.load(s)", [("A.f", "torch.load")]),
        ("from torch import jit\njit.load('')", [("", "torch.jit.load")]),
        ("import marshal, shelve\nmarshal.loads(shelve.open(''))", 2),
        ("eval('1'); exec('1'); __import__('os')", 3),
        ("import importlib\nimportlib.import_module('os')", 1),
        ("import numpy as np\nnp.load('f')", [("", "numpy.load")]),
        ("pipe.recv()", [("", ".recv")]),
        ("from multiprocessing.reduction import ForkingPickler\nForkingPickler.loads(b'')", 1),
        ("import pickle, re, torch\npickle.dumps(re.compile('')); torch.compile(len)", []),
    ],
)
def test_search_finds_every_way_to_load_bytes(
    source: str, expected: int | list[tuple[str, str]]
) -> None:
    found = list(openers(source))
    assert (len(found) if isinstance(expected, int) else found) == expected


# ---- Workers that send pickles


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


def pooled(
    pool: PoolProcesses, dataset: Any, trust_workers: bool = False, **options: Any
) -> DataLoader[Any]:
    of_pool = Pool(pool.endpoint, code_paths=[CODE], trust_workers=trust_workers)
    return DataLoader(dataset, pool=of_pool, timeout=60, **options)


def test_trap_runs_when_unpickled(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    data, tensors = batch_pickle.dumps(Trap(str(witness)))
    assert not witness.exists()
    batch_pickle.loads(data, tensors)
    assert witness.exists()


@pytest.mark.long
@pytest.mark.slow
def test_pickled_batches_are_rejected_unless_workers_trusted(pool: PoolProcesses) -> None:
    witness = pool.folder / "ran"
    pool.start_altered_worker("send_pickled_batches", str(witness))
    batches = iter(pooled(pool, Augmented(8), batch_size=4))
    for _ in range(2):
        with pytest.raises(PenstockError, match="contains a pickled object.* not trusted"):
            next(batches)
    assert not witness.exists()
    next(iter(pooled(pool, Augmented(4), trust_workers=True)))
    assert witness.exists()


@pytest.mark.slow
def test_pickled_states_are_rejected_even_from_trusted_workers(pool: PoolProcesses) -> None:
    witness = pool.folder / "ran"
    pool.start_altered_worker("send_pickled_states", str(witness))
    for trust in (False, True):
        loader = pooled(pool, StatefulShards(8), batch_size=2, trust_workers=trust)
        batches = iter(loader)
        next(batches)
        with pytest.raises(PenstockError, match="malformed"):
            loader.state_dict()
        del batches
    assert not witness.exists()


@pytest.mark.slow
def test_pickled_reports_of_skipped_samples_are_refused(pool: PoolProcesses) -> None:
    witness = pool.folder / "ran"
    pool.start_altered_worker("send_pickled_reports", str(witness))
    for trust in (False, True):
        loader = pooled(pool, Corrupt(8, [1]), batch_size=4, trust_workers=trust, on_error="skip")
        with pytest.raises(PenstockError, match="malformed"):
            next(iter(loader))
        assert loader.skipped == ()
    assert not witness.exists()


@pytest.mark.long
@pytest.mark.slow
def test_pickled_error_is_shown_as_text_and_not_opened(pool: PoolProcesses) -> None:
    witness = pool.folder / "ran"
    pool.start_altered_worker("send_pickled_errors", str(witness))
    for trust in (False, True):
        with pytest.raises(WorkerError, match=r"(?s)pickle\.loads in penstock worker.*mkdir") as it:
            next(iter(pooled(pool, Augmented(4), trust_workers=trust)))
        assert pickle.dumps(Trap(str(witness)), 0).decode("latin-1") in str(it.value)
    assert not witness.exists()


@pytest.mark.long
@pytest.mark.slow
def test_worker_exit_exceptions_do_not_end_the_trainer(pool: PoolProcesses) -> None:
    names = ["SystemExit", "KeyboardInterrupt", "StopIteration", "os._exit", "builtins.exit"]
    pool.start_altered_worker("send_errors_that_end_programs", " ".join(names))
    batches = iter(pooled(pool, Augmented(5)))
    for _ in list(names):
        with pytest.raises(WorkerError, match="in penstock worker.*\nOriginal bye") as raised:
            next(batches)
        names.remove(str(raised.value).partition(" ")[0])
    assert names == []


def test_trust_workers_is_a_per_loader_bool() -> None:
    assert DataLoader(Augmented(4), pool="tcp://127.0.0.1:7").trust_workers is False
    with pytest.raises(TypeError, match="which can run arbitrary code"):
        DataLoader(Augmented(4), pool=Pool("tcp://127.0.0.1:7", trust_workers="yes"))  # type: ignore[arg-type]
    assert "trust_workers" not in penstock.__all__
