# SPDX-License-Identifier: Apache-2.0
"""For every Python test: the seed of the run, and skipping what needs a GPU where there is none.

Also what the tests of the cut share.
"""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterator

import pytest
from long_tests import LEFT_TO_TEST_ALL, LONG_FILES

SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of random choices; every run prints its own")
    parser.addoption("--long", action="store_true", help="also what is left to `make test-all`")


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--seed")
    config.stash[SEED] = int.from_bytes(os.urandom(4), "little") if seed is None else seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SEED]} (the same again: --seed {config.stash[SEED]})"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed, made from the run's and its name: alone it fails as in the suite.

    The global generators start from it.
    """
    value = request.config.stash[SEED] ^ zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    # Imported by the tests that draw from them; a test that does not should not wait for torch.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)
    return value


@pytest.fixture
def one_thread_and_fresh_dynamo() -> Iterator[None]:
    """For tests of the cut: Dynamo forgets what it compiled in the tests before."""
    import torch
    from limits import one_thread

    torch._dynamo.reset()
    with one_thread():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_to_test_all(config, items)
    places = {file: place for place, file in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(_file_of(item), len(places)))
    _rerun_torchs_half(items)
    _skip_what_needs_a_gpu(items)


def _leave_to_test_all(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that is named, by its id or with -k, is run in any case."""
    is_named = config.option.keyword or any("::" in argument for argument in config.args)
    if is_named:
        return
    named = [item for item in items if any(_is_of(item, test_id) for test_id in LEFT_TO_TEST_ALL)]
    files = {_file_of(item) for item in items}
    for test_id in LEFT_TO_TEST_ALL:
        is_here = any(_is_of(item, test_id) for item in named)
        if not is_here and test_id.partition("::")[0] in files:
            raise pytest.UsageError(f"tests/long_tests.py names what is no test: {test_id}")
    if not config.getoption("--long"):
        gone = {*named, *(item for item in items if _is_torchs_half(item))}
        config.hook.pytest_deselected(items=list(gone))
        items[:] = [item for item in items if item not in gone]


def _is_of(item: pytest.Item, test_id: str) -> bool:
    return item.nodeid == test_id or item.nodeid.startswith(f"{test_id}[")


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _rerun_torchs_half(items: list[pytest.Item]) -> None:
    """Torch's half of a test is there to show that the test is right: `make test-all` runs it.

    One pass shows that. Torch's loader loses a descriptor or a file now and then when it is killed
    or interrupted at a bad moment; that is no news about ours, whose half is run once.
    """
    for item in items:
        if _is_torchs_half(item):
            item.add_marker(pytest.mark.flaky(reruns=2))


def _is_torchs_half(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    loader = {"loader_name", "loader_class"} & item.callspec.params.keys()
    return any(_is_torchs(item.callspec.params[name]) for name in loader)


def _is_torchs(loader: object) -> bool:
    return loader == "torch" or getattr(loader, "__module__", "").startswith("torch.")


def _skip_what_needs_a_gpu(items: list[pytest.Item]) -> None:
    needing_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; its twin on the CPU runs"))
