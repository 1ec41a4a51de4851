# SPDX-License-Identifier: Apache-2.0
"""The record of visits has each batch that a program was given, and shows its faults."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import GlooRanks
from page_snippets import ROOT
from pool_datasets import CODE
from pool_processes import PoolProcesses
from test_json_output import check
from torch.utils.data import IterableDataset, TensorDataset, WeightedRandomSampler
from visits_job import Numbers

from penstock import DataLoader, PenstockError, Pool, Ranks, _pool

JOB = Path(__file__).parent / "visits_job.py"
COUNT, SIZE = 512, 16
WORKERS: dict[str, dict[str, Any]] = {
    "in process": {"num_workers": 0},
    "workers": {"num_workers": 2},
    "seeded by batch": {"num_workers": 2, "seeding": "batch"},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "any order": {"num_workers": 2, "in_order": False},
    "window": {"num_workers": 2, "in_order": 8},
    "commits": {"num_workers": 2, "seeding": "batch", "commit": "manual"},
}
Batches = list[list[int]]


def audit(folder: Path) -> dict[str, Any]:
    return _pool.VisitFolder.open(str(folder)).audit()


def root(folder: Path) -> str:
    (found,) = _pool.VisitFolder.open(str(folder)).roots()
    return str(found["root"])


def compare(a: Path, b: Path) -> dict[str, Any]:
    opened = [_pool.VisitFolder.open(str(one)) for one in (a, b)]
    return _pool.VisitFolder.compare(*opened)


def loader_of(folder: Path, dataset: Any = None, **options: Any) -> Any:
    options = {"batch_size": SIZE, **options}
    if "sampler" not in options and "batch_sampler" not in options:
        options.setdefault("shuffle", True)
    generator = torch.Generator().manual_seed(3)
    dataset = Numbers(COUNT) if dataset is None else dataset
    loader = DataLoader(dataset, generator=generator, **options)
    loader.record_visits(folder)
    return loader


def penstock(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, arguments)], capture_output=True, text=True
    )


# The record.


def leaf_of(epoch: int, step: int, indices: list[int]) -> bytes:
    """The record of a batch from its kind on, as the format is documented."""
    low, high = min(indices), max(indices)
    is_run = indices == list(range(low, low + len(indices)))
    width = 0 if is_run else max(1, (int(high - low).bit_length() + 7) // 8)
    head = b"\x02" + bytes([width]) + b"\0\0"
    body = epoch.to_bytes(4, "little") + len(indices).to_bytes(4, "little")
    body += step.to_bytes(8, "little") + low.to_bytes(8, "little", signed=True)
    return head + body + b"".join((one - low).to_bytes(width, "little") for one in indices)


def merkle_root(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    split = 1 << (len(leaves) - 1).bit_length() - 1
    halves = merkle_root(leaves[:split]) + merkle_root(leaves[split:])
    return hashlib.sha256(b"\1" + halves).digest()


@pytest.mark.parametrize("options", WORKERS.values(), ids=WORKERS)
def test_root_is_that_of_the_delivered_batches(options: dict[str, Any], tmp_path: Path) -> None:
    loader = loader_of(tmp_path, batch_size=24, **options)
    given = []
    for epoch in range(2):
        for batch in loader:
            place = len(given) % len(loader)
            if options.get("commit"):
                place = loader.batch_id().batch
            given.append((epoch, place, batch.tolist()))
    loader.close()
    found = audit(tmp_path)
    for one in found["epochs"]:
        assert (one["steps"], one["samples"], one["distinct"]) == (len(loader), COUNT, COUNT)
        assert one["has_ended"] and not one["missing_samples"] and not one["doubled_samples"]
    if options.get("in_order", True) is True:
        leaves = [leaf_of(*one) for one in given]
        assert root(tmp_path) == merkle_root(leaves).hex()


def test_stream_is_the_same_with_and_without_a_record(tmp_path: Path) -> None:
    for options in WORKERS.values():
        if options.get("in_order", True) is not True:
            continue
        streams = []
        for is_recorded in (True, False):
            torch.manual_seed(1)
            loader = loader_of(tmp_path / str(options), **options)
            if not is_recorded:
                loader.record_visits(None)
            streams.append([batch.tolist() for _ in range(2) for batch in loader])
            state = {**loader.state_dict(), "visits": None}
            streams[-1] += [repr(state["generators"]), state["epoch"], torch.rand(3).tolist()]
            loader.close()
        assert streams[0] == streams[1]


class Faulty(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 50 == 7 or index < 3 * SIZE:
            raise ValueError("this sample cannot be read")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_no_visits(workers: int, tmp_path: Path) -> None:
    loader = loader_of(tmp_path, Faulty(COUNT), on_error="skip", shuffle=False, num_workers=workers)
    given = [index for batch in loader for index in batch.tolist()]
    loader.close()
    (epoch,) = audit(tmp_path)["epochs"]
    assert epoch["samples"] == len(given) == COUNT - 3 * SIZE - 10
    missing = [index for low, high in epoch["missing"] for index in range(low, high + 1)]
    assert sorted(missing + given) == list(range(COUNT))
    assert epoch["missing_step_count"] == 0  # batches without samples have a place, too


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (torch.tensor(one) for one in range(50))


def test_of_an_iterable_dataset_places_and_counts_are_recorded(tmp_path: Path) -> None:
    loader = DataLoader(Rows(), batch_size=8)
    loader.record_visits(tmp_path)
    assert len(list(loader)) == 7
    loader.close()
    (epoch,) = audit(tmp_path)["epochs"]
    assert (epoch["steps"], epoch["samples"], epoch["unknown"]) == (7, 50, 50)
    assert "7 steps, 50 samples, whose indices are not known" in penstock("visits", tmp_path).stdout


def test_without_batching_each_sample_is_a_step(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, batch_size=None)
    assert sorted(int(one) for one in loader) == list(range(COUNT))
    loader.close()
    (epoch,) = audit(tmp_path)["epochs"]
    assert (epoch["steps"], epoch["distinct"]) == (COUNT, COUNT)


class Keyed(Numbers):
    def __getitem__(self, key: Any) -> torch.Tensor:
        return torch.tensor(len(str(key)))


def test_keys_that_are_not_integers_are_told_apart(tmp_path: Path) -> None:
    keys: list[Any] = [f"row {one}" for one in range(20)]
    for name, sampler in {"a": keys, "b": keys, "c": [*keys[:9], keys[0], *keys[10:]]}.items():
        loader = loader_of(tmp_path / name, Keyed(20), batch_size=4, sampler=sampler)
        list(loader)
        loader.close()
    assert compare(tmp_path / "a", tmp_path / "b")["is_by_roots"]
    assert compare(tmp_path / "a", tmp_path / "c")["place_a"] == (0, 2)
    (doubled,) = audit(tmp_path / "c")["epochs"][0]["doubled"]
    assert (doubled["again"], doubled["first"]) == ((0, 2), (0, 0))


def test_sampler_that_repeats_is_no_fault(tmp_path: Path) -> None:
    sampler = WeightedRandomSampler([1.0] * COUNT, COUNT)
    list(loader_of(tmp_path, sampler=sampler))
    assert penstock("visits", tmp_path).returncode == 0


@pytest.mark.slow
def test_pool_is_recorded_as_workers_are(steady_pool: PoolProcesses, tmp_path: Path) -> None:
    dataset = TensorDataset(torch.arange(COUNT))
    given = Pool(steady_pool.endpoint, code_paths=[CODE])
    for name, options in {"of pool": {"pool": given}, "without": {}}.items():
        loader = loader_of(tmp_path / name, dataset, seeding="batch", **options)
        list(loader)
        loader.close()
    assert compare(tmp_path / "of pool", tmp_path / "without")["is_by_roots"]


# A program that is killed and resumed.


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_exact_resume_has_the_root_of_the_uninterrupted_run(seeding: str, tmp_path: Path) -> None:
    whole = loader_of(tmp_path / "whole", seeding=seeding)
    for _ in range(3):
        list(whole)
    whole.close()
    state: dict[str, Any] = {}
    for first, last in ((0, 50), (50, 64), (64, 96)):
        loader = loader_of(tmp_path / "parts", seeding=seeding, num_workers=0 if first else 2)
        if state:
            loader.load_state_dict(state)
        taken = first
        while taken < last:
            for _ in loader:
                taken += 1
                if taken == last:
                    break
        state = loader.state_dict()
        loader.close()
    found = compare(tmp_path / "whole", tmp_path / "parts")
    assert found["is_equal"] and found["steps_a"] in (0, 96)
    assert [one["epoch"] for one in audit(tmp_path / "parts")["epochs"]] == [0, 1, 2]
    assert audit(tmp_path / "parts")["given_again"] == []


def start(folder: Path, given: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(JOB), str(folder), json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
    )


def batches_of(folder: Path) -> Batches:
    """The batches in a record, by an oracle that knows the documented format."""
    (path,) = folder.glob("visits.rank*of*[0-9]")
    content = path.read_bytes()
    offset, found = 40, []
    while offset + 16 <= len(content):
        length = int.from_bytes(content[offset + 8 : offset + 12], "little")
        kind, width = content[offset + 12 : offset + 14]
        if content[offset : offset + 8] == bytes(8):
            break
        body = content[offset + 16 : offset + 16 + length]
        if kind == 2:
            count = int.from_bytes(body[4:8], "little")
            base = int.from_bytes(body[16:24], "little", signed=True)
            parts = [body[24 + width * one : 24 + width * (one + 1)] for one in range(count)]
            found.append(
                [
                    base + (int.from_bytes(part, "little") if width else at)
                    for at, part in enumerate(parts)
                ]
            )
        offset += (16 + length + 7) // 8 * 8
    return found


@pytest.mark.slow
def test_killed_program_has_recorded_what_it_was_given(tmp_path: Path) -> None:
    options = {"batch_size": 8, "shuffle": True}
    given = {"loader": options, "epochs": 10_000, "count": 4000, "kills": 10}
    process = start(tmp_path, given)
    reported, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    lives = [json.loads(line) for line in reported.splitlines()]
    assert len(lives) == 10
    for folder, batches in lives:
        recorded = batches_of(Path(folder))
        assert recorded[: len(batches)] == batches
        assert len(recorded) <= len(batches) + 1  # the one that it was about to report
        found = audit(Path(folder))
        assert sum(one["batches"] for one in found["sessions"]) == len(recorded)
        # SIGKILL may arrive while a record is copied, which is then reported.
        assert len(found["torn"]) <= 1
        assert not any(one["is_damaged_inside"] for one in found["torn"])


@pytest.mark.slow
def test_resumed_program_shows_what_it_gives_again(tmp_path: Path) -> None:
    options = {"batch_size": 10, "shuffle": True, "seeding": "batch"}
    given = {"loader": options, "resumes": True, "save_every": 20, "stop_after": 130}
    assert start(tmp_path, given).wait() == 0
    given["loader"] = {**options, "num_workers": 2}
    del given["stop_after"]
    assert start(tmp_path, given).wait() == 0
    found = audit(tmp_path / "visits")
    (again,) = found["given_again"]
    assert (again["first"], again["last"], again["steps"]) == ((1, 20), (1, 29), 10)
    assert again["differs_from"] is None
    assert [one["doubled_samples"] for one in found["epochs"]] == [0, 0]
    shown = penstock("visits", tmp_path / "visits")
    assert shown.returncode == 0
    assert (
        "session 2 gives 10 steps, epoch 1, step 20 to epoch 1, step 29, again, with the same "
        "samples as session 1" in shown.stdout
    )


@pytest.mark.long
def test_resumed_program_with_another_order_is_a_fault(tmp_path: Path) -> None:
    for seed in (1, 2):
        given = {"loader": {"batch_size": 10, "shuffle": True}, "seed": seed, "stop_after": 30}
        assert start(tmp_path, given).wait() == 0
    (again,) = audit(tmp_path / "visits")["given_again"]
    assert again["differs_from"] == (0, 0)
    assert penstock("visits", tmp_path / "visits").returncode == 1


# Ranks.


@pytest.mark.long
def test_any_number_of_ranks_has_the_same_steps(tmp_path: Path) -> None:
    options = {"shuffle": True, "ranks": {"global_batch_size": 24}, "num_workers": 1}
    for world_size in (1, 2, 4):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        GlooRanks(JOB, folder, world_size, {"loader": options, "count": 250}).finish_all()
        found = audit(folder / "visits")
        assert len(found["sessions"]) == 1 and found["sessions"][0]["world_size"] == world_size
        for epoch in found["epochs"]:
            assert (epoch["steps"], epoch["distinct"]) == (11, 250)
            assert epoch["missing_samples"] == epoch["doubled_samples"] == 0
            assert epoch["padding_samples"] == -250 % world_size
    for a, b in ((1, 2), (2, 4)):
        found = compare(tmp_path / str(a) / "visits", tmp_path / str(b) / "visits")
        # The last step is filled up for 4 ranks.
        assert found["parting"] == ("none" if a == 1 else "samples"), found
        if a == 2:
            assert found["place_a"] == (0, 10) and found["only_b_count"] == 2


# Torch's loader.

PROGRAM = """
import hashlib, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])

torch.manual_seed(0)
options = eval(sys.argv[1])
skips, steps = options.pop("skips", 0), options.pop("steps", 1 << 30)
loader = DataLoader(Numbers(), batch_size=16, **options)
seen = []
for epoch in range(2):
    for step, batch in enumerate(loader):
        if step < skips:
            continue
        seen.append(batch.tolist())
        if len(seen) == steps:
            break
    if len(seen) == steps:
        break
seen.sort() if options.get("in_order") is False else None
print(type(loader).__module__, hashlib.sha256(repr(seen).encode()).hexdigest())
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["{}", pytest.param("{'num_workers': 2}", marks=pytest.mark.long)]
)
def test_torchs_own_loader_is_recorded_and_unchanged(
    options: str, program: Path, tmp_path: Path
) -> None:
    options = f"{{'shuffle': True, **{options}}}"
    plain = subprocess.run(
        [sys.executable, program, options], capture_output=True, text=True, check=True
    )
    kept = penstock("run", "--record-visits", tmp_path / "kept", "--keep-loader", program, options)
    ours = penstock("run", "--record-visits", tmp_path / "ours", program, options)
    assert kept.stdout == plain.stdout and "torch.utils.data" in kept.stdout
    assert ours.stdout.split()[1] == plain.stdout.split()[1]
    assert [one["distinct"] for one in audit(tmp_path / "kept/loader-0")["epochs"]] == [300, 300]
    assert compare(tmp_path / "kept/loader-0", tmp_path / "ours/loader-0")["is_by_roots"]
    assert "the runs are equal" in penstock("visits", tmp_path / "kept", tmp_path / "ours").stdout


@pytest.mark.long
def test_torchs_loader_out_of_order_is_recorded_by_its_batches(
    program: Path, tmp_path: Path
) -> None:
    for name, extra in {"a": "", "b": ", 'in_order': False"}.items():
        options = f"{{'shuffle': True, 'num_workers': 2{extra}}}"
        done = penstock(
            "run", "--record-visits", tmp_path / name, "--keep-loader", program, options
        )
        assert done.returncode == 0, done.stderr
    assert compare(tmp_path / "a/loader-0", tmp_path / "b/loader-0")["parting"] == "none"


@pytest.mark.long
def test_repetition_of_a_resumed_torch_program_is_found(program: Path, tmp_path: Path) -> None:
    command = ("run", "--record-visits", tmp_path / "v", "--keep-loader", program)
    penstock(*command, "{'shuffle': True, 'steps': 12}")
    penstock(*command, "{'shuffle': True}")  # begins the epoch again, in the same order
    (again,) = audit(tmp_path / "v/loader-0")["given_again"]
    assert (again["first"], again["steps"], again["differs_from"]) == ((0, 0), 12, None)
    penstock(
        *command, "{'generator': torch.Generator().manual_seed(9), 'shuffle': True, 'steps': 3}"
    )
    shown = penstock("visits", tmp_path / "v")
    assert shown.returncode == 0  # the third session begins an epoch, after two that have ended
    assert "epoch 2: 3 steps, 48 samples, none twice; it has not ended" in shown.stdout
    penstock(
        *command, "{'generator': torch.Generator().manual_seed(8), 'shuffle': True, 'steps': 9}"
    )
    shown = penstock("visits", tmp_path / "v")
    assert shown.returncode == 1  # it goes on in another order
    assert "fault: epoch 2: step" in shown.stdout


def test_keep_loader_needs_a_record(program: Path) -> None:
    refused = penstock("run", "--keep-loader", program, "{}")
    assert refused.returncode == 2
    assert "--keep-loader requires --record-visits FOLDER" in refused.stderr


# Planted faults.

Plant = Callable[[Batches, random.Random], tuple[int, str]]


def drop_sample(batches: Batches, draw: random.Random) -> tuple[int, str]:
    step = draw.randrange(len(batches))
    del batches[step][draw.randrange(len(batches[step]))]
    return step, "samples"


def repeat_sample(batches: Batches, draw: random.Random) -> tuple[int, str]:
    step, other = draw.sample(range(len(batches)), 2)
    batches[step][draw.randrange(SIZE)] = draw.choice(batches[other])
    return step, "samples"


def reorder_samples(batches: Batches, draw: random.Random) -> tuple[int, str]:
    step = draw.randrange(len(batches))
    one, other = draw.sample(range(SIZE), 2)
    batch = batches[step]
    batch[one], batch[other] = batch[other], batch[one]
    return step, "order"


def drop_step(batches: Batches, draw: random.Random) -> tuple[int, str]:
    step = draw.randrange(len(batches))
    del batches[step]
    return step, "step-missing"


def repeat_step(batches: Batches, draw: random.Random) -> tuple[int, str]:
    step = draw.randrange(1, len(batches))
    batches.insert(step, list(batches[draw.randrange(step)]))
    return step, "step-repeated"


def swap_steps(batches: Batches, draw: random.Random) -> tuple[int, str]:
    one, other = sorted(draw.sample(range(len(batches)), 2))
    batches[one], batches[other] = batches[other], batches[one]
    return one, "steps-swapped"


PLANTS: list[Plant] = [
    drop_sample, repeat_sample, reorder_samples, drop_step, repeat_step, swap_steps,
]  # fmt: skip


def record(folder: Path, epochs: list[Batches], versions: list[str]) -> None:
    """Read the batches by a loader, in epochs over a data set of these versions."""
    dataset = Numbers(COUNT)
    order: Batches = []
    loader = DataLoader(dataset, batch_sampler=order)
    loader.record_visits(folder)
    for batches, version in zip(epochs, versions, strict=True):
        order[:] = batches
        dataset.version = version
        list(loader)
    loader.close()


def epochs_of(draw: random.Random) -> list[Batches]:
    orders = [draw.sample(range(COUNT), COUNT) for _ in range(3)]
    return [[one[at : at + SIZE] for at in range(0, COUNT, SIZE)] for one in orders]


@pytest.mark.slow
@pytest.mark.parametrize("count", [42, pytest.param(100, marks=pytest.mark.long)])
def test_planted_faults_are_located_to_the_step(count: int, tmp_path: Path) -> None:
    located = 0
    for seed in range(count):
        draw = random.Random(seed)
        right = epochs_of(draw)
        wrong = [[list(batch) for batch in one] for one in right]
        record(tmp_path / f"right{seed}", right, ["1"] * 3)
        epoch = draw.randrange(3)
        kind = seed % (len(PLANTS) + 1)
        if kind == len(PLANTS):
            record(tmp_path / f"wrong{seed}", right, ["1"] * epoch + ["2"] * (3 - epoch))
            found = compare(tmp_path / f"right{seed}", tmp_path / f"wrong{seed}")["dataset"]
            located += found["place"] == (epoch, 0) and found["after"].endswith("version 2")
            continue
        step, expected = PLANTS[kind](wrong[epoch], draw)
        record(tmp_path / f"wrong{seed}", wrong, ["1"] * 3)
        found = compare(tmp_path / f"right{seed}", tmp_path / f"wrong{seed}")
        assert not found["is_equal"]
        is_located = found["place_a"] == (epoch, step) and found["parting"] == expected
        if kind in (1, 4):  # they are seen in the record alone, too
            doubled = audit(tmp_path / f"wrong{seed}")["epochs"][epoch]["doubled"]
            later = max(one["again"] for one in doubled)
            is_located &= later >= (epoch, step) and later in [
                (epoch, at)
                for at, one in enumerate(wrong[epoch])
                if set(one) & _twice(wrong[epoch])
            ]
        located += is_located
    assert located == count


def _twice(batches: Batches) -> set[int]:
    flat = [one for batch in batches for one in batch]
    return {one for one in flat if flat.count(one) > 1}


class Dropping(torch.utils.data.Sampler[int]):
    """A sampler with a fault: its length counts samples that it lacks."""

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Any:
        return (one for one in range(COUNT) if one not in (100, 101, 300))


def test_missing_samples_are_named_without_a_second_run(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, sampler=Dropping())
    list(loader)
    loader.close()
    shown = penstock("visits", tmp_path)
    assert shown.returncode == 1
    assert "fault: epoch 0 has ended without 3 samples: 100 to 101, 300" in shown.stdout


def test_padding_by_a_distributed_sampler_is_no_fault(tmp_path: Path) -> None:
    for rank in range(4):
        sampler: Any = torch.utils.data.DistributedSampler(Numbers(62), num_replicas=4, rank=rank)
        loader = loader_of(tmp_path, Numbers(62), batch_size=4, sampler=sampler)
        list(loader)
        loader.close()
    (epoch,) = audit(tmp_path)["epochs"]
    assert (epoch["distinct"], epoch["padding_samples"], epoch["doubled_samples"]) == (62, 2, 0)
    assert penstock("visits", tmp_path).returncode == 0


def test_ranks_that_all_read_everything_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        loader = loader_of(tmp_path)  # the program has no sampler for ranks
        list(loader)
        loader.close()
    assert audit(tmp_path)["epochs"][0]["doubled_samples"] == COUNT
    assert "gives" in penstock("visits", tmp_path).stdout


# Folders, files and the command.


@pytest.mark.long
def test_page_shows_what_the_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "how-to" / "visits.md").read_text()
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    (program,) = (text for kind, text in blocks if "sys.argv" in text)
    (commands,) = (text for kind, text in blocks if kind == "sh")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(program)
    for line in commands.splitlines():
        assert penstock(*shlex.split(line, comments=True)[1:]).returncode == 0
    shown = [text for kind, text in blocks if kind == "text"]
    asked = [["run-a"], ["run-b"], ["run-a", "run-c"], ["run-a", "run-b"]]
    assert [penstock("visits", *one).stdout for one in asked] == shown


@pytest.mark.slow
def test_json_follows_its_schema(tmp_path: Path) -> None:
    draw = random.Random(1)
    right = epochs_of(draw)
    wrong = [[list(batch) for batch in one] for one in right]
    repeat_step(wrong[1], draw)
    record(tmp_path / "a", right, ["1", "1", "2"])
    record(tmp_path / "b", wrong, ["1"] * 3)
    for folders in (["a"], ["b"], ["a", "a"], ["a", "b"]):
        shown = penstock("visits", "--json", *(tmp_path / one for one in folders))
        found = json.loads(shown.stdout)
        check("visits", found)
        assert found["has_faults"] == (folders != ["a", "a"]) == bool(shown.returncode)


@pytest.mark.slow
def test_unreadable_records_are_named(tmp_path: Path) -> None:
    empty = penstock("visits", tmp_path)
    assert empty.returncode == 2 and f"{tmp_path} has no record of visits" in empty.stderr
    path = tmp_path / _pool.visit_file_name(0, 1)
    path.write_text("another file")
    assert "it is not a record of visits" in penstock("visits", tmp_path).stderr
    with pytest.raises(ValueError, match="it is not a record of visits"):
        next(iter(loader_of(tmp_path)))
    path.unlink()
    list(loader_of(tmp_path))
    content = bytearray(path.read_bytes())
    content[8] = 9
    path.write_bytes(content)
    shown = penstock("visits", "--json", tmp_path)
    assert shown.returncode == 2 and "its format has version 9" in shown.stdout
    assert json.loads(shown.stdout)["error"]["code"] == "invalid-argument"


@pytest.mark.slow
def test_torn_and_damaged_records_are_reported(tmp_path: Path) -> None:
    loader = loader_of(tmp_path)
    list(loader)
    loader.close()
    path = tmp_path / _pool.visit_file_name(0, 1)
    content = path.read_bytes()
    path.write_bytes(content[:-11])
    torn = penstock("visits", tmp_path)
    assert "bytes are of an unfinished one" in torn.stdout and torn.returncode == 0
    with pytest.warns(Warning, match="ended with an unfinished record"):
        next(iter(loader_of(tmp_path)))
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    path.write_bytes(changed)
    damaged = penstock("visits", tmp_path)
    assert "where bytes were changed" in damaged.stdout and damaged.returncode == 1
    with pytest.raises(PenstockError, match="is damaged at byte"):
        next(iter(loader_of(tmp_path)))
    assert path.read_bytes() == bytes(changed)


@pytest.mark.slow
def test_folder_is_used_by_one_loader_at_a_time(tmp_path: Path) -> None:
    loader = loader_of(tmp_path)
    iterator = iter(loader)
    with pytest.raises(ValueError, match="give each loader another folder"):
        next(iter(loader_of(tmp_path)))
    program = f"import sys; sys.path.insert(0, {str(JOB.parent)!r}); import visits_job as job\n"
    program += "loader = job.make_loader({'loader': {}})\n"
    program += f"loader.record_visits({str(tmp_path)!r}); next(iter(loader))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "another process records into it; give each program another folder" in other.stderr
    next(iterator)
    loader.record_visits(None)
    next(iterator)  # it goes on without a record
    assert audit(tmp_path)["sessions"][0]["batches"] == 1
    with pytest.raises(TypeError, match="requires the path of a folder, or None, got 3"):
        loader.record_visits(3)


def test_reshard_continues_in_the_file_of_the_new_rank(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, batch_size=1, ranks=Ranks(0, 1, global_batch_size=SIZE))
    iterator = iter(loader)
    given = [next(iterator) for _ in range(5)]
    loader.reshard(0, 1)
    given += list(iterator)
    loader.close()
    (epoch,) = audit(tmp_path)["epochs"]
    assert epoch["steps"] == len(given) and epoch["distinct"] == COUNT
