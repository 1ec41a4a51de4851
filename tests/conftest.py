# SPDX-License-Identifier: Apache-2.0
"""Settings of every Python test: the run's seed, and skipping of GPU tests on machines without one.

Also contains the fixtures shared by the cut tests.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator

import pytest

SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="seed of random choices; every run prints its own")
    parser.addoption("--long", action="store_true", help="also what is left to `make test-all`")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # The default of a shell that runs the tests in the background; programs would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main = sys.modules["__main__"]
    gateway = sys.modules.get("execnet.gateway_base")
    if gateway is not None and not hasattr(main, "__file__"):
        # A process of pytest-xdist looks like an interactive Python, which sends all code of its
        # working folder, here the whole repository, with each job of a pool.
        main.__file__ = gateway.__file__
    if sys.version_info >= (3, 14):
        # Its fork server cannot pickle lambdas and local classes, which the tests pass to workers.
        # Separate tests cover the other start methods, and name them.
        multiprocessing.set_start_method("fork")
    seed = config.getoption("--seed")
    config.stash[SEED] = int.from_bytes(os.urandom(4), "little") if seed is None else seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SEED]} (the same again: --seed {config.stash[SEED]})"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Return this test's seed, derived from the run's seed and the test's name, so that the test
    behaves the same alone as in the suite.

    The global generators start from it.
    """
    value = request.config.stash[SEED] ^ zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    # Imported by the tests that draw from them; other tests should not wait for torch.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(value)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def unchanged_import_path() -> Iterator[None]:
    """Fail a test that removes a folder from sys.path, instead of a later test."""
    before = list(sys.path)
    yield
    gone = [entry for entry in before if entry not in sys.path]
    if gone:
        sys.path[:] = before
        pytest.fail(f"the test took from sys.path: {gone}", pytrace=False)


@pytest.fixture
def on_one_thread() -> Iterator[None]:
    """Make kernels of the cut tests sum in the same order as a worker's."""
    from limits import one_thread

    with one_thread():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _deselect_long_tests(config, items)
    _run_mutants_first(items)
    _skip_gpu_tests(items)


def _deselect_long_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `long`, and torch's half of each test.

    Tests selected by their id or with -k always run.
    """
    long = [item for item in items if _is_long(item)]
    long += _cases_left_out(items)
    is_named = config.option.keyword or any("::" in argument for argument in config.args)
    if is_named or config.getoption("--long"):
        return
    _check_cases(items, long)
    gone = {*long, *(item for item in items if _is_torchs_half(item))}
    config.hook.pytest_deselected(items=list(gone))
    items[:] = [item for item in items if item not in gone]


def _run_mutants_first(items: list[pytest.Item]) -> None:
    """Move the simulator's mutants to the front: each is compiled for half a minute, which would
    delay the end of a run."""
    items.sort(key=lambda item: item.path.parent.name != "sim")


def _is_long(item: pytest.Item) -> bool:
    """Return whether `@pytest.mark.long` marks the test, for all of its cases or for this one's id.

    In an id, a star matches any text.
    """
    marks = [*item.iter_markers("long")]
    case = item.callspec.id if isinstance(item, pytest.Function) and _has_cases(item) else ""
    return any(
        not mark.args or any(fnmatch.fnmatchcase(case, _escaped(one)) for one in mark.args)
        for mark in marks
    )


def _cases_left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases to leave out of each test marked `sampled(count)`: all but `count`, which
    are spread evenly.

    The choice depends only on the cases, so every process of a run leaves out the same ones.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if any(item.iter_markers("sampled")) and not _is_torchs_half(item):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for of_one in cases.values():
        count = next(of_one[0].iter_markers("sampled")).args[0]
        step = len(of_one) / min(count, len(of_one))
        kept = {int((place + 0.5) * step) for place in range(count)}
        left_out += [item for place, item in enumerate(of_one) if place not in kept]
    return left_out


def _check_cases(items: list[pytest.Item], long: list[pytest.Item]) -> None:
    """Reject ids that match no case of their test."""
    marked = {item.nodeid.partition("[")[0] for item in items if any(item.iter_markers("long"))}
    found = {item.nodeid.partition("[")[0] for item in long}
    if marked - found:
        raise pytest.UsageError(f"marked long, with ids that no case has: {sorted(marked - found)}")


def _escaped(case: str) -> str:
    """Escape an id for use as a pattern, so that brackets match themselves."""
    return case.replace("[", "[[]")


def _has_cases(item: pytest.Function) -> bool:
    return hasattr(item, "callspec")


def _is_torchs_half(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    loader = {"loader_name", "loader_class"} & item.callspec.params.keys()
    return any(_is_torchs(item.callspec.params[name]) for name in loader)


def _is_torchs(loader: object) -> bool:
    return loader == "torch" or getattr(loader, "__module__", "").startswith("torch.")


def _skip_gpu_tests(items: list[pytest.Item]) -> None:
    needing_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not needing_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; its twin on the CPU runs"))
