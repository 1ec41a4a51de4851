# SPDX-License-Identifier: Apache-2.0
"""penstock doctor: it names the bottleneck of a program, tries changes, and leaves no traces."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import process_traces
import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock import DataLoader
from penstock.cli.command_line import main
from penstock.doctor.loader_watch import BatchBound, LoaderWatch, ProgramStopped
from penstock.doctor.program_runs import RunRequest

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).resolve().parents[1] / "doctor"
BENCH = Path(__file__).resolve().parents[2] / "bench"
SECONDS_MAX = 240.0
CPUS = sorted(os.sched_getaffinity(0))[:2]  # the programs are made for two
Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]
Write = Callable[[str, str], Path]

LIMITS = {
    "slow_dataset": "dataset",
    "waiting_dataset": "storage",
    "slow_transform": "transform",
    "slow_collate": "collate",
    "few_workers": "workers",
    "tiny_prefetch": "prefetch",
    "slow_trainer": "trainer",
    "restarted_workers": "worker start",
    "slow_samples": "slow samples",
    "movable_model": "offload",
    "kept_batches": "memory",
}
SHORT = ("slow_transform", "waiting_dataset", "slow_trainer")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "doctor", *arguments]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `penstock doctor` with these arguments on two CPUs."""

    def run_doctor(*arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> Outcome:
        done = subprocess.run(
            [*prefix, *command(*arguments)],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            preexec_fn=lambda: os.sched_setaffinity(0, CPUS),
        )
        return done.returncode, done.stdout, done.stderr

    return run_doctor


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, source: str) -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return path

    return write_file


def diagnosed(run: Run, program: str, *arguments: str, **options: Any) -> dict[str, Any]:
    path = str(PROGRAMS / f"program_{program}.py")
    code, out, error = run("--json", *arguments, path, **options)
    assert code == 0, error
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.long("slow_transform", "waiting_dataset")
@pytest.mark.skipif(len(CPUS) < 2, reason="the programs are made for two CPUs")
@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in LIMITS],
)
def test_planted_bottleneck_is_named(run: Run, program: str) -> None:
    found = diagnosed(run, program, "--trials", "0")

    assert found["limit"] == LIMITS[program], found["reason"]


@pytest.mark.long
def test_slow_link_to_a_pool_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    shaped_link = importlib.import_module("shaped_link")
    pool_host = importlib.import_module("pool_host")
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(shaped_link.ShapedLink("100mbit"))
        except shaped_link.NoLinkError as reason:
            pytest.skip(str(reason))
        pool = stack.enter_context(
            pool_host.PoolHost(
                tmp_path, address=shaped_link.POOL_ADDRESS, prefix=link.enter(link.pool_side)
            )
        )
        pool.start_workers(1)
        pool.wait_for_workers(1)

        found = diagnosed(
            run,
            "slow_link",
            "--trials",
            "0",
            prefix=tuple(link.enter(link.trainer_side)),
            PLANTED_POOL=pool.endpoint,
            PENSTOCK_KEYS=pool.keys,
        )

    assert found["limit"] == "link", found["reason"]


def waiting_program(sample_count: int, said: str) -> str:
    """A program that prints a line and reads samples which each sleep 2 ms."""
    return f"""
        import time
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Waiting(Dataset):
            def __len__(self):
                return {sample_count}

            def __getitem__(self, index):
                time.sleep(0.002)
                return torch.tensor(index)

        if __name__ == "__main__":
            print({said!r})
            for epoch in range(1000):
                for batch in DataLoader(Waiting(), batch_size=8, num_workers=1):
                    pass
    """


def test_trial_gives_advice_and_leaves_the_program_unchanged(
    run: Run, write: Write, tmp_path: Path
) -> None:
    source = waiting_program(4096, "the program's own words")
    path = write("waits.py", source)
    before = path.read_bytes()

    code, out, error = run("--trials", "1", "waits.py")

    assert code == 0, error
    assert "The dataset waits for storage" in out
    assert "fetch_threads=" in out and "loader = penstock.DataLoader(..., " in out
    assert "Advice: a step takes" in out
    assert "the program's own words" not in out + error
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["waits.py"]


FAILING = {
    "asks": (
        """
        name = input("name? ")
        """,
        "the program reads from standard input",
    ),
    "no_loader": ("print('no loader here')", "none of its DataLoaders delivered two batches"),
    "fails": ("raise ValueError('a fault of its own')", "ValueError: a fault of its own"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FAILING)
def test_undiagnosable_program_is_reported_with_the_reason(
    run: Run, write: Write, name: str
) -> None:
    source, told = FAILING[name]
    write("program.py", source)

    code, out, error = run("program.py")

    assert code == 1
    assert told in error
    assert out == ""


@pytest.mark.long
def test_program_that_cannot_run_twice_is_diagnosed_once(run: Run, write: Write) -> None:
    write(
        "once.py",
        """
        import os
        import time
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Waiting(Dataset):
            def __len__(self):
                return 4096

            def __getitem__(self, index):
                time.sleep(0.002)
                return torch.tensor(index)

        if __name__ == "__main__":
            os.mkdir("checkpoints")
            for batch in DataLoader(Waiting(), batch_size=8, num_workers=1):
                pass
        """,
    )

    code, out, error = run("once.py")

    assert code == 1, error
    assert "The dataset waits for storage" in out
    assert "The program cannot be run twice" in out
    assert "FileExistsError" in out and "new folder each time" in out


@pytest.mark.long
def test_failing_option_is_reported_and_others_are_tried(run: Run, write: Write) -> None:
    write(
        "one_thread.py",
        """
        import threading
        import time
        import torch
        from torch.utils.data import DataLoader, Dataset

        class OneThread(Dataset):
            def __len__(self):
                return 4096

            def __getitem__(self, index):
                if threading.current_thread() is not threading.main_thread():
                    raise RuntimeError("this dataset is not thread-safe")
                time.sleep(0.002)
                return torch.tensor(index)

        if __name__ == "__main__":
            for batch in DataLoader(OneThread(), batch_size=8, num_workers=1):
                pass
        """,
    )

    code, out, error = run("--json", "--trials", "3", "one_thread.py")

    assert code == 0, error
    found = json.loads(out)
    assert "not thread-safe" in found["trials"][0]["failure"]
    assert found["best"]["fetch_threads"] == 1
    assert found["best"]["num_workers"] > 1


def test_ctrl_c_ends_the_doctor_and_its_processes(tmp_path: Path, write: Write) -> None:
    write("program.py", waiting_program(64, "training"))
    process = subprocess.Popen(
        command("--seconds", "600", "--steps", "100000", "program.py"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        deadline = time.monotonic() + 60
        while len(_python_descendants(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        started = _python_descendants(process.pid)
        assert len(started) >= 2  # the program and a worker
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in error
    deadline = time.monotonic() + 10
    while any(map(process_traces.is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in started if process_traces.is_running(pid)]


def _python_descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        for child in process_traces.children(todo.pop()):
            found.add(child)
            todo.append(child)
    return found


WRONG_CALLS = {
    (): "missing program; name a file",
    ("nothing.py",): "the file 'nothing.py' does not exist",
    ("--steps", "1", "x.py"): "--steps must be an integer from 2 to 100000, got '1'",
    ("--trails", "2", "x.py"): "there is no option --trails; did you mean --trials?",
}


@pytest.mark.parametrize("arguments", WRONG_CALLS)
def test_invalid_call_is_reported(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["penstock", "doctor", *arguments])

    assert main() == 2

    assert WRONG_CALLS[arguments] in capsys.readouterr().err


def test_one_of_several_ranks_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["penstock", "doctor", "train.py"])

    assert main() == 2

    assert "one of several ranks" in capsys.readouterr().err


def watch_of_loaders(folder: Path, **options: Any) -> LoaderWatch:
    orders = RunRequest(-1, str(folder), **{"steps": 1000, "seconds": 1000.0, **options})
    return LoaderWatch(orders, lambda _: None)


def rows(count: int = 64) -> TensorDataset:
    return TensorDataset(torch.arange(2 * count).reshape(count, 2))


def test_patch_of_another_tool_survives_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch was lost when a watch removed its hook."""
    calls: Counter[str] = Counter()
    model = torch.nn.Linear(2, 2)

    def train() -> None:
        for (inputs,) in DataLoader(rows(8), batch_size=4):
            model(inputs.float()).sum().backward()

    def put_on(owner: Any, name: str) -> Any:
        former = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return former(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
        return counted

    call = torch.nn.Module.__call__
    monkeypatch.setattr(torch.nn.Module, "__call__", call)  # put back at the end, over any change
    with watch_of_loaders(tmp_path, loader=0, offload=True):
        patch = put_on(torch.nn.Module, "__call__")
        train()
    assert torch.nn.Module.__call__ is patch
    before = calls.copy()
    train()
    assert calls["__call__"] > before["__call__"]


@pytest.mark.parametrize("make_watch", [watch_of_loaders, lambda _: BatchBound(1000)])
def test_doctor_replaces_no_method_of_a_loader(
    tmp_path: Path, make_watch: Callable[[Path], AbstractContextManager[Any]]
) -> None:
    owners = (DataLoader, *DataLoader.__mro__, _BaseDataLoaderIter)
    before = [dict(vars(owner)) for owner in owners]
    with make_watch(tmp_path):
        assert [dict(vars(owner)) for owner in owners] == before
    assert [dict(vars(owner)) for owner in owners] == before


def test_overrides_apply_to_the_loader_with_the_number(tmp_path: Path) -> None:
    changed = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True}
    with watch_of_loaders(tmp_path, loader=1, overrides=changed) as watch:
        other = DataLoader(rows(), batch_size=4)
        loader = DataLoader(rows(), batch_size=4, pin_memory=False)
        batches = [batch.tolist() for (batch,) in loader]
        for _ in other:
            pass
        found = watch.result().loaders
    assert batches == [batch.tolist() for (batch,) in DataLoader(rows(), batch_size=4)]
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
    assert (other.num_workers, other.prefetch_factor) == (0, None)
    settings = [one.observation.settings for one in found]
    assert [(one.num_workers, one.persistent_workers) for one in settings] == [
        (0, False),
        (1, True),
    ]


def test_override_without_workers_drops_the_options_of_workers(tmp_path: Path) -> None:
    with watch_of_loaders(tmp_path, loader=0, overrides={"num_workers": 0}) as watch:
        loader = DataLoader(
            rows(), batch_size=4, num_workers=2, prefetch_factor=4, persistent_workers=True
        )
        assert len(list(loader)) == 16
        [found] = watch.result().loaders
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (
        0,
        None,
        False,
    )
    assert loader.stats().iterator == "torch"
    assert found.observation.settings.num_workers == 0


def test_epochs_of_dropped_loaders_are_in_one_record(tmp_path: Path) -> None:
    with watch_of_loaders(tmp_path) as watch:
        for _ in range(3):
            for _ in DataLoader(rows(), batch_size=4, num_workers=1):  # no other reference to it
                pass
        [found] = watch.result().loaders
    observed = found.observation
    assert observed.epoch_steps == 16
    assert observed.delivered > 0 and observed.dataset_s > 0
    assert 0 < observed.start_s
    assert len(observed.batches) >= observed.steps
    assert all(one.making_s > 0 for one in observed.batches)


def test_loader_with_an_iterator_of_torch_is_examined(tmp_path: Path) -> None:
    with watch_of_loaders(tmp_path) as watch:
        pipe = IterableWrapper(list(range(64)))
        loader = DataLoader(pipe, batch_size=4, num_workers=1, persistent_workers=True)
        for _ in range(2):
            assert len(list(loader)) == 16
        [found] = watch.result().loaders
    assert loader.stats().iterator == "fallback"
    assert found.observation.epoch_steps == 16
    assert found.observation.steps >= 16
    assert found.observation.step_s > 0


def test_enough_steps_end_the_program(tmp_path: Path) -> None:
    results: list[Any] = []
    orders = RunRequest(-1, str(tmp_path), steps=2, seconds=0.1)
    with LoaderWatch(orders, results.append) as watch, pytest.raises(ProgramStopped):
        while True:
            for _ in DataLoader(rows(), batch_size=4):
                time.sleep(0.01)
    assert watch.is_stopped and results[0].is_stopped
    assert results[0].busiest.observation.compute_s > 0


def test_batch_bound_ends_the_program_after_the_batches() -> None:
    count = 0
    with BatchBound(20) as bound, pytest.raises(ProgramStopped):
        while True:
            for _ in DataLoader(rows(), batch_size=4):
                count += 1
    assert bound.is_reached
    assert count == 20
