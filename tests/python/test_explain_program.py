# SPDX-License-Identifier: Apache-2.0
"""penstock explain: a program runs unchanged until its model's plan is known, and leaves no
traces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import process_traces
import pytest
import torch
from dot_grammar import parse_dot
from torch.utils.data.dataloader import _BaseDataLoaderIter

import penstock
from penstock.cli.command_line import main

pytestmark = pytest.mark.slow

PENSTOCK = [sys.executable, "-m", "penstock"]
SECONDS_MAX = 90.0
EXIT_SECONDS_MAX = 10.0
Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]
Write = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `penstock` with these arguments, and checks that all of its processes have ended."""

    def run_command(*arguments: str) -> Outcome:
        process = subprocess.Popen(
            [*PENSTOCK, *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                out, error = process.communicate(timeout=SECONDS_MAX)
            except BaseException:
                for pid in session_members(process.pid):
                    os.kill(pid, 9)
                raise
        process_traces.wait_gone(session_members(process.pid), EXIT_SECONDS_MAX)
        assert not session_members(process.pid)
        return process.returncode, out, error

    return run_command


def session_members(session: int) -> set[int]:
    members: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if int(fields[3]) == session and fields[0] != "Z":
                members.add(int(entry.name))
    return members


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, *sources: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(textwrap.dedent(source) for source in sources))
        return path

    return write_file


NET = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset, TensorDataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1))
            self.conv = nn.Conv2d(3, 4, 3)
            self.head = nn.Linear(4, 2)

        def forward(self, x, mask=None):
            x = x.float() / 255 - self.mean
            if mask is not None:
                x = x * mask.unsqueeze(1).float()
            return self.head(self.conv(x).mean((2, 3)))

    def loader_of(workers, count=32):
        torch.manual_seed(0)
        images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8)
        data = TensorDataset(images, torch.zeros(count, dtype=torch.long))
        return DataLoader(data, batch_size=4, num_workers=workers)
"""
TRAINING = """
    if __name__ == "__main__":
        print("training begins", sys.argv, __name__, __file__)
        model, criterion = Net(), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for images, labels in loader_of(int(sys.argv[1])):
            loss = criterion(model(images), labels)
            print("a step was made")
            loss.backward()
            optimizer.step()
"""
IMAGE_BYTES = 4 * 3 * 8 * 8


def operators(plan: dict[str, list[dict[str, str]]], part: str = "moved") -> list[str]:
    return [call["operator"].partition(" at ")[0] for call in plan[part]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", ["0", "2"])
def test_unchanged_program_is_explained_at_its_first_model_call(
    run: Run, write: Write, workers: str
) -> None:
    path = write("train.py", NET, TRAINING)
    code, out, error = run("explain", "--cut", "maximal", "train.py", workers, "--format", "x")
    assert code == 0
    begun, subject = error.splitlines()
    arguments = f"['train.py', '{workers}', '--format', 'x']"
    assert begun == f"training begins {arguments} __main__ {path}"
    loaded = "without workers (priced as with 2)" if workers == "0" else "by 2 workers"
    line = path.read_text().splitlines().index("        loss = criterion(model(images), labels)")
    assert subject == (
        f"penstock: the plan of Net, called at train.py:{line + 1} in train mode with 1 of the 2 "
        f"tensors of a batch loaded {loaded}"
    )
    assert re.match(r"\d of \d+ calls run in the workers", out)
    lines = out[out.index("\nmoves ") + 1 :].splitlines()
    assert re.match(r"float at train.py:\d+ +[\d.]+ +[\d.]+ +3,072$", lines[1])
    assert [line.split()[0] for line in lines[1:4]] == ["float", "truediv", "sub"]
    assert lines[4].startswith("... 3 calls stay, conv2d, mean, linear at train.py:")
    assert ": 2 need parameters, 1 needs" in lines[4]
    assert {"no cut", "everything that can move", "this plan"} <= {
        re.split(" {2,}", line)[0] for line in lines
    }
    assert len(out.splitlines()) <= 14


@pytest.mark.long
def test_verbose_lists_every_call(run: Run, write: Write) -> None:
    write("train.py", NET, TRAINING)
    code, out, _ = run("explain", "--cut", "maximal", "--verbose", "train.py", "2")
    assert code == 0
    lines = out[out.index("\noperator ") + 1 :].splitlines()
    assert re.match("operator +runs in +worker ms +trainer ms +bytes +why$", lines[0])
    assert re.match(r"float at train.py:\d+ +worker +[\d.]+ +[\d.]+ +3,072  \[1\]$", lines[2])
    assert [line.split()[0] for line in lines[2:8]] == [
        "float", "truediv", "sub", "conv2d", "mean", "linear",
    ]  # fmt: skip
    assert "each reads one of these, which training changes: conv.weight, " in out


@pytest.mark.long
def test_json_output_is_one_object_despite_program_output(run: Run, write: Write) -> None:
    noise = """
    import atexit, os, subprocess
    print("of Python")
    os.write(1, b"of the descriptor\\n")
    subprocess.run(["echo", "of a child"])
    atexit.register(print, "at the end")
    class Loud(TensorDataset):
        def __getitem__(self, index):
            print("of a worker", flush=True)
            return super().__getitem__(index)
    TensorDataset = Loud
    """
    write("train.py", NET, noise, TRAINING)
    code, out, error = run("explain", "--format=json", "--cut=maximal", "train.py", "2")
    assert code == 0
    plan = json.loads(out)
    assert out.count("\n") == 1
    for line in ("of Python", "of the descriptor", "of a child", "of a worker", "at the end"):
        assert f"{line}\n" in error
    assert operators(plan) == ["float", "truediv", "sub"] and plan["refused"] is None
    assert (plan["raw_bytes"], plan["boundary_bytes"]) == (IMAGE_BYTES, 4 * IMAGE_BYTES)
    assert [item["cut"] for item in plan["totals"]] == ["none", "maximal", "chosen"]


@pytest.mark.long
def test_samples_of_images_are_explained_after_the_plan(run: Run, write: Write) -> None:
    write(
        "train.py",
        """
        import numpy as np
        import torch
        from PIL import Image
        from torchvision import datasets, transforms

        import pathlib
        pathlib.Path("images/one").mkdir(parents=True)
        noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
        Image.fromarray(noise).save("images/one/0.jpg", quality=90)
        crop = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
        data = datasets.ImageFolder("images", crop)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))
        for images, labels in torch.utils.data.DataLoader(data):
            model(images)
        """,
    )
    code, out, error = run("explain", "train.py")
    assert code == 0, error
    assert re.search(
        r"lists every call\.\n\nA sample of ImageFolder: \d of 4 steps are native", out
    )
    assert re.search(r"\n  RandomResizedCrop +(native|Python) ", out)


def test_module_is_explained_as_dot(run: Run, write: Write) -> None:
    write("package/__init__.py", "")
    write("package/train.py", NET, TRAINING)
    code, out, error = run(
        "explain", "--cut", "maximal", "--format", "dot", "-m", "package.train", "0"
    )
    assert code == 0, error
    graph = parse_dot(out)
    clusters = {
        graph.nodes[name]["label"].split("\n")[0]: c for name, c in graph.cluster_of.items()
    }
    assert clusters == {
        "float": "cluster_worker",
        "truediv": "cluster_worker",
        "sub": "cluster_worker",
        "conv2d": "cluster_trainer",
        "mean": "cluster_trainer",
        "linear": "cluster_trainer",
    }
    (crossing,) = [edge for edge in graph.edges if "style" in edge[2]]
    assert crossing[2]["label"] == f"{4 * IMAGE_BYTES:,}"


@pytest.mark.long
def test_page_is_written_even_if_the_program_changes_folder(
    run: Run, write: Write, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    write("train.py", "import os\nos.chdir('elsewhere')", NET, TRAINING)
    code, out, error = run("explain", "--cut", "maximal", "--html", "plan.html", "train.py", "0")
    assert code == 0, error
    assert out.startswith("3 of 6 calls run in the workers")
    page = (tmp_path / "plan.html").read_text()
    assert '"name": "float at train.py:' in page and "3 of 6 calls run in the workers" in page


@pytest.mark.long
def test_failed_page_write_is_reported_after_the_plan(
    run: Run, write: Write, tmp_path: Path
) -> None:
    """The folder exists when the command starts, and the program removes it."""
    (tmp_path / "folder").mkdir()
    write("train.py", "import os\nos.rmdir('folder')", NET, TRAINING)
    code, out, error = run("explain", "--html", "folder/plan.html", "train.py", "0")
    assert code == 1
    assert "calls run in the workers" in out
    assert "penstock: the picture of the plan could not be written: [Errno 2]" in error


@pytest.mark.long
@pytest.mark.parametrize(("options", "moved"), [((), 3), (("--cut", "none"), 0)])
def test_offload_arguments_apply_unless_cut_is_given(
    run: Run, write: Write, options: tuple[str, ...], moved: int
) -> None:
    offloaded = TRAINING.replace(
        "optimizer =", 'penstock.offload(model, loader := loader_of(2), cut="maximal"); optimizer ='
    ).replace("in loader_of(int(sys.argv[1]))", "in loader")
    write("train.py", NET, "import penstock", offloaded)
    code, out, error = run("explain", "--format", "json", *options, "train.py")
    assert code == 0, error
    assert len(json.loads(out)["moved"]) == moved and "a step was made" not in error


@pytest.mark.long
def test_offloaded_submodule_is_explained_alone(run: Run, write: Write) -> None:
    write(
        "train.py",
        NET,
        """
        import penstock

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.other, self.net = nn.Conv2d(3, 1, 1), Net()
            def forward(self, x):
                return self.net(x), self.other(x.float())

        if __name__ == "__main__":
            loader, model = loader_of(2), Whole()
            penstock.offload(model.net, loader, cut="maximal")
            for images, labels in loader:
                model(images)
        """,
    )
    code, out, error = run("explain", "--format", "json", "train.py")
    assert code == 0 and "the plan of Net, called at train.py" in error
    assert operators(json.loads(out)) == ["float", "truediv", "sub"]


@pytest.mark.long
def test_batch_tensors_are_recognised_among_keyword_inputs(run: Run, write: Write) -> None:
    write(
        "train.py",
        NET,
        """
        class Pairs(Dataset):
            def __len__(self):
                return 32
            def __getitem__(self, index):
                image = torch.full((3, 8, 8), index, dtype=torch.uint8)
                return {"x": image, "mask": torch.ones(8, 8, dtype=torch.bool), "label": index % 2}

        if __name__ == "__main__":
            model = Net().eval()
            model(torch.zeros(1, 3, 8, 8))  # before there is a batch
            for batch in DataLoader(Pairs(), batch_size=4, num_workers=2):
                labels = batch.pop("label")
                model(mask=batch["mask"], x=torch.zeros_like(batch["x"]))  # x is another's
        """,
    )
    code, out, error = run("explain", "--format", "json", "--cut", "maximal", "train.py")
    assert code == 0, error
    assert "in eval mode with 1 of the 3 tensors of a batch loaded by 2 workers" in error
    plan = json.loads(out)
    assert operators(plan) == ["unsqueeze", "float"]
    assert {edge["leaf"] for edge in plan["edges"]} == {None, 1}


@pytest.mark.long
def test_outermost_model_with_parameters_and_a_batch_is_chosen(run: Run, write: Write) -> None:
    write(
        "train.py",
        NET,
        """
        class Doubled(nn.Module):  # no parameters: no model
            def forward(self, x):
                return x * 2

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = Net()
            def forward(self, batch):
                return self.net(batch[0].flip(-1))

        if __name__ == "__main__":
            doubled, critic, outer, second = Doubled(), nn.Linear(4, 1), Outer(), Net()
            before, after = loader_of(2), loader_of(2)
            seen = None
            for images, labels in before:  # a pass for statistics calls no model
                pass
            for images, labels in after:
                critic(torch.randn(4, 4))
                doubled(images)
                next(iter(before))  # what is delivered meanwhile is another batch
                outer((images, labels))
                second(images)
        """,
    )
    code, out, error = run("explain", "--format", "json", "--cut", "maximal", "train.py")
    assert code == 0, error
    assert "the plan of Outer, called at train.py" in error
    assert "with 2 of the 2 tensors" in error
    assert operators(json.loads(out)) == ["flip", "float", "truediv", "sub"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked", ["images", "images and a mask of the program's"])
def test_patch_of_another_tool_survives_the_watch(run: Run, write: Write, asked: str) -> None:
    """The tool's patch was lost when the watch removed its hook: at its end, and in mid-program
    where the model takes a tensor that is not of the batch, whose origin is followed through more
    batches.
    """
    write(
        "train.py",
        NET,
        """
        import atexit
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        counts = {}

        def watch(owner, name):
            former = getattr(owner, name)

            def counted(*args, **kwargs):
                counts[name] = counts.get(name, 0) + 1
                return former(*args, **kwargs)

            setattr(owner, name, counted)

            def tell():
                is_kept = vars(owner)[name] is counted
                print(name, "is kept" if is_kept else "is lost", counts[name], file=sys.stderr)

            atexit.register(tell)

        if __name__ == "__main__":
            watch(nn.Module, "__call__")
            watch(_BaseDataLoaderIter, "__next__")
            model = Net()
            for images, labels in loader_of(0):
                if "mask" in sys.argv[1]:
                    model(images, torch.ones(len(images), 8, 8))
                else:
                    model(images)
        """,
    )
    code, out, error = run("explain", "train.py", asked)
    assert code == 0, error
    assert "the plan of Net, called at train.py" in error
    counts = dict(re.findall(r"(__\w+__) is kept (\d+)", error))
    assert counts.keys() == {"__call__", "__next__"}, error
    # Calls of the program after the plan was first made were not counted.
    assert "mask" not in asked or min(map(int, counts.values())) > 1


@pytest.mark.long
@pytest.mark.parametrize("batches", ["1", "5"])
def test_extra_input_tensor_does_not_select_an_inner_module(
    run: Run, write: Write, batches: str
) -> None:
    """Hugging Face's Trainer passes `num_items_in_batch` to the model in addition to its batch, and
    the plan was BertEmbeddings' plan.
    """
    write(
        "train.py",
        NET,
        """
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.net = nn.Conv2d(3, 3, 1), Net()
            def forward(self, images, labels, num_items_in_batch):
                self.embed(images.float())
                self.net(images)
                return self.net(images.flip(-1), None).sum() / num_items_in_batch

        if __name__ == "__main__":
            model = Outer()
            for images, labels in loader_of(2, 4 * int(sys.argv[1])):
                model(images, labels, torch.tensor(4))
        """,
    )
    code, out, error = run("explain", "--format", "json", "--cut", "maximal", "train.py", batches)
    assert code == 0, error
    assert "the plan of Outer, called at train.py" in error
    assert "with 2 of the 2 tensors" in error
    assert "flip" in operators(json.loads(out))


@pytest.mark.long
def test_compiled_and_autocast_models_have_a_plan(run: Run, write: Write) -> None:
    compiled = TRAINING.replace("Net(), nn", 'torch.compile(Net(), backend="eager"), nn')
    write("train.py", NET, compiled)
    code, out, error = run("explain", "--format", "json", "--cut", "maximal", "train.py", "0")
    assert (code, operators(json.loads(out))) == (0, ["float", "truediv", "sub"]), error
    assert "the plan of Net" in error
    autocast = TRAINING.replace(
        "        for", '        torch.autocast("cpu").__enter__()\n        for'
    )
    write("train.py", NET, autocast)
    code, out, error = run("explain", "--format", "json", "--cut", "maximal", "train.py", "0")
    assert (code, operators(json.loads(out))) == (0, ["float", "truediv", "sub"]), error


CONVERTED = (
    NET
    + """
    if __name__ == "__main__":
        model, criterion = Net(), nn.CrossEntropyLoss()
        half, order = torch.tensor(0.5), torch.tensor([1, 0, 3, 2])
        for images, labels in loader_of(2, count=4 * int(sys.argv[1])):
            criterion(model(INPUT), labels)
"""
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "moved"),
    [
        ("images.to('cpu').float()", ["_to_copy", "truediv", "sub"]),
        ("images.flip(-1)", ["flip", "float", "truediv", "sub"]),
        ("images.float().div_(255).sub_(half)", ["_to_copy", "div", "sub", "truediv", "sub"]),
    ],
)
def test_conversions_before_the_model_call_are_part_of_the_plan(
    run: Run, write: Write, made: str, moved: list[str]
) -> None:
    write("train.py", CONVERTED.replace("INPUT", made))
    code, out, error = run("explain", "--format", "json", "--cut", "maximal", "train.py", "400")
    assert code == 0, error
    assert "with 0 of the 2 tensors, and 1 that the program computed from them, of a batch" in error
    assert operators(json.loads(out)) == moved


@pytest.mark.long
def test_raw_input_does_not_end_the_search_for_converted_ones(run: Run, write: Write) -> None:
    call = (
        "images.float(), torch.ones_like(images[:, 0]) > 0 if MASK else labels[:, None, None] < 1"
    )
    for mask, count in (("True", "400"), ("False", "400"), ("False", "1")):
        write("train.py", CONVERTED.replace("INPUT", call.replace("MASK", mask)))
        code, out, error = run("explain", "--format", "json", "--cut", "maximal", "train.py", count)
        if count == "1":
            assert code == 1 and json.loads(out)["error"]["code"] == "no-plan", error
            continue
        assert code == 0, error
        assert {"_to_copy", "truediv", "sub"} <= set(operators(json.loads(out)))


@pytest.mark.long
def test_plan_uses_the_traceable_inputs_seen_so_far(run: Run, write: Write) -> None:
    write("train.py", CONVERTED.replace("INPUT", "images, images[order, 0] > 7"))
    for batches in ("1", "400"):
        code, out, error = run(
            "explain", "--format", "json", "--cut", "maximal", "train.py", batches
        )
        assert code == 0, error
        assert "with 1 of the 2 tensors of a batch" in error
        assert operators(json.loads(out)) == ["float", "truediv", "sub"]


@pytest.mark.long
def test_untraceable_input_is_reported_after_at_most_16_batches(run: Run, write: Write) -> None:
    write("train.py", CONVERTED.replace("INPUT", "images[order].float()"))
    for batches, seen, times in (("3", "3 batches", "3 times"), ("400", "16 batches", "16 times")):
        code, out, error = run("explain", "--format", "json", "train.py", batches)
        assert code == 1 and json.loads(out)["error"]["code"] == "no-plan"
        (line,) = error.splitlines()
        assert line == (
            f"penstock: there is no plan: {seen} were delivered, but no model was called with a "
            "tensor of one, or with a tensor computed from one by operators that can be tracked "
            "(random operators, indexing and other libraries cannot be, nor can the first batch): "
            f"Net was called {times}, first with float32 [4, 3, 8, 8]; compute it in the model's "
            "forward or in the dataset"
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ("pass", "no batch was delivered by a DataLoader in the program's main process, and"),
        (
            "list(loader_of(2))",
            "8 batches were delivered, but there is no model to explain: none was called",
        ),
        (
            "sys.exit([nn.Flatten()(x) for x, _ in loader_of(0, count=4)][:0] or 0)",
            "1 batch was delivered, but there is no model to explain: only Flatten was called, ",
        ),
        (
            "m = Net()\n    for x, _ in loader_of(0): m(x.mul_(2))",
            "first with uint8 [4, 3, 8, 8] of a batch, but modified in place since; compute it",
        ),
    ],
)
def test_missing_model_call_is_reported_with_what_was_seen(
    run: Run, write: Write, body: str, seen: str
) -> None:
    write("train.py", NET, f'if __name__ == "__main__":\n    {body}\n')
    code, out, error = run("explain", "train.py")
    assert (code, out) == (1, "")
    assert error.startswith("penstock: there is no plan: ") and error.count("\n") == 1
    assert seen in error


FAILURES = {
    "before": "raise ValueError('no data')",
    "in_a_model": "for x, _ in loader_of(0): nn.Linear(5, 5)(Net()(torch.zeros(1, 3, 8, 8)))",
    "in_a_dataset": "next(iter(DataLoader([1, 'a'], batch_size=2)))",
    "by_exit": "sys.exit(7)",
    "by_message": "sys.exit('no data')",
}


@pytest.mark.long("before", "by_exit", "by_message", "in_a_model", "in_a_dataset")
@pytest.mark.parametrize("failure", FAILURES)
def test_failing_program_ends_as_under_penstock_run(run: Run, write: Write, failure: str) -> None:
    write("train.py", NET, f'if __name__ == "__main__":\n    {FAILURES[failure]}\n')
    got, want = run("explain", "train.py"), run("run", "train.py")
    assert got == want and want[0] in (1, 7)


@pytest.mark.long
def test_program_that_resists_exit_is_ended_and_its_plan_printed(run: Run, write: Write) -> None:
    write(
        "train.py",
        NET,
        """
        import os, queue, threading

        def train(results):
            model = Net()
            for images, _ in loader_of(2):
                try:
                    results.put(model(images))
                except BaseException:
                    print("caught")
                    if "leave" in sys.argv:
                        sys.stdout.flush()
                        os._exit(3)
                finally:
                    undefined_name

        if __name__ == "__main__":
            results = queue.Queue()
            if "thread" in sys.argv:
                threading.Thread(target=train, args=(results,)).start()
                results.get()  # which never comes
            train(results)
        """,
    )
    code, out, error = run("explain", "train.py")
    assert code == 0 and "of 6 calls run in the workers" in out
    assert error.splitlines()[1:] == ["caught"]
    code, out, error = run("explain", "train.py", "leave")
    assert code == 3 and "of 6 calls run in the workers" in out
    assert error.splitlines()[1:] == ["caught"]
    # Background jobs of a shell ignore interrupts: such a program waited for ever.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, out, error = run("explain", "train.py", "thread")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0 and "of 6 calls run in the workers" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("missing.py", r"can't open file '.*/missing.py': \[Errno 2\] No such file"),
        ("-m missing", "no module named missing"),
    ],
)
def test_missing_program_is_reported_and_hooks_are_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["penstock", "explain", *arguments.split()])
    called, advanced = torch.nn.Module.__call__, _BaseDataLoaderIter.__next__
    assert main() == 2
    penstock.uninstall()
    out, error = capfd.readouterr()
    assert out == "" and re.match(f"penstock: {reason}", error), error
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert (torch.nn.Module.__call__, _BaseDataLoaderIter.__next__) == (called, advanced)
