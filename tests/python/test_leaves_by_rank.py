# SPDX-License-Identifier: Apache-2.0
"""The ranks of a replica group receive the leaves that they read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GlooRanks
from leaf_job import BATCH_SIZE, LENGTH, PIXELS, leaves_of, loader_of, placeholder
from pool_processes import PoolProcesses

from penstock import DataLoader, Ranks, _pool
from penstock.loader.delivery import Delivery, PinDevice
from penstock.ranks.replica_group import leader_of

PROGRAM = Path(__file__).with_name("leaf_job.py")
Start = Callable[..., GlooRanks]

LEAVES = {"pixels": [0, 1], "labels": [3], "text": [0, 3], "pair.1": [2], "boxes.corners": [1, 2]}
TENSOR_BYTES = {  # of one batch
    "pixels": BATCH_SIZE * torch.Size(PIXELS).numel() * 4,
    "labels": BATCH_SIZE * 8,
    "text.ids": BATCH_SIZE * 16 * 8,
    "text.mask": BATCH_SIZE * 16,
    "pair.0": BATCH_SIZE * 2 * 4,
    "pair.1": BATCH_SIZE * 3 * 4,
    "boxes.corners": BATCH_SIZE * 8 * 4,
    "boxes.scores": BATCH_SIZE * 4,
    "array": BATCH_SIZE * 8,
}
PADDING_MAX = 64 * len(TENSOR_BYTES) + 1024  # of one batch, with its record


@pytest.fixture
def start(tmp_path: Path, steady_pool: PoolProcesses) -> Iterator[Start]:
    jobs: list[GlooRanks] = []

    def start_job(leaves: dict[str, list[int]], rank_count: int = 4, **given: Any) -> GlooRanks:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        all_given = given | {"leaves": leaves}
        jobs.append(GlooRanks(PROGRAM, folder, rank_count, all_given, steady_pool.environment))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()


def reader_of(leaves: dict[str, list[int]], leaf: str) -> list[int] | None:
    """The ranks that read a leaf; None for all."""
    found = (ranks for name, ranks in leaves.items() if leaf == name or leaf.startswith(f"{name}."))
    return next(found, None)


def expected(leaves: dict[str, list[int]], rank: int, skipped: int = 0) -> list[Any]:
    """The lines of a rank, from a loader without workers, pool, other ranks and ``leaves``."""
    lines: list[Any] = []
    loader = loader_of({}, Ranks(0, 1))
    for epoch in range(2):
        for batch in loader:
            seen = leaves_of(batch)
            for name, tensor in named_tensors(batch).items():
                readers = reader_of(leaves, name)
                if readers is not None and rank not in readers:
                    seen[name] = placeholder(tensor)
            lines.append([epoch, seen])
    return lines[skipped:]


def named_tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {
        "pixels": batch["pixels"],
        "labels": batch["labels"],
        "text.ids": batch["text"]["ids"],
        "text.mask": batch["text"]["mask"],
        "pair.0": batch["pair"].first,
        "pair.1": batch["pair"].second,
        "boxes.corners": batch["boxes"].corners,
        "boxes.scores": batch["boxes"].scores,
    }


def bytes_read(leaves: dict[str, list[int]], ranks: set[int]) -> int:
    """The bytes of one batch's leaves that any of the ranks reads."""
    readers = {name: reader_of(leaves, name) for name in TENSOR_BYTES}
    return sum(
        size
        for name, size in TENSOR_BYTES.items()
        if readers[name] is None or ranks & {*readers[name]}
    )


def check(
    job: GlooRanks,
    leaves: dict[str, list[int]],
    behind: dict[int, set[int]],
    skipped: int = 0,
) -> None:
    """Check the batches of each rank, and that it received the leaves of the ranks ``behind`` it,
    itself included."""
    for rank in range(len(job.ranks)):
        code, text = job.finish(rank)
        assert code == 0, text
        *lines, _, received = job.lines(rank)
        assert lines == expected(leaves, rank, skipped)
        wanted = bytes_read(leaves, behind.get(rank, {rank})) * len(lines)
        assert wanted <= received <= wanted + PADDING_MAX * len(lines)


@pytest.mark.slow
def test_ranks_of_one_machine_receive_their_leaves(
    steady_pool: PoolProcesses, start: Start
) -> None:
    job = start(LEAVES, pool=steady_pool.endpoint, state_after=5)
    check(job, LEAVES, {0: {0, 1, 2, 3}})
    loader = loader_of({}, Ranks(0, 1))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    for rank in range(4):
        assert job.lines(rank)[-2] == state


@pytest.mark.slow
def test_machines_receive_the_leaves_of_their_ranks(
    steady_pool: PoolProcesses, start: Start
) -> None:
    machines = [[0, 1], [2, 3]]
    job = start(LEAVES, pool=steady_pool.endpoint, machines=machines)
    check(job, LEAVES, {0: {0, 1, 2, 3}, 2: {2, 3}})


@pytest.mark.slow
def test_reader_of_the_leaf_named_first_has_the_workers(start: Start) -> None:
    leaves = {"pixels": [1, 2], "labels": [0]}
    job = start(leaves, rank_count=3, workers=2, machines=[[0], [1], [2]])
    check(job, leaves, {1: {0, 1, 2}})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_machine_that_reads_all_leaves_has_the_batches_made(
    steady_pool: PoolProcesses, start: Start, workers: int
) -> None:
    leaves = {"pixels": [0, 2], "labels": [1], "text": [1, 2], "pair.1": [0, 1]}
    source = {"workers": workers} if workers else {"pool": steady_pool.endpoint}
    job = start(leaves, rank_count=4, machines=[[0], [1, 2], [3]], visits=True, **source)
    check(job, leaves, {2: {1, 2}})  # no machine receives a leaf that it does not read
    (epoch, _) = _pool.VisitFolder.open(str(job.folder / "visits")).audit()["epochs"]
    assert (epoch["distinct"], epoch["doubled_samples"]) == (LENGTH, 0)


@pytest.mark.parametrize(
    ("machines", "leaves", "leader"),
    [
        ("aabb", {}, 0),
        ("abcd", {"x": [1, 2], "y": [0]}, 1),  # the leaf named first counts most
        ("abcd", {"x": [0, 1], "y": [1, 3], "z": [3]}, 1),
        ("abcd", {"x": [0, 1], "y": [3], "z": [1]}, 1),
        ("abcd", {"x": [0, 3], "y": [2, 3]}, 3),  # reads all
        ("aabb", {"x": [0, 2], "y": [3]}, 2),  # its machine reads all, and it reads x
        ("aabb", {"x": [0, 3], "y": [2]}, 3),
        ("abab", {"x": [0, 1, 3], "y": [2]}, 0),
        ("aaaa", {"x": [3], "y": [0]}, 3),
        ("abb", {"x": [0, 1, 2]}, 0),
        ("ba", {"x": [0, 1], "y": [0, 1]}, 0),  # not by the names of machines
    ],
)
def test_leader_is_on_the_machine_that_reads_most(
    machines: str, leaves: dict[str, tuple[int, ...]], leader: int
) -> None:
    hosts = dict(enumerate(machines))
    assert leader_of(hosts, leaves) == leader
    assert leader_of(dict(reversed(hosts.items())), leaves) == leader  # in any order


@pytest.mark.long
def test_leaves_by_rank_resume_from_a_state_without_them(
    steady_pool: PoolProcesses, start: Start
) -> None:
    loader = loader_of({}, Ranks(0, 1))
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    leaves = {"pixels": [0], "labels": [1]}
    job = start(leaves, rank_count=2, pool=steady_pool.endpoint, state=loader.state_dict())
    check(job, leaves, {0: {0, 1}}, skipped=5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ("pixel", "got 'pixel', and the batch has the tensors 'pixels', 'labels', 'text.ids'"),
        ("array", "got 'array': 'array' is a numpy array"),
        ("name", "leaves must name tensors of the batch, got 'name'"),
    ],
)
def test_batch_without_a_named_tensor_raises_on_every_rank(
    start: Start, leaf: str, words: str
) -> None:
    job = start({leaf: [0]}, rank_count=2, workers=1)
    for rank in (0, 1):
        code, text = job.finish(rank)
        assert code != 0
        assert "ValueError" in text and words in text


@pytest.mark.long
def test_ranks_with_different_leaves_raise(start: Start) -> None:
    job = start({"pixels": [0], "labels": [1]}, rank_count=2, workers=1, other_leaves=1)
    code, text = job.finish(1)
    assert code != 0
    assert "rank 1 has leaves" in text and "with the same arguments" in text


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), index), index


@pytest.mark.slow
def test_group_of_one_rank_checks_the_names(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # for the keys of its worker
    ranks = Ranks(replica_group=[0], leaves={0: [0]})
    with DataLoader(Rows(), num_workers=1, ranks=ranks) as loader:
        assert [batch[0].tolist() for batch in loader] == [[[n, n]] for n in range(4)]
    ranks = Ranks(replica_group=[0], leaves={"x": [0]})
    with (
        DataLoader(Rows(), num_workers=1, ranks=ranks) as loader,
        pytest.raises(ValueError, match="got 'x', and the batch has the tensors '0', '1'"),
    ):
        next(iter(loader))


def test_pinning_leaves_placeholders_alone() -> None:
    meta = torch.empty(3, device="meta")
    delivery = Delivery(PinDevice("cuda", 0), None, 0, 0, has_leaves_by_rank=True)
    batch, extra = delivery.take({"x": meta, "names": ["a"], "pair": (meta, 2)}, None)
    assert extra is None
    assert batch["x"] is meta and batch["pair"][0] is meta and batch["names"] == ["a"]


@pytest.mark.parametrize(
    ("leaves", "error", "words"),
    [
        ([("x", [0])], TypeError, "leaves must be a mapping of names of tensors to the ranks"),
        ({}, ValueError, "leaves must name a tensor, got {}; leave leaves out"),
        ({None: [0]}, TypeError, "must have names of tensors as keys, got None; pass a text"),
        ({-1: [0]}, TypeError, "must have names of tensors as keys, got -1"),
        ({True: [0]}, TypeError, "must have names of tensors as keys, got True"),
        ({"": [0]}, ValueError, "must have names of tensors as keys, got ''; join the names"),
        ({"a..b": [0]}, ValueError, "must have names of tensors as keys, got 'a..b'"),
        ({0: [0], "0": [1]}, ValueError, "must name '0' once, got it twice: as an int and as text"),
        ({"x": []}, ValueError, r"leaves\['x'\] must be different ranks, at least one, got \[\]"),
        ({"x": None}, ValueError, r"leaves\['x'\] must be different ranks, at least one, got None"),
        ({"x": [0, 0]}, ValueError, r"leaves\['x'\] must be different ranks, .*, got \[0, 0\]"),
        ({"x": ["0"]}, ValueError, r"leaves\['x'\] must be different ranks, .*, got \['0'\]"),
        ({"x": 0}, TypeError, r"leaves\['x'\] must be a process group, a device mesh .*, got 0"),
        (
            {"x": [0, 2]},
            ValueError,
            r"leaves\['x'\] must be ranks of the .* \[0, 1\], got \[0, 2\]",
        ),
        ({"a.b": [0], "a": [1]}, ValueError, "must name a tensor once, got 'a', which contains"),
    ],
)
def test_invalid_leaves_are_rejected(leaves: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Ranks(replica_group=[0, 1], leaves=leaves)


def test_leaves_require_a_replica_group() -> None:
    with pytest.raises(ValueError, match=r"leaves requires replica_group, .* got leaves=\{'x'"):
        Ranks(leaves={"x": [0]})


def test_leaves_are_part_of_the_record_of_ranks(alone: None) -> None:
    ranks = Ranks(replica_group=[0], leaves={"x": range(1), 1: [0]})
    assert ranks.leaves == {"x": (0,), "1": (0,)}
    assert repr(ranks) == "Ranks(replica_group=[0], leaves={'x': [0], '1': [0]})"
    assert hash(ranks) == hash(Ranks(replica_group=[0]))
    loader = DataLoader(Rows(), num_workers=1, ranks=ranks)
    assert loader.ranks == ranks
    shared = DataLoader(
        Rows(), num_workers=1, ranks=Ranks(0, 1, replica_group=[0], leaves={1: [0]})
    )
    shared.shard_by_rank = False
    assert shared.ranks == Ranks(replica_group=[0], leaves={1: [0]})
    group = dist.group.WORLD
    assert Ranks(replica_group=group, leaves={"x": group}).leaves == {"x": (0,)}
