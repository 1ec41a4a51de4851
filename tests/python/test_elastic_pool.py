# SPDX-License-Identifier: Apache-2.0
"""`penstock up` and `penstock down`: what they find again, and what they refuse."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_pools import Elastic, expected
from pool_processes import Process

pytestmark = pytest.mark.slow


@pytest.fixture
def elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elastic]:
    one = Elastic(tmp_path, monkeypatch)
    try:
        yield one
    finally:
        one.close()


def test_workers_outlive_a_killed_controller_and_are_found_again(elastic: Elastic) -> None:
    up = elastic.up("--min", "2", "--max", "2")
    elastic.has_workers(2)
    before = elastic.processes()
    endpoint = elastic.pool.endpoint
    batches = iter(elastic.loader(400))
    given = [next(batches).tolist() for _ in range(5)]
    up.end(signal.SIGKILL)
    given += [next(batches).tolist() for _ in range(5)]
    elastic.up("--min", "2", "--max", "2")
    assert elastic.pool.endpoint == endpoint
    given += [batch.tolist() for batch in batches]
    assert given == expected(400)
    elastic.has_workers(2)
    assert elastic.processes() == before


def test_two_adapters_on_one_folder_are_refused(elastic: Elastic) -> None:
    elastic.up()
    second = Process(
        ["up", "--engine", "local", "--state", str(elastic.state)], elastic.pool.environment
    )
    assert second.wait() == 1
    assert f"another penstock up runs on {elastic.state}; end it (penstock down)" in second.output


@pytest.mark.long
def test_a_spent_budget_starts_nobody_and_says_so(elastic: Elastic) -> None:
    elastic.up("--max", "3", "--price", "1", "--budget", "0")
    loader = elastic.loader(8, timeout=3)
    with pytest.raises(RuntimeError, match="timed out after 3 seconds"):
        next(iter(loader))
    assert elastic.processes() == {}
    assert "budget" in elastic.pool.status()["engine"]["reason"]


def test_arguments_that_make_no_sense_are_refused(elastic: Elastic) -> None:
    for arguments, words in [
        (["--min", "5", "--max", "2"], "--min is 5 and --max is 2"),
        (["--budget", "3"], "a --budget needs the --price"),
        (["--price", "cheap"], "is 'cheap'; an amount from 0 on is expected"),
    ]:
        process = Process(["up", "--engine", "local", *arguments], elastic.pool.environment)
        assert process.wait() == 2
        assert words in process.output


def test_down_of_a_pool_without_an_engine_says_so(elastic: Elastic) -> None:
    elastic.pool.start_controller()
    down = elastic.down()
    assert down.wait() == 1
    assert "has no engine" in down.output
