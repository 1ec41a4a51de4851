# SPDX-License-Identifier: Apache-2.0
"""penstock run: a program sees and shows the same as under python, but has penstock's loader."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli.command_line import main

pytestmark = pytest.mark.slow

PYTHON = [sys.executable]
PENSTOCK = [sys.executable, "-m", "penstock", "run"]
SECONDS_MAX = 60.0
Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]
Call = Callable[..., Outcome]
Write = Callable[[str, str], Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a command in the test's folder."""

    def run_command(*command: str | os.PathLike[str]) -> Outcome:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS_MAX
        )
        return (done.returncode, done.stdout, done.stderr)

    return run_command


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write_file(name: str, source: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write_file


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Call]:
    """Calls the command in this process, in a folder without a program."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def call_command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        return (main(), *capsys.readouterr())

    yield call_command
    penstock.uninstall()


SURROUNDINGS = """
    import sys
    main = sys.modules["__main__"]
    seen = dict(main.__dict__, main=None)
    for name in ("__name__", "__file__", "__package__", "__spec__", "__doc__", "__cached__"):
        print(name, seen[name] if name != "__spec__" else getattr(seen[name], "name", None))
    print(type(seen["__loader__"]).__name__, seen["__builtins__"], seen.get("__annotations__"))
    print(main.__dict__ is globals(), sys.argv, sys.path)
"""


@pytest.mark.long
@pytest.mark.parametrize("path", ["train.py", "./train.py", "code/train.py"])
def test_file_has_the_same_globals_as_under_python(run: Run, write: Write, path: str) -> None:
    write(path, SURROUNDINGS)
    arguments = [path, "--epochs", "3", "-m", "--help", "--", "x"]
    assert run(*PENSTOCK, *arguments) == run(*PYTHON, *arguments)


@pytest.mark.long
def test_symlinked_file_imports_from_its_real_folder(
    run: Run, write: Write, tmp_path: Path
) -> None:
    write("code/neighbour.py", "print('found')")
    write("code/train.py", "import neighbour")
    (tmp_path / "link.py").symlink_to("code/train.py")
    assert run(*PENSTOCK, "link.py") == run(*PYTHON, "link.py") == (0, "found\n", "")


@pytest.mark.long
@pytest.mark.parametrize("name", ["package.train", "package"])
def test_module_has_the_same_globals_as_under_python(run: Run, write: Write, name: str) -> None:
    write("package/__init__.py", "import sys; print(sys.argv)")
    write("package/train.py", SURROUNDINGS)
    write("package/part.py", "print(__name__)")
    write("package/__main__.py", f"{SURROUNDINGS}\n    from . import part")
    arguments = ["-m", name, "--epochs", "3"]
    got, want = run(*PENSTOCK, *arguments), run(*PYTHON, *arguments)
    assert (got[0], got[2]) == (want[0], want[2]) == (0, "")
    assert got[1] == want[1]


def test_installed_command_runs_a_file(run: Run, write: Write) -> None:
    write("train.py", SURROUNDINGS)
    command = Path(sys.executable).with_name("penstock")
    assert run(command, "run", "train.py", "3") == run(*PYTHON, "train.py", "3")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "ending",
    [
        "raise ValueError('loss is nan')",
        "raise SystemExit(7)",
        "sys.exit('no data')",
        "raise KeyboardInterrupt",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('a') from error",
        "sys.excepthook = lambda *it: print(it[1], traceback.extract_tb(it[2]))\n1 / 0",
        "if True print('no colon')",
    ],
)
def test_program_exits_as_under_python(run: Run, write: Write, ending: str) -> None:
    imports = "import sys, traceback\n"
    write("train.py", f"{imports}def train():\n{textwrap.indent(ending, '    ')}\ntrain()\n")
    assert run(*PENSTOCK, "train.py") == run(*PYTHON, "train.py")


@pytest.mark.long
def test_interrupt_ends_program_as_under_python(write: Write) -> None:
    # An interrupt that arrives right before a wait without an end would not end that wait.
    path = write("train.py", "import time\nprint(1, flush=True)\nwhile True: time.sleep(0.05)")
    for command in (PENSTOCK, PYTHON):
        process = subprocess.Popen(
            [*command, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A background process of a script ignores it, and so do its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=SECONDS_MAX)
        # The line in which the program was interrupted differs from run to run.
        assert re.findall(r'File "(.*)", line \d', error) == [str(path)]
        assert error.endswith("KeyboardInterrupt\n")
        assert process.returncode == -signal.SIGINT


@pytest.mark.long
def test_penstock_future_imports_do_not_affect_the_program(run: Run, write: Write) -> None:
    write("train.py", "def f(x: 1 + 1): ...\nprint(f.__annotations__)")
    assert run(*PENSTOCK, "train.py") == (0, "{'x': 2}\n", "")


TRAINING = """
    import multiprocessing
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index): return index * index

    def report(rank, *_):
        print("in", __name__, type(DataLoader(Squares())).__mro__[1].__module__, flush=True)

    if __name__ == "__main__":
        for method in ("fork", "spawn", "forkserver"):
            loader = DataLoader(
                Squares(), batch_size=2, num_workers=2, multiprocessing_context=method
            )
            print([batch.tolist() for batch in loader])
        print(loader.stats().iterator)
        torch.multiprocessing.spawn(report, nprocs=1)
"""


@pytest.mark.long
@pytest.mark.parametrize("form", ["train.py", "-m train"])
def test_program_and_spawned_children_use_penstock_loader(
    run: Run, write: Write, form: str
) -> None:
    write("train.py", TRAINING)
    code, out, error = run(*PENSTOCK, *form.split())
    assert (code, error) == (0, "")
    batches = ["[[0, 1], [4, 9]]"] * 3
    assert out.splitlines() == [*batches, "penstock", "in __mp_main__ penstock.loader.dataloader"]


@pytest.mark.long
def test_classes_of_the_program_can_be_pickled(run: Run, write: Write) -> None:
    source = "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)) is A)"
    write("train.py", source)
    assert run(*PENSTOCK, "train.py") == (0, "True\n", "")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("run missing.py", r"can't open file '.*/missing.py': \[Errno 2\] No such file"),
        ("run folder", r"can't open file '.*/folder': \[Errno 21\] Is a directory"),
        ("run -m missing", "no module named missing"),
        ("run -m json.missing", "no module named json.missing"),
        ("run -m folder", "no module named folder.__main__"),
        ("run -m sys", "sys has no code to run"),
    ],
)
def test_wrong_run_arguments_are_explained(call: Call, arguments: str, reason: str) -> None:
    code, out, error = call(*arguments.split())
    assert (code, out) == (2, "")
    assert re.match(f"penstock: {reason}", error), error


@pytest.mark.long
@pytest.mark.parametrize("form", ["--no-python penstock run", "-m penstock run"])
def test_torchrun_starts_programs_under_penstock(run: Run, write: Write, form: str) -> None:
    write(
        "train.py",
        """
        import os, torch.distributed
        from torch.utils.data import DataLoader, DistributedSampler
        torch.distributed.init_process_group("gloo")
        sampler = DistributedSampler(range(6))
        loader = DataLoader(range(6), sampler=sampler, num_workers=1)
        total = sum(loader).sum()
        torch.distributed.all_reduce(total)
        if torch.distributed.get_rank() == 0:
            print(int(total), loader.stats().iterator)
        torch.distributed.destroy_process_group()
        """,
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    folder = str(Path(sys.executable).parent)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    outcome = run(
        "env",
        *(f"{k}={v}" for k, v in environment.items()),
        *command,
        *rendezvous,
        *form.split(),
        "train.py",
    )
    assert outcome[:2] == (0, "15 penstock\n"), outcome
