# SPDX-License-Identifier: Apache-2.0
"""Commits: a resumed loader delivers what was not committed, once, and nothing else."""

from __future__ import annotations

import copy
import gc
import json
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import killed_commits
import numpy as np
import pytest
import torch
from pool_datasets import CODE
from pool_processes import pool_of
from resumed_streams import COUNT, Augmented, Counted, Remembering, Shards, StatefulSampler
from stream_oracle import error_of
from torch.utils.data import DistributedSampler, Sampler, TensorDataset

from penstock import BatchId, DataLoader, Pool, UnsupportedError
from penstock.stream.places import places_from_json, places_to_json

EPOCHS = 3
WORKERS: dict[str, dict[str, Any]] = {
    "in process": {"num_workers": 0},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "any order": {"num_workers": 2, "in_order": False},
    "auto": {"num_workers": "auto"},
}


def make(dataset: Any = None, **options: Any) -> Any:
    options = {"batch_size": 3, "seeding": "batch", "commit": "manual", **options}
    if "sampler" not in options and "batch_sampler" not in options:
        options.setdefault("shuffle", True)
    generator = torch.Generator().manual_seed(11)
    return DataLoader(Augmented() if dataset is None else dataset, generator=generator, **options)


def key(batch: Any) -> str:
    return str([batch[0].tolist(), [part.tolist() for part in batch[1]]])


def whole(**options: Any) -> Counter[str]:
    """Return the batches of all epochs of an uninterrupted loader without commits."""
    loader = make(**{**options, "commit": None})
    return Counter(key(batch) for _ in range(EPOCHS) for batch in loader)


class Loop:
    """A program that finishes batches in random order, with some in flight."""

    def __init__(self, loader: Any, seed: int, in_flight: int = 6) -> None:
        self.loader, self.rng, self.in_flight = loader, random.Random(seed), in_flight
        self.flying: list[Any] = []
        self.trained: Counter[str] = Counter()

    def finish(self, most_left: int) -> None:
        while len(self.flying) > most_left:
            batch = self.flying.pop(self.rng.randrange(len(self.flying)))
            self.trained[key(batch)] += 1
            self.loader.commit(batch)

    def run(self, epochs: range, steps: int) -> int:
        """Return the epoch in which the steps were over, or the end of the range."""
        for epoch in epochs:
            for batch in self.loader:
                self.flying.append(batch)
                self.finish(self.rng.randrange(self.in_flight + 1))
                steps -= 1
                if steps == 0:
                    return epoch
        return epochs.stop


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


@pytest.mark.long("1-*", "2-*")
@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize("seed", range(3))
def test_each_batch_is_committed_once_over_random_interruptions(kind: str, seed: int) -> None:
    expected = whole(num_workers=0)
    rng = random.Random(seed)
    trained: Counter[str] = Counter()
    state, epoch = None, 0
    while epoch < EPOCHS:
        loader = make(**WORKERS[kind])
        if state is not None:
            loader.load_state_dict(state)
        loop = Loop(loader, rng.randrange(1 << 20))
        steps = rng.randrange(1, 14)
        epoch = loop.run(range(epoch, EPOCHS), steps)
        if epoch == EPOCHS:
            loop.finish(0)
        state = through_json(loader.state_dict())
        trained += loop.trained
    assert trained == expected
    assert state is not None and state["commits"]["earlier"] == []


def test_state_in_one_mode_resumes_in_the_others() -> None:
    expected = whole(num_workers=0)
    trained: Counter[str] = Counter()
    state, epoch = None, 0
    for kind in ("any order", "in process", "workers", "persistent", "in process"):
        loader = make(**WORKERS[kind])
        if state is not None:
            loader.load_state_dict(state)
        loop = Loop(loader, 7)
        epoch = loop.run(range(epoch, EPOCHS), 6 if kind != "persistent" else 4)
        state = through_json(loader.state_dict())
        trained += loop.trained
    loader = make(num_workers=1)
    loader.load_state_dict(state)
    loop = Loop(loader, 8)
    loop.run(range(epoch, EPOCHS), -1)
    loop.flying.extend(loader.redeliver())
    loop.finish(0)
    assert trained + loop.trained == expected
    assert list(loader.redeliver()) == []


def test_outstanding_batches_of_earlier_epochs_come_first_and_in_order() -> None:
    loader = make(num_workers=0)
    held = [list(loader), list(loader)]
    for batch in [*held[0][1:], *held[1][:-2]]:
        loader.commit(batch)
    third = iter(loader)
    held.append([next(third), next(third)])
    loader.commit(held[2][1])
    assert loader.outstanding == ((0, 0), (1, 6), (1, 7), (2, 0))
    state = through_json(loader.state_dict())
    rest = [key(batch) for batch in third]

    for options in WORKERS.values():
        resumed = make(**options)
        resumed.load_state_dict(state)
        left = [key(held[0][0]), *map(key, held[1][-2:]), key(held[2][0])]
        iterator = iter(resumed)
        assert len(iterator) == 3 + len(loader)
        got = [next(iterator) for _ in range(4)]
        assert [*map(key, got)] == left
        assert resumed.outstanding == ((0, 0), (1, 6), (1, 7), (2, 0))
        resumed.commit(got[2])
        assert through_json(resumed.state_dict())["commits"]["earlier"][1]["batches"][0][0] == 6
        assert Counter(key(batch) for batch in iterator) == Counter(rest)


def test_states_between_repeated_batches_have_all_that_is_left() -> None:
    loader = make(num_workers=0)
    held = list(loader)
    for batch in held[3:]:
        loader.commit(batch)
    state = through_json(loader.state_dict())
    for committed in range(3):
        resumed = make(num_workers=1)
        resumed.load_state_dict(state)
        iterator = iter(resumed)
        assert key(next(iterator)) == key(held[committed])
        resumed.commit(BatchId(0, committed))
        state = through_json(resumed.state_dict())
    assert state["commits"] == {"epoch": 1, "earlier": []}
    last = make(num_workers=0)
    last.load_state_dict(state)
    assert [key(batch) for batch in last] == [key(batch) for batch in loader]


def test_resumed_epochs_do_not_move_the_generators() -> None:
    loader = make(num_workers=0)
    list(loader)
    state = loader.state_dict()
    for options in WORKERS.values():
        resumed = make(**options)
        resumed.load_state_dict(state)
        before = torch.random.get_rng_state()
        iterator = iter(resumed)
        for _ in range(len(loader)):
            next(iterator)
        assert torch.equal(torch.random.get_rng_state(), before)
        iterator = None  # before the next one starts its workers


class CountingSampler(Sampler[int]):
    """Shuffles by the number of times that it was iterated, as programs write them."""

    def __init__(self) -> None:
        self.pass_count = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.pass_count += 1
        return iter(random.Random(self.pass_count).sample(range(COUNT), COUNT))


def test_repeated_batches_leave_the_sampler_alone() -> None:
    loader = make(sampler=CountingSampler())
    held = list(loader)
    state = loader.state_dict()
    resumed = make(sampler=CountingSampler())
    resumed.sampler.pass_count = 1
    resumed.load_state_dict(state)
    got = [key(batch) for batch in resumed]
    assert got[: len(held)] == [*map(key, held)]
    assert got[len(held) :] == [key(batch) for batch in loader]


def test_samplers_with_an_epoch_and_with_states() -> None:
    for name in ("set_epoch", "stateful"):

        def fresh(name: str = name) -> Any:
            if name == "stateful":
                return make(sampler=StatefulSampler(), num_workers=1)
            return make(sampler=DistributedSampler(range(COUNT), 1, 0), num_workers=1)

        def epochs(loader: Any, numbers: range) -> Iterator[tuple[int, Any]]:
            for number in numbers:
                if hasattr(loader.sampler, "set_epoch"):
                    loader.sampler.set_epoch(number)
                yield from ((number, batch) for batch in loader)

        expected = Counter(key(batch) for _, batch in epochs(fresh(), range(EPOCHS)))
        loader = fresh()
        trained: Counter[str] = Counter()
        state: Any = None
        for step, (_, batch) in enumerate(epochs(loader, range(EPOCHS))):
            if step % 5 != 1:
                trained[key(batch)] += 1
                loader.commit(batch)
            if step == 11:  # in the second epoch
                state = through_json(loader.state_dict())
                break
        resumed = fresh()
        resumed.load_state_dict(state)
        trained.update(key(batch) for _, batch in epochs(resumed, range(1, EPOCHS)))
        assert trained == expected


@pytest.mark.parametrize("seeding", ["batch", "sample"])
def test_batches_of_uneven_sizes_keep_their_draws(seeding: str) -> None:
    batches = [[0, 1, 2, 3], [4], [5, 6], [7, 8, 9], [10]]
    for workers in (0, 2):
        loader = make(batch_sampler=batches, seeding=seeding, batch_size=1, num_workers=workers)
        held = list(loader)
        for place in (0, 3):
            loader.commit(held[place])
        resumed = make(batch_sampler=batches, seeding=seeding, batch_size=1, num_workers=1)
        resumed.load_state_dict(through_json(loader.state_dict()))
        iterator = iter(resumed)
        assert [key(next(iterator)) for _ in range(3)] == [key(held[place]) for place in (1, 2, 4)]


def test_single_samples_and_batches_without_tensors() -> None:
    loader = make(Counted(), batch_size=None, collate_fn=lambda sample: f"sample {sample}")
    first = next(iter(loader))
    assert loader.batch_id() == BatchId(0, 0)
    error = error_of(lambda: loader.commit(first))
    assert type(error) is ValueError and "batch_id()" in str(error)
    loader.commit(loader.batch_id())
    assert loader.outstanding == ()

    arrays = make(Counted(), collate_fn=np.array, num_workers=1)
    for batch in arrays:
        arrays.commit(batch)
    assert arrays.outstanding == ()


def test_objects_that_a_dataset_returns_again_are_told_by_their_ids() -> None:
    same = torch.zeros(2)
    loader = make([same, same, torch.ones(2)], batch_size=None, shuffle=False)
    iterator = iter(loader)
    first, second = (next(iterator), loader.batch_id()), (next(iterator), loader.batch_id())
    assert first[0] is second[0]
    error = error_of(lambda: loader.commit(second[0]))
    assert str(error).startswith("the batch is outstanding 2 times, as (0, 0), (0, 1), since")
    loader.commit(first[1])
    loader.commit(second[0])  # only one is left
    assert loader.outstanding == ()


def test_parts_that_all_batches_share_do_not_hide_which_batch_it_is() -> None:
    mask = torch.ones(3)
    loader = make([(torch.zeros(3), mask), (torch.ones(3), mask)], batch_size=None, shuffle=False)
    first, second = loader
    loader.commit(second)
    assert loader.outstanding == ((0, 0),)
    error = error_of(lambda: loader.commit([first[0], second[0]]))
    assert str(error).startswith(
        "the batch must be one batch, got parts of several, such as (0, 0)"
    )
    loader.commit(first)
    assert loader.outstanding == ()


def test_optimizer_steps_commit_what_was_delivered_before() -> None:
    features = torch.arange(36.0).reshape(12, 3)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for workers in (0, 2):
        loader = make(TensorDataset(features), batch_size=1, commit="auto", num_workers=workers)
        other = make(TensorDataset(features), batch_size=1)
        next(iter(other))
        for number, (rows,) in enumerate(loader):
            model(rows).sum().backward()
            if number % 4 == 3:
                optimizer.step()
                assert loader.outstanding == ()
            if number == 9:
                break
        assert loader.outstanding == ((0, 8), (0, 9))
        assert len(other.outstanding) == 1
        state = loader.state_dict()
        assert (state["_sampler_iter_yielded"], state["_num_yielded"]) == (8, 8)


def test_commits_may_come_from_other_threads() -> None:
    loader = make(Counted(900), num_workers=2, batch_size=3)
    queue: list[Any] = []
    is_over = threading.Event()

    def commit() -> None:
        while queue or not is_over.is_set():
            try:
                loader.commit(queue.pop())
            except IndexError:
                pass

    threads = [threading.Thread(target=commit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for batch in loader:
        queue.append(batch)
        loader.state_dict()
    is_over.set()
    for thread in threads:
        thread.join()
    assert loader.outstanding == ()


def test_skipped_samples_and_omitted_batches_need_no_commit() -> None:
    for workers in (0, 2):
        for in_order in (True, False):
            loader = make(
                Counted(6, failing=4),
                batch_size=1,
                shuffle=False,
                num_workers=workers,
                on_error="skip",
                in_order=in_order,
            )
            for batch in loader:
                loader.commit(batch)
            assert loader.outstanding == ()
            if workers == 0 or in_order:
                iterator = iter(loader)
                for _ in range(5):
                    loader.commit(next(iterator))
                assert loader.state_dict().get("left") is None


def test_batch_that_raised_is_made_again_within_its_epoch() -> None:
    loader = make(Counted(6, failing=2), batch_size=1, shuffle=False, num_workers=1)
    iterator = iter(loader)
    for _ in range(2):
        loader.commit(next(iterator))
    assert isinstance(error_of(lambda: next(iterator)), LookupError)
    loader.commit(next(iterator))
    resumed = make(Counted(6), batch_size=1, shuffle=False, num_workers=1)
    resumed.load_state_dict(loader.state_dict())
    assert [int(batch) for batch in resumed] == [2, 4, 5]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from pool_of(tmp_path, monkeypatch)


def test_pool_with_commits(pool: Any) -> None:
    expected = whole(num_workers=0)
    pool.start_worker()
    pool.start_worker()
    trained: Counter[str] = Counter()
    state, epoch = None, 0
    for steps in (5, 9, -1):
        loader = make(pool=Pool(pool.endpoint, code_paths=[CODE]), seeding="batch")
        if state is not None:
            loader.load_state_dict(state)
        loop = Loop(loader, abs(steps))
        epoch = loop.run(range(epoch, EPOCHS), steps)
        if steps == -1:
            loop.finish(0)
        state = through_json(loader.state_dict())
        trained += loop.trained
        loader.close()
    assert trained == expected


def test_ledger_keeps_no_batch_alive() -> None:
    loader = make(num_workers=1)
    iterator = iter(loader)
    batch = next(iterator)
    known = weakref.ref(batch[0])
    del batch
    gc.collect()
    assert known() is None and loader.outstanding == ((0, 0),)


def test_copied_loader_has_no_commits_of_its_origin() -> None:
    loader = make()
    batch = next(iter(loader))
    twin = copy.copy(loader)
    assert twin.outstanding == () and repr(twin).count("commit='manual'") == 1
    assert "not by Augmented" in str(error_of(lambda: twin.commit(batch)))


def test_wrong_commits_are_refused() -> None:
    loader, other = make(name="train"), make(name="validation")
    iterator = iter(loader)
    batch, held = next(iterator), next(iterator)
    foreign = next(iter(other))
    loader.commit(batch)

    def refusal(call: Any) -> str:
        error = error_of(call)
        assert type(error) is ValueError
        return str(error)

    assert "is committed already" in refusal(lambda: loader.commit(batch))
    assert "is committed already" in refusal(lambda: loader.commit(BatchId(0, 0)))
    assert "delivered by the loader validation, not by train" in refusal(
        lambda: loader.commit(foreign)
    )
    assert "not a copy" in refusal(lambda: loader.commit([part.clone() for part in held[1]]))
    assert "got None" in refusal(lambda: loader.commit(None))
    for name in (BatchId(0, 5), BatchId(3, 0)):
        assert "must be a batch that was delivered" in refusal(
            lambda name=name: loader.commit(name)  # type: ignore[misc]
        )
    loader.load_state_dict(loader.state_dict())
    assert "before load_state_dict()" in refusal(lambda: loader.commit(held))
    assert "must be a batch that was delivered" in refusal(lambda: loader.commit(BatchId(0, 1)))
    assert "has delivered none" in refusal(loader.batch_id)
    assert key(next(iter(loader))) == key(held)
    loader.commit(BatchId(0, 1))
    assert loader.outstanding == ()


def test_commit_requires_the_option_and_a_loader_that_can_repeat() -> None:
    plain = DataLoader(Counted())
    for call in (lambda: plain.commit(1), plain.batch_id):
        error = error_of(call)
        assert isinstance(error, UnsupportedError) and 'requires commit="manual"' in str(error)
    assert plain.outstanding == ()
    for dataset, options, words in (
        (Shards(), {"shuffle": None}, "a map-style dataset, got Shards"),
        (WithState(), {}, "a dataset without state_dict(), got WithState"),
    ):
        error = error_of(lambda: make(dataset, **options))  # noqa: B023
        assert isinstance(error, UnsupportedError) and words in str(error)
    assert isinstance(error_of(lambda: make(commit="never")), ValueError)


class WithState(Counted):
    state_dict, load_state_dict = Remembering.state_dict, Remembering.load_state_dict


def test_option_is_where_frameworks_look_and_may_be_assigned() -> None:
    loader = DataLoader(Counted(), commit="auto")
    assert vars(loader)["commit"] == "auto" and callable(loader.commit)
    loader.commit = "manual"  # type: ignore[method-assign, assignment]
    assert "commit='manual'" in repr(loader)
    assert not [one for one in vars(DataLoader(Counted())) if "ledger" in one]
    again = DataLoader(Counted(), commit=loader.commit)  # type: ignore[arg-type]
    assert vars(again)["commit"] == "manual"
    assert DataLoader(Counted(), commit=DataLoader(Counted()).commit).outstanding == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["commits"].pop("epoch"), "'epoch'"),
        (lambda state: state["commits"].update(epoch=-1), "['epoch'] must be an integer"),
        (lambda state: state["commits"]["earlier"][0].update(batches=[]), "at least one batch"),
        (lambda state: state["commits"]["earlier"][0].update(epoch=9), "['epoch'] must be"),
        (lambda state: state["commits"]["earlier"][0].update(base_seed="x"), "['base_seed']"),
        (lambda state: state["commits"]["earlier"][0]["batches"].reverse(), "must be an integer"),
        (lambda state: state["commits"]["earlier"][0]["batches"].append(3), "must be a list"),
    ],
)
def test_altered_states_are_refused(change: Any, words: str) -> None:
    loader = make()
    list(loader)
    state = through_json(loader.state_dict())
    change(state)
    error = error_of(lambda: make().load_state_dict(state))
    assert isinstance(error, ValueError) and words in str(error)


def test_state_with_earlier_batches_needs_the_option() -> None:
    loader = make()
    list(loader)
    state = loader.state_dict()
    error = error_of(lambda: make(commit=None).load_state_dict(state))
    assert isinstance(error, ValueError) and "8 earlier" not in str(error)
    assert 'pass commit="manual"' in str(error)


def test_state_has_little_for_many_batches_in_flight() -> None:
    loader = make(Counted(6000), batch_size=1, num_workers=1)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(2048)]
    order = [int(batch) for batch in held]
    rng = random.Random(0)
    rng.shuffle(held)
    for batch in held[:1024]:
        loader.commit(batch)
    state = loader.state_dict()
    assert len(loader.outstanding) == 1024
    more = {name: state[name] for name in ("left", "commits")}
    assert len(json.dumps(more, separators=(",", ":"))) <= 500
    assert len(json.dumps(state, separators=(",", ":"))) <= 8_500
    resumed = make(Counted(6000), batch_size=1, num_workers=1)
    resumed.load_state_dict(through_json(state))
    left = {int(batch) for batch in held[1024:]}
    batches = iter(resumed)
    again = [int(next(batches)) for _ in range(1024)]
    assert again == [sample for sample in order if sample in left]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda bits: bits.update(bits="???"), "['bits'] must be base64"),
        (lambda bits: bits.update(bits=7), "['bits'] must be base64 of at most"),
        (lambda bits: bits.update(bits="/" * 9000), "['bits'] must be base64 of at most"),
        (lambda bits: bits.update(bits="AAAA"), "bits of which the first is set"),
        (lambda bits: bits.update(first=bits["first"] + 400), "must be an integer from"),
        (lambda bits: bits.update(first=-1), "['first'] must be an integer from 0"),
        (lambda bits: bits.pop("first"), "must be a dictionary with 'first'"),
    ],
)
def test_altered_bits_are_refused(change: Any, words: str) -> None:
    loader = make(Counted(2000), batch_size=1)
    batches = [batch for _, batch in zip(range(800), loader, strict=False)]
    for batch in batches[1::2]:
        loader.commit(batch)
    state = through_json(loader.state_dict())
    change(state["left"]["missing"])
    error = error_of(lambda: make(Counted(2000), batch_size=1).load_state_dict(state))
    assert isinstance(error, ValueError) and words in str(error)


def test_places_survive_json() -> None:
    draw = random.Random(0)
    for count in (0, 1, 255, 256, 257, 300, 5000):
        places = tuple(sorted(draw.sample(range(20_000), count)))
        assert places_from_json(through_json(places_to_json(places))) == places


# Chance differences between the lengths in six parts of two runs exceed this in one case of a
# hundred: chi-squared with 12 degrees of freedom.
DIFFERENCE_MAX = 26.2


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What an asynchronous loop trains on without interruptions."""
    return killed_commits.interrupted(tmp_path_factory.mktemp("whole"), 1, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))]
)
def test_interruptions_leave_the_lengths_of_each_part_of_a_run(
    seed: int, uninterrupted: list[list[int]], tmp_path: Path
) -> None:
    trained = killed_commits.interrupted(tmp_path, seed, 60)
    killed_commits.assert_whole(trained)
    assert trained != uninterrupted  # in another order
    assert sum(killed_commits.length_differences(trained, uninterrupted)) < DIFFERENCE_MAX
    # The whole run has the data set's distribution exactly.
    counts = killed_commits.length_counts(trained).sum(0)
    assert counts.tolist() == [300 * EPOCHS, 240 * EPOCHS, 60 * EPOCHS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        ("last", 1),
        *(
            pytest.param(policy, seed, marks=pytest.mark.long)
            for policy, seed in (("last", 2), ("last", 3), ("lost", 1), ("lost", 2), ("lost", 3))
        ),
    ],
)
def test_delayed_or_lost_batches_would_change_the_lengths(
    policy: Any, seed: int, uninterrupted: list[list[int]], tmp_path: Path
) -> None:
    trained = killed_commits.interrupted(tmp_path, seed, 60, policy)
    assert sum(killed_commits.length_differences(trained, uninterrupted)) > DIFFERENCE_MAX
    if policy == "last":
        killed_commits.assert_whole(trained)  # nothing else would show it


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(40, 1), *(pytest.param(200, seed, marks=pytest.mark.long) for seed in range(2, 7))],
)
def test_killed_loops_lose_and_double_nothing(
    kills: int, seed: int, uninterrupted: list[list[int]], tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, killed_commits.__file__, str(tmp_path), str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["died"] == kills
    killed_commits.assert_whole(result["trained"])
    differences = killed_commits.length_differences(result["trained"], uninterrupted)
    assert sum(differences) < DIFFERENCE_MAX
    expected: Counter[str] = Counter()
    loader = killed_commits.make_loader()
    for _ in range(killed_commits.EPOCHS):
        for batch in loader:
            expected.update(map(str, batch.tolist()))
    assert Counter(map(str, result["trained"])) == expected  # with the same random draws
