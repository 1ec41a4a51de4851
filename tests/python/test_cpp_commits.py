# SPDX-License-Identifier: Apache-2.0
"""Batches that were committed, or delivered, in any order: C++ and Python loaders resume from each
other's states, and a C++ program that is killed loses and repeats nothing."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpp_loader import PLUGIN, Draws, as_numbers, error_of_cpp, finish_cpp, run_cpp, start_cpp
from pool_processes import PoolProcesses, pool_of

import penstock

SIZE = 46  # 16 batches of 3, the last one of 1
EPOCHS = 3
KILLS = 20
KEPT = [1, 2, 9, 17, 18, 20]  # of 21 delivered batches, in two epochs

ORDERS: list[dict[str, Any]] = [
    {"batch_size": 3, "shuffle": True, "generator": 9},
    {"batch_size": 3, "num_workers": 2},
    {"batch_size": 3, "shuffle": True, "num_workers": 2, "in_order": False},
    {"batch_size": 3, "shuffle": True, "generator": 9, "num_workers": 2, "in_order": 4},
    {"batch_size": None, "shuffle": True, "num_workers": 2},
]


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    """A pool with two workers of plug-ins, and the keys of this test alone."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    for opened in pool_of(tmp_path, monkeypatch):
        opened.start_native_worker(processes=2)
        yield opened


def of_pool(pool: PoolProcesses, size: int) -> dict[str, Any]:
    return {"plugin": str(PLUGIN), "arguments": {"size": size}, "pool": pool.endpoint}


def python_loader(*, commit: bool = True, **options: Any) -> Any:
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    mode = "manual" if commit else None
    return penstock.DataLoader(Draws(SIZE), seeding="batch", commit=mode, **options)


def rows(batches: Any) -> list[Any]:
    return [as_numbers(batch) for batch in batches]


def run_python(loader: Any, stop: int, keep: list[int]) -> tuple[list[Any], dict[str, Any]]:
    """Deliver ``stop`` batches, over epochs, and commit all but the ``keep`` of them."""
    seen, ids = [], []
    while len(seen) < stop:
        for batch in loader:
            seen.append(as_numbers(batch))
            ids.append(loader.batch_id())
            if len(seen) == stop:
                break
    for number, one in enumerate(ids):
        if number not in keep:
            loader.commit(one)
    return seen, json.loads(json.dumps(loader.state_dict()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", ORDERS, ids=str)
def test_uncommitted_batches_move_between_cpp_and_python(options: dict[str, Any]) -> None:
    in_cpp: dict[str, Any] = {"size": SIZE, "options": {**options, "commit": True}}
    stop = 21 if options["batch_size"] else SIZE + 5
    keep = sorted({*KEPT, stop - 1})

    torch.manual_seed(3)
    _, state = run_python(python_loader(**options), stop, keep)
    torch.manual_seed(8)
    resumed = python_loader(**{**options, "num_workers": 0, "in_order": True})
    resumed.load_state_dict(state)
    expected = rows(resumed)
    assert state["version"] == 4
    *left, outstanding, _ = run_cpp(**in_cpp, seed=8, state=state, keep=[])
    assert sorted(left) == sorted(expected)
    assert outstanding == []

    *_, outstanding, state = run_cpp(**in_cpp, seed=3, epochs=2, stop=stop, keep=keep)
    assert len(outstanding) == len(keep)
    torch.manual_seed(8)
    resumed = python_loader(**options)
    resumed.load_state_dict(state)
    assert len(resumed.outstanding) == 0
    of_cpp = rows(resumed)
    torch.manual_seed(8)
    other = python_loader(**{**options, "num_workers": 0, "in_order": True})
    other.load_state_dict(state)
    assert sorted(of_cpp) == sorted(rows(other))
    if options.get("in_order", True) is True:  # the same batches were delivered
        assert of_cpp == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [0, 1])
def test_states_are_equal_in_cpp_and_python(number: int) -> None:
    options = ORDERS[number]
    torch.manual_seed(3)
    seen, of_python = run_python(python_loader(**options), 21, KEPT)
    in_cpp = {"size": SIZE, "options": {**options, "commit": True}, "seed": 3}
    *batches, outstanding, of_cpp = run_cpp(**in_cpp, epochs=2, stop=21, keep=KEPT)
    assert batches == seen
    assert outstanding == [[0, 1], [0, 2], [0, 9], [1, 1], [1, 2], [1, 4]]
    for state in (of_python, of_cpp):
        for part in ("random", "numpy"):
            state["generators"]["globals"][part] = None
        state["shards"] = None  # the native side counts workers that Python's process has not
    assert of_cpp == of_python


def test_last_epoch_is_redelivered_by_the_other_language() -> None:
    options = ORDERS[1]
    in_cpp = {"size": SIZE, "options": {**options, "commit": True}, "seed": 8}
    torch.manual_seed(3)
    loader = python_loader(**options)
    list(loader)
    for number in range(16):
        if number not in (4, 11):
            loader.commit(penstock.BatchId(0, number))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = python_loader(**options)
    resumed.load_state_dict(state)
    expected = rows(resumed.redeliver())
    assert len(expected) == 2
    *seen, outstanding, state = run_cpp(**in_cpp, state=state, redeliver=True, keep=[1])
    assert seen == expected
    assert outstanding == [[0, 11]]
    again = python_loader(**options)
    again.load_state_dict(state)
    assert rows(again.redeliver()) == expected[1:]


@pytest.mark.parametrize("window", [False, 4])
def test_overtaken_batches_move_between_cpp_and_python(window: bool | int) -> None:
    options = {"batch_size": 3, "shuffle": True}
    free = {**options, "num_workers": 3, "in_order": window}
    torch.manual_seed(3)
    whole = rows(python_loader(commit=False, **options))

    torch.manual_seed(3)
    first = python_loader(commit=False, **free)
    iterator = iter(first)
    seen = [as_numbers(next(iterator)) for _ in range(7)]
    # Which batches were overtaken depends on time, so others are named.
    state = json.loads(json.dumps(first.state_dict()))
    state["left"] = {"through": 9, "missing": [2, 5]}
    state["version"] = 2
    left = [whole[2], whole[5], *whole[9:]]
    assert len(seen) == 7
    *rest, outstanding, _ = run_cpp(
        size=SIZE,
        options={**options, "num_workers": 2, "commit": True},
        seed=8,
        state=state,
        keep=[],
    )
    assert rest == left
    assert outstanding == []
    of_free = run_cpp(size=SIZE, options=free, seed=8, state=state)
    assert sorted(of_free) == sorted(left)

    *seen, state = run_cpp(size=SIZE, options=free, seed=3, stop=7)
    last = python_loader(commit=False, **options)
    last.load_state_dict(state)
    assert sorted([*seen, *rows(last)]) == sorted(whole)


@pytest.mark.parametrize("in_order", [True, False, 4], ids=str)
def test_uncommitted_batches_move_into_and_out_of_a_pool(
    pool: PoolProcesses, in_order: bool | int
) -> None:
    here: dict[str, Any] = {"size": SIZE}
    there = {**here, **of_pool(pool, SIZE)}
    options = {"batch_size": 3, "shuffle": True, "commit": True}
    of_workers = {**options, "in_order": in_order}
    whole = run_cpp(**here, options=options, seed=3, epochs=2)
    *seen, outstanding, state = run_cpp(
        **there, options=of_workers, seed=3, epochs=2, stop=21, keep=KEPT
    )
    assert len(outstanding) == len(KEPT)
    kept = [seen[number] for number in KEPT]
    *expected, _, _ = run_cpp(**here, options=options, seed=8, state=state, keep=[])
    *left, outstanding, _ = run_cpp(**there, options=of_workers, seed=8, state=state, keep=[])
    assert sorted(left) == sorted(expected)
    assert sorted([*seen, *left]) == sorted([*whole, *kept])
    assert outstanding == []
    if in_order is True:
        assert left == expected
    loader = python_loader(batch_size=3, shuffle=True)
    loader.load_state_dict(state)
    assert rows(loader) == expected


def test_many_places_left_move_between_cpp_and_python() -> None:
    """More than 256 of them are written as bits."""
    size, options = 1200, {"batch_size": 1, "num_workers": 1}
    loader = penstock.DataLoader(Draws(size), seeding="batch", commit="manual", **options)
    iterator = iter(loader)
    ids = []
    for _ in range(900):
        next(iterator)
        ids.append(loader.batch_id())
    kept = [number for number in range(900) if number % 3 == 1]
    for number in range(900):
        if number % 3 != 1:
            loader.commit(ids[number])
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["version"] == 5
    assert state["left"]["missing"].keys() == {"first", "bits"}
    whole = rows(penstock.DataLoader(Draws(size), seeding="batch", batch_size=1))
    left = [*kept, *range(900, size)]
    in_cpp: dict[str, Any] = {"size": size, "options": {**options, "commit": True}, "seed": 8}
    *rest, _, _ = run_cpp(**in_cpp, state=state, keep=[])
    assert [row[0] for row in rest] == [whole[number][0] for number in left]

    # C++ commits the first 10 of them, and Python continues.
    *_, again = run_cpp(**in_cpp, state=state, stop=10, keep=[])
    assert again["version"] == 5
    resumed = penstock.DataLoader(Draws(size), seeding="batch", commit="manual", **options)
    resumed.load_state_dict(again)
    assert [row[0] for row in rows(resumed)] == [whole[number][0] for number in left[10:]]


def test_misuse_is_reported_in_the_same_words() -> None:
    options = ORDERS[1]
    torch.manual_seed(3)
    _, state = run_python(python_loader(**options), 21, KEPT)
    error = error_of_cpp(size=SIZE, options=options, seed=3, state=state)
    assert (
        "the state has batches of 1 earlier epochs that were delivered and not committed" in error
    )
    plain = python_loader(commit=False, **options)
    with pytest.raises(ValueError, match="the state has batches of 1 earlier epochs"):
        plain.load_state_dict(state)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["threads", "pool"])
def test_killed_cpp_program_loses_and_repeats_no_batch(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The checkpoint has the batches trained on, as a model's weights would, and the state."""
    options = {"batch_size": 3, "shuffle": True, "generator": 9, "in_order": 4}
    lent = of_pool(request.getfixturevalue("pool"), 300) if kind == "pool" else {}
    options["num_workers"] = 0 if lent else 2
    given = {"size": 300, "epochs": EPOCHS}
    checkpoint = tmp_path / "checkpoint.json"
    rng = random.Random(1)
    kill_count = 0
    while True:
        process = start_cpp(
            **given,
            **lent,
            options={**options, "commit": True},
            seed=kill_count,
            checkpoint=str(checkpoint),
        )
        assert process.stdout is not None
        if kill_count == KILLS:
            code, _, err = finish_cpp(process)
            assert code == 0, err
            break
        assert process.stdout.readline() == '"ready"\n'
        time.sleep(rng.random() * (0.2 if lent else 0.03))
        process.kill()
        process.communicate()
        kill_count += 1
    saved = json.loads(checkpoint.read_text())
    whole = run_cpp(**given, options={**options, "num_workers": 0, "in_order": True}, seed=3)
    trained = Counter(json.dumps(one) for one in saved["trained"])
    assert trained == Counter(json.dumps(one) for one in whole)
    assert saved["loader"]["commits"]["earlier"] == []
