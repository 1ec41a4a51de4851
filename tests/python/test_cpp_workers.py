# SPDX-License-Identifier: Apache-2.0
"""Batches that worker processes make for a C++ program: local, from a pool, or both; from plug-ins
and from Python. The stream always equals the stream of the program's threads."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from cpp_loader import PLUGIN, error_of_cpp, finish_cpp, run_cpp, start_cpp
from native_build import native_folder
from pool_processes import SECONDS_MAX, PoolProcesses, pool_of

import penstock

SIZE = 23
HERE = Path(__file__).parent
SHUFFLED = {"batch_size": 4, "shuffle": True}
SHARDS = {"batch_size": 4, "shards": 3}
OF_PLUGIN: dict[str, Any] = {"plugin": str(PLUGIN), "arguments": {"size": SIZE}}
OF_PYTHON: dict[str, Any] = {"python": "cpp_loader:Draws", "arguments": {"size": SIZE}}
STREAM_OF_PYTHON: dict[str, Any] = {"python": "cpp_loader:DrawStream", "arguments": {"size": SIZE}}


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that this user's processes share belong to the test."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def _both_kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolProcesses]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for opened in pool_of(tmp_path_factory.mktemp("both"), monkeypatch):
            opened.start_native_worker()
            opened.start_worker(environment={"PYTHONPATH": str(HERE)})
            yield opened


@pytest.fixture
def both_kinds(
    _both_kinds: PoolProcesses, keys: None, monkeypatch: pytest.MonkeyPatch
) -> PoolProcesses:
    """A pool with a worker of plug-ins and a worker of Python datasets."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", _both_kinds.environment["XDG_RUNTIME_DIR"])
    return _both_kinds


def with_threads(options: dict[str, Any], iterable: bool = False, epochs: int = 1) -> list[Any]:
    given = {**options, "num_workers": 0}
    return run_cpp(size=SIZE, options=given, seed=3, iterable=iterable, epochs=epochs)


def with_workers(
    of: dict[str, Any], options: dict[str, Any], workers: int, **given: Any
) -> list[Any]:
    return run_cpp(size=SIZE, options={**options, "num_workers": workers}, seed=3, **of, **given)


@pytest.mark.long
@pytest.mark.slow
def test_local_processes_yield_the_stream_of_threads() -> None:
    expected = with_threads(SHUFFLED, epochs=2)
    assert with_workers(OF_PLUGIN, SHUFFLED, 0, epochs=2) == expected
    assert with_workers(OF_PLUGIN, SHUFFLED, 3, epochs=2) == expected
    assert with_workers(OF_PYTHON, SHUFFLED, 2, epochs=2) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", [OF_PLUGIN, pytest.param(OF_PYTHON, marks=pytest.mark.long)], ids=["plugin", "python"]
)
def test_loader_construction_survives_repeated_signals(of: dict[str, Any]) -> None:
    """The first signal during the start of its workers ended the program."""
    assert with_workers(of, SHUFFLED, 2, alarms=True) == with_threads(SHUFFLED)


@pytest.mark.long
@pytest.mark.slow
def test_sharded_processes_yield_the_stream_of_threads() -> None:
    expected = with_threads(SHARDS, iterable=True, epochs=2)
    assert with_workers(OF_PLUGIN, SHARDS, 2, iterable=True, epochs=2) == expected
    assert with_workers(STREAM_OF_PYTHON, SHARDS, 2, epochs=2) == expected


@pytest.mark.long
@pytest.mark.slow
def test_transform_applies_in_every_kind_of_worker() -> None:
    source = "def forward(self, index, own, batch):\n    return [index * 2, own + batch]\n"
    given: dict[str, Any] = {"size": SIZE, "seed": 3, "transform": source}
    expected = run_cpp(options={**SHUFFLED, "num_workers": 0}, **given)
    plain = with_threads(SHUFFLED)
    assert [batch[0] for batch in expected] == [[2 * i for i in batch[0]] for batch in plain]
    for of in ({}, OF_PLUGIN, OF_PYTHON):
        assert run_cpp(options={**SHUFFLED, "num_workers": 1}, **given, **of) == expected


@pytest.mark.slow
def test_offloaded_part_gives_the_same_bits_in_every_kind_of_worker(
    both_kinds: PoolProcesses,
) -> None:
    source = """
def forward(self, index, own, batch):
    x = torch.sin(own.remainder(1000).float()) * torch.exp(-batch.remainder(7).float())
    return torch.cos(x) + torch.sqrt(index.float() + 1).sum()
"""
    options: dict[str, Any] = {"size": SIZE, "seed": 3, "epochs": 4, "offload": source}
    expected = run_cpp(options={**SHUFFLED, "num_workers": 0}, **options)
    assert expected.pop() == 0
    for of in ({}, OF_PLUGIN, OF_PYTHON):
        given = run_cpp(options={**SHUFFLED, "num_workers": 1}, **options, **of)
        assert given.pop() > 8, of
        assert given == expected, of
    for of in (OF_PLUGIN, OF_PYTHON):
        given = run_cpp(options=SHUFFLED, pool=both_kinds.endpoint, **options, **of)
        assert given.pop() > 8, of
        assert given == expected, of


@pytest.mark.slow
def test_pool_serves_a_resharded_rank_over_the_same_connection(pool: PoolProcesses) -> None:
    ranks = {**SHUFFLED, "job": [0, 2, 2]}
    reshards = [[2, 2, 3], [3, 0, 1]]
    program: dict[str, Any] = {"size": SIZE, "seed": 3, "reshards": reshards}
    expected = run_cpp(options=ranks, **program)
    pool.start_native_worker()
    pool.start_worker(environment={"PYTHONPATH": str(HERE)})
    for of in (OF_PLUGIN, OF_PYTHON):
        given = run_cpp(options=ranks, pool=pool.endpoint, **of, **program)
        assert given == expected, of
    # A worker's process counts the samples that it has made: it is the same one all the time.
    of = {**OF_PLUGIN, "dataset": "counting", "pool": pool.endpoint}
    *batches, _ = run_cpp(options=ranks, **of, **program)
    counts = [count for batch in batches for count in batch[0]]
    assert counts == sorted(set(counts))


SHRINKING = """
def forward(self, index, image):
    x = torch.flip(image.float() * 0.5 + 1, [-1])[:, :, ::16, ::16]
    return torch.sqrt(x.flatten(1)) * index.unsqueeze(1)
"""
PICTURES: dict[str, Any] = {
    "arguments": {"size": 402},
    "size": 402,
    "seed": 3,
    "epochs": 2,
    "offload": SHRINKING,
}
PICTURES_OF_PYTHON = {**PICTURES, "python": "cpp_loader:Pictures"}
PICTURES_OF_PLUGIN = {**PICTURES, "plugin": str(PLUGIN), "dataset": "pictures"}
PICTURE_BATCH_BYTES = 4 * 3 * 64 * 64


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("of", [PICTURES_OF_PYTHON, PICTURES_OF_PLUGIN], ids=["python", "plugin"])
@pytest.mark.parametrize("reads", [{"read_every": 1}, {"read_every": 90}, {"read_every": 10_000}])
def test_unread_tensors_stay_in_pool_workers(
    both_kinds: PoolProcesses, of: dict[str, Any], reads: dict[str, int]
) -> None:
    own = run_cpp(options={**SHUFFLED, "num_workers": 1}, **of, **reads)
    *expected, _, withheld, recalled, last = own
    assert (withheld, recalled) == (0, 0), "a worker of this machine sends all"
    given = run_cpp(options=SHUFFLED, pool=both_kinds.endpoint, **of, **reads)
    *results, used, withheld, recalled, last_of_pool = given
    assert (results, last_of_pool) == (expected, last)
    assert used > 150
    if reads["read_every"] == 1:
        assert (withheld, recalled) == (0, 0)
    else:
        assert withheld > 60 * PICTURE_BATCH_BYTES
        # Once for the smaller batch at the end, to compare its results.
        assert recalled == (2 if reads["read_every"] == 90 else 1)


@pytest.mark.long
@pytest.mark.slow
def test_tensor_read_much_later_is_recreated(pool: PoolProcesses) -> None:
    reads = {"read_every": 80, "late": 20}
    options = {**SHUFFLED, "num_workers": 1}
    *expected, _, _, _, last = run_cpp(options=options, **PICTURES_OF_PYTHON, **reads)
    pool.start_worker(environment={"PYTHONPATH": str(HERE)})
    given = run_cpp(options=SHUFFLED, pool=pool.endpoint, **PICTURES_OF_PYTHON, **reads)
    *results, _, withheld, recalled, last_of_pool = given
    assert (results, last_of_pool) == (expected, last)
    assert withheld > 60 * PICTURE_BATCH_BYTES
    assert recalled > 0


@pytest.mark.long
@pytest.mark.slow
def test_recreated_batch_with_other_values_is_an_error(pool: PoolProcesses) -> None:
    pool.start_worker(environment={"PYTHONPATH": str(HERE)})
    of = {**PICTURES, "python": "cpp_loader:Forgetful"}
    error = error_of_cpp(options=SHUFFLED, pool=pool.endpoint, read_every=80, late=20, **of)
    assert "re-creating the batch" in error


@pytest.mark.long
@pytest.mark.slow
def test_lazy_tensor_read_in_another_thread_is_an_error(pool: PoolProcesses) -> None:
    pool.start_worker(environment={"PYTHONPATH": str(HERE)})
    reads = {"read_every": 80, "in_thread": True}
    error = error_of_cpp(options=SHUFFLED, pool=pool.endpoint, **PICTURES_OF_PYTHON, **reads)
    assert "was read outside the loader's thread or process" in error


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "options", "iterable"),
    [
        (OF_PLUGIN, SHUFFLED, False),
        (OF_PYTHON, SHUFFLED, False),
        (OF_PLUGIN, SHARDS, True),
        (STREAM_OF_PYTHON, SHARDS, True),
    ],
    ids=["plugin", "python", "plugin stream", "python stream"],
)
def test_each_kind_of_worker_resumes_from_a_state_of_threads(
    of: dict[str, Any], options: dict[str, Any], iterable: bool
) -> None:
    whole = with_threads(options, iterable=iterable)
    given = {**options, "num_workers": 2}
    *begun, state = run_cpp(size=SIZE, options=given, seed=3, iterable=iterable, stop=2)
    extra = {"iterable": iterable} if of is OF_PLUGIN else {}
    assert begun + with_workers(of, options, 2, state=state, **extra) == whole


@pytest.mark.long
@pytest.mark.slow
def test_native_pool_serves_a_program_despite_a_killed_worker(
    pool: PoolProcesses,
) -> None:
    size, options = 400, {"batch_size": 4, "shuffle": True}
    expected = run_cpp(size=size, options={**options, "num_workers": 0}, seed=3)
    worker = pool.start_native_worker(processes=3)
    arguments = {"size": size, "delay_ms": 5}
    of = {"size": size, "plugin": str(PLUGIN), "arguments": arguments, "pool": pool.endpoint}
    program = start_cpp(options={**options, "num_workers": 1}, seed=3, **of)
    worker.wait_for_lines(lambda line: "serves loader_main: draw" in line)
    os.kill(worker.pids[0], signal.SIGKILL)
    code, out, err = finish_cpp(program)
    assert code == 0, err
    assert [json.loads(line) for line in out.splitlines()] == expected


@pytest.mark.long
@pytest.mark.slow
def test_workers_are_assigned_to_jobs_that_they_can_run(pool: PoolProcesses) -> None:
    native, python = (
        pool.start_native_worker(),
        pool.start_worker(environment={"PYTHONPATH": str(HERE)}),
    )
    expected = with_threads(SHUFFLED)
    named = {"pool": pool.endpoint}
    assert with_workers(OF_PLUGIN, SHUFFLED, 0, **named) == expected
    assert with_workers(OF_PYTHON, SHUFFLED, 0, **named) == expected
    torch.manual_seed(3)
    loader: Any = penstock.DataLoader(list(range(SIZE)), pool=pool.endpoint, **SHUFFLED)
    assert [batch.tolist() for batch in loader] == [batch[0] for batch in expected]
    for worker in (native, python):
        worker.end()
    assert "serves loader_main: draw of" in native.output
    assert "cpp_loader:Draws" in python.output
    assert "refuses" not in native.output + python.output


@pytest.mark.slow
def test_plugin_is_reloaded_for_each_run_of_a_program(pool: PoolProcesses) -> None:
    """Its dataset continued from the place where the run before had stopped."""
    pool.start_native_worker()
    of = {**OF_PLUGIN, "dataset": "counting", "pool": pool.endpoint}
    for _ in range(2):
        batches = with_workers(of, SHUFFLED, 0)
        assert sorted(count for batch in batches for count in batch[0]) == list(range(SIZE))


@pytest.mark.slow
def test_session_left_by_a_plugin_ends_with_its_process(
    pool: PoolProcesses, tmp_path: Path
) -> None:
    worker = pool.start_native_worker()
    file = tmp_path / "left"
    of = {**OF_PLUGIN, "dataset": "leaving_sample", "arguments": {"file": str(file)}}
    said = error_of_cpp(size=20, options={"batch_size": 4}, seed=3, pool=pool.endpoint, **of)
    assert "3 workers in a row died" in said
    worker.wait_for_lines(lambda line: "ended with exit code 1" in line, 3)
    assert worker.end() == 0
    left = [int(line) for line in file.read_text().split()]
    assert process_traces.wait_gone(left, SECONDS_MAX) == []


@pytest.mark.long
@pytest.mark.slow
def test_pool_without_suitable_workers_is_reported(pool: PoolProcesses) -> None:
    pool.start_worker()
    said = error_of_cpp(size=SIZE, options=SHUFFLED, seed=3, pool=pool.endpoint, **OF_PLUGIN)
    assert "no worker of the pool can run this job" in said
    assert "it runs Python, but the dataset is a plug-in; start penstock-worker for it" in said


def failure(of: dict[str, Any], **given: Any) -> str:
    options = {"batch_size": 4, "num_workers": 1}
    return error_of_cpp(size=SIZE, options=options, seed=3, **of, **given)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plugin": "/no/such.so"}, "the plug-in /no/such.so cannot be loaded"),
        (
            {"dataset": "photographs"},
            "does not define the dataset 'photographs'; add PENSTOCK_DATASET(",
        ),
        ({"dataset": "no_file"}, "'no_file' failed: there is no file photographs.txt"),
        ({"dataset": "no_dataset"}, "the factory of 'no_dataset' returned no dataset"),
        ({"arguments": {}}, "the part 'size' was requested from an empty dict"),
        ({"dataset": "bad_sample"}, "(sample 6 of the dataset)\nno sample here"),
        ({"dataset": "fatal_sample"}, "was ended by SIGABRT, and no worker is left"),
    ],
    ids=lambda value: next(iter(value.values()), "") if isinstance(value, dict) else "",
)
def test_plugin_failures_are_reported(changes: dict[str, Any], message: str) -> None:
    assert message in failure({**OF_PLUGIN, **changes})


ENTRY = "struct Entry { const char* penstock; int major, minor; void* make; };\n"
LACKS_A_SYMBOL = "void not_there(void); void penstock_dataset_draw(void) { not_there(); }\n"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("versions", "message"),
    [
        (f'"{penstock.__version__}", 2, 99', "was compiled with the headers of torch 2.99"),
        ('"9.1.0", 2, 11', "was built for penstock 9.1.0, and this is penstock"),
        ("", "undefined symbol: not_there"),
    ],
    ids=["another torch", "another penstock", "a missing symbol"],
)
def test_incompatible_plugin_is_rejected(tmp_path: Path, versions: str, message: str) -> None:
    entry = f"static const struct Entry entry = {{{versions}, 0}};\n"
    ask = "const void* penstock_dataset_draw(void) { return &entry; }\n"
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(ENTRY + entry + ask if versions else LACKS_A_SYMBOL)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert message in failure({**OF_PLUGIN, "plugin": str(library)})


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        ({}, {"PENSTOCK_PYTHON": "/no/python"}, "install a Python with penstock on this machine"),
        ({"python": "no_such_module:f"}, {}, "No module named 'no_such_module'"),
        ({"python": "cpp_loader"}, {}, "its factory must be 'module:function', such as"),
        ({"arguments": {"length": 3}}, {}, "unexpected keyword argument 'length'"),
    ],
    ids=["no Python", "no module", "no function", "other arguments"],
)
def test_python_dataset_failures_are_reported(
    changes: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    assert message in failure({**OF_PYTHON, **changes}, environment=environment)


def test_python_dataset_requires_worker_processes() -> None:
    said = error_of_cpp(size=SIZE, options={"batch_size": 4}, seed=3, **OF_PYTHON)
    assert "set num_workers or pool" in said


@pytest.mark.long
@pytest.mark.slow
def test_workers_end_when_the_program_is_killed() -> None:
    of = {**OF_PLUGIN, "arguments": {"size": 4000, "delay_ms": 5}}
    program = start_cpp(size=SIZE, options={"batch_size": 4, "num_workers": 2}, seed=3, **of)
    assert program.stdout is not None and program.stdout.readline()
    children = process_traces.children(program.pid)
    assert len(children) == 2
    program.kill()
    program.communicate()
    for pid in children:
        _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    fd = None
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        import select

        readable, _, _ = select.select([fd], [], [], 30)
        assert readable, f"process {pid} still runs"
    finally:
        os.close(fd)


def native_worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = native_folder() / "penstock-worker"
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_POOL"}
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=60, env=environment
    )


def test_native_worker_prints_help_and_version() -> None:
    shown = native_worker("--help")
    assert shown.returncode == 0
    assert "--data-advertise ADDRESS" in shown.stdout
    assert native_worker("--version").stdout == f"penstock-worker {penstock.__version__}\n"
    assert not any("python" in line for line in _libraries_of_native_worker())


def _libraries_of_native_worker() -> list[str]:
    program = native_folder() / "penstock-worker"
    ldd = shutil.which("ldd")
    assert ldd is not None
    shown = subprocess.run([ldd, str(program)], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in shown.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the address of the controller is missing; pass --controller tcp://HOST:PORT"),
        (("--processes", "0"), "--processes is '0', but must be from 1 to 256"),
        (("--controler", "x"), "there is no option --controler"),
        (("--controller",), "--controller requires a value"),
        (("--controller", "x"), "--controller:"),
        (("--controller", "tcp://127.0.0.1:9", "--bind", "y"), "--bind:"),
        (("--controller", "tcp://127.0.0.1:9", "--patience", "x"), "--patience is 'x'"),
        (("--controller", "tcp://127.0.0.1:9", "--grace", "0"), "--grace is '0'"),
    ],
)
def test_native_worker_rejects_invalid_arguments(arguments: tuple[str, ...], message: str) -> None:
    done = native_worker(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
