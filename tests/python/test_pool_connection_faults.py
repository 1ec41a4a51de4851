# SPDX-License-Identifier: Apache-2.0
"""A pool whose connections are slow, cut, silent or damaged: the stream equals the stream of one
process."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_datasets import CODE, Augmented, Shards, digests
from pool_processes import PoolProcesses, Worker, pool_of
from tcp_proxy import (
    FLIP,
    RESET,
    RESIZE,
    SILENCE,
    STALL,
    TO_CLIENT,
    TO_SERVER,
    TRUNCATE,
    TcpProxy,
    open_proxy,
)

from penstock import DataLoader, Pool
from penstock.errors import PoolWarning

pytestmark = pytest.mark.slow

SMALL = 400  # values of a sample, with 4 of them in a batch: 6.4 KB
LARGE = 65_536  # with 4: 1 MB


@dataclass
class Links:
    """A pool in which all processes reach the controller through one proxy, and trainers the only
    worker through two: one for messages, one for the chunks of batches."""

    pool: PoolProcesses
    to_controller: TcpProxy
    to_worker: TcpProxy
    to_pieces: TcpProxy
    worker: Worker

    @property
    def proxies(self) -> tuple[TcpProxy, ...]:
        return self.to_controller, self.to_worker, self.to_pieces

    def loader(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset, pool=Pool(self.pool.endpoint, code_paths=[CODE]), timeout=30, **options
        )


@pytest.fixture(scope="module")
def lasting_links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Links]:
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        control, messages, pieces = [stack.enter_context(open_proxy()) for _ in range(3)]
        for pool in pool_of(tmp_path_factory.mktemp("links"), patch):
            control.lead_to(pool.endpoint)
            pool.endpoint = control.endpoint
            worker = pool.start_worker(
                *("--bind", "tcp://127.0.0.1:0", "--advertise", messages.endpoint),
                *("--data-bind", "tcp://127.0.0.1:0", "--data-advertise", pieces.endpoint),
            )
            messages.lead_to(worker.served()[0][1])
            pieces.lead_to(worker.data_endpoint())
            yield Links(pool, control, messages, pieces, worker)


@pytest.fixture
def links(lasting_links: Links) -> Iterator[Links]:
    for proxy in lasting_links.proxies:
        proxy.clear_faults()
    yield lasting_links
    for proxy in lasting_links.proxies:
        proxy.clear_faults()


def expected_digests(dataset: Any, **options: Any) -> list[str]:
    torch.manual_seed(7)
    return digests(DataLoader(dataset, seeding="batch", **options))


def check_stream(links: Links, dataset: Any, **options: Any) -> None:
    """The stream of one process, regardless of faults on the connections."""
    options = {"batch_size": 4, **options}
    expected = expected_digests(dataset, **options)
    torch.manual_seed(7)
    loader = links.loader(dataset, **options)
    assert digests(loader) == expected
    assert loader.stats().iterator == "pool"


def test_slow_connection_delivers_the_stream(links: Links) -> None:
    links.to_pieces.limit(bytes_per_s=2e6)
    check_stream(links, Augmented(24, LARGE), shuffle=True)


@pytest.mark.long
def test_large_batches_cross_a_slow_connection(links: Links) -> None:
    links.to_pieces.limit(bytes_per_s=2e6)
    check_stream(links, Augmented(8, 20 * LARGE // 4))


class Holding(Augmented):
    """Is sent with the data that it holds."""

    def __init__(self, count: int, held_bytes: int) -> None:
        super().__init__(count)
        self.held = torch.randint(0, 256, (held_bytes,), dtype=torch.uint8)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "held": self.held[index]}


@pytest.mark.long
def test_large_job_crosses_a_slow_connection(links: Links) -> None:
    links.to_worker.limit(bytes_per_s=2e6)
    check_stream(links, Holding(8, 8_000_000))


def test_byte_by_byte_connection_delivers_the_stream(links: Links) -> None:
    check_stream(links, Augmented(80, SMALL))  # the worker has the job then, and its code
    for proxy in links.proxies:
        proxy.limit(send_bytes_max=1)
    check_stream(links, Augmented(80, SMALL))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("make", [Augmented, Shards])
def test_random_resets_leave_the_stream_intact(links: Links, seed: int, make: Any) -> None:
    draw = random.Random(seed)
    for _ in range(15):
        way, bytes_max = draw.choice([(TO_CLIENT, 1500), (TO_SERVER, 3000)])
        links.to_worker.inject(RESET, draw.randrange(bytes_max), way)
        links.to_pieces.inject(RESET, draw.randrange(9000))
    dataset = Augmented(600, SMALL) if make is Augmented else Shards(2000)
    check_stream(links, dataset, **({} if make is Augmented else {"shards": 3}))
    assert links.to_worker.injected == [RESET] * 15
    assert links.to_pieces.injected.count(RESET) >= 5  # left after a reset of the other one


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        *(("pieces", kind) for kind in (SILENCE, STALL, TRUNCATE, FLIP, RESIZE)),
        *(("requests", kind) for kind in (SILENCE, STALL, TRUNCATE, FLIP, RESIZE)),
        *(("answers", kind) for kind in (SILENCE, STALL, TRUNCATE, FLIP)),  # whose frames are short
    ],
)
def test_worker_connection_fault_leaves_the_stream_intact(
    links: Links, what: str, kind: str
) -> None:
    proxy = links.to_pieces if what == "pieces" else links.to_worker
    way = TO_SERVER if what == "requests" else TO_CLIENT
    after_bytes = 50_000 if what == "pieces" else 4_000
    proxy.inject(kind, after_bytes, way, {SILENCE: 3.0, STALL: 1.0}.get(kind, 0.0))
    # Frames are long, as RESIZE requires, where a request names this many samples.
    check_stream(links, Augmented(2560, SMALL), batch_size=64)
    assert proxy.injected == [kind]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [SILENCE, RESET, TRUNCATE, FLIP])
@pytest.mark.parametrize("way", [TO_CLIENT, TO_SERVER])
def test_worker_controller_fault_leaves_the_stream_intact(
    links: Links, kind: str, way: str
) -> None:
    links.to_controller.inject(kind, 300, way, 3.0)
    links.to_controller.wait_injected()  # the worker alone is connected now
    check_stream(links, Augmented(160, SMALL))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [SILENCE, RESET, TRUNCATE, FLIP])
@pytest.mark.parametrize("way", [TO_CLIENT, TO_SERVER])
def test_trainer_controller_fault_leaves_the_stream_intact(
    links: Links, kind: str, way: str
) -> None:
    dataset = Augmented(160, SMALL)
    expected = expected_digests(dataset, batch_size=4)
    torch.manual_seed(7)
    batches = iter(links.loader(dataset, batch_size=4))
    found = digests(itertools.islice(batches, 8))
    links.to_controller.inject(kind, 2000, way, 3.0)
    links.to_controller.wait_injected()
    assert found + digests(batches) == expected
    check_stream(links, dataset)


def test_slow_controller_connection_delivers_the_stream(links: Links) -> None:
    links.to_controller.limit(bytes_per_s=5_000)
    check_stream(links, Augmented(160, SMALL))


def test_resets_during_key_exchange_leave_the_stream_intact(links: Links) -> None:
    """Byte after byte of the first messages between a client and a server."""
    for number in range(12):
        links.to_worker.inject(RESET, 30 * number, TO_SERVER if number % 2 else TO_CLIENT)
    check_stream(links, Augmented(20, SMALL))
    assert links.to_worker.injected == [RESET] * 12


@pytest.mark.long
def test_resets_of_joining_data_connections_leave_stream_intact(links: Links) -> None:
    """Each time the token may be used up, so each time there is another connection."""
    for number in range(12):
        links.to_pieces.inject(RESET, 20 * number, TO_SERVER if number % 2 else TO_CLIENT)
    check_stream(links, Augmented(20, SMALL))
    assert links.to_pieces.injected == [RESET] * 12


def test_corrupt_chunk_is_reported_and_discarded(links: Links) -> None:
    links.to_pieces.inject(FLIP, 50_000)
    with pytest.warns(
        PoolWarning, match="is being reconnected.*chunk of a batch.*authentication tag is wrong"
    ):
        check_stream(links, Augmented(2560, SMALL), batch_size=64)


@pytest.mark.long
def test_error_names_unreachable_data_port(pool: PoolProcesses, dead_end: str) -> None:
    pool.start_worker("--bind", "tcp://127.0.0.1:0", "--data-advertise", dead_end).served()
    options: dict[str, Any] = {"batch_size": 4, "pool": Pool(pool.endpoint, code_paths=[CODE])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PoolWarning)
        said = error_of_timeout(DataLoader(Augmented(40), timeout=12, **options))
    for text in (said, *(str(one.message) for one in caught)):
        if f"no data arrives from {dead_end}" in text and "--data-bind" in text:
            break
    else:
        raise AssertionError(said)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PoolProcesses]:
    yield from pool_of(tmp_path, monkeypatch)


@pytest.fixture
def dead_end() -> Iterator[str]:
    """An address that is taken, and an address without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield "tcp://{}:{}".format(*taken.getsockname())


def error_of_timeout(loader: DataLoader[Any]) -> str:
    with pytest.raises(RuntimeError, match="timed out") as raised:
        next(iter(loader))
    return str(raised.value)


@pytest.mark.long
def test_unreachable_worker_is_named_and_bypassed(pool: PoolProcesses, dead_end: str) -> None:
    """The trainer waits for it with a warning, works without it once there is another, and names
    it."""
    dead = pool.start_worker("--bind", "tcp://127.0.0.1:0", "--advertise", dead_end)
    named = f"worker {dead.served()[0][0]} has not answered at {dead_end}; check that this machine"
    options: dict[str, Any] = {"batch_size": 4, "pool": Pool(pool.endpoint, code_paths=[CODE])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PoolWarning)
        said = error_of_timeout(DataLoader(Augmented(40), timeout=8, **options))
    gc.collect()  # or that trainer would have its share of the workers
    assert named.replace(" has", ": has") in said
    assert any("0 of 1 worker " in str(one.message) for one in caught)
    pool.start_worker()
    expected = expected_digests(Augmented(200), batch_size=4)
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PoolWarning)
        # Its one worker keeps it waiting, so that it can use the other.
        loader = DataLoader(Augmented(200, seconds=0.08), timeout=30, **options)
        found = digests(loader)
    assert found == expected
    assert sum(named in str(one.message) for one in caught) == 1


@pytest.mark.long
def test_trainer_waits_for_a_restarted_worker(pool: PoolProcesses) -> None:
    first = pool.start_worker()
    dataset = Augmented(200)
    expected = expected_digests(dataset, batch_size=4)
    torch.manual_seed(7)
    loader = DataLoader(
        dataset, batch_size=4, pool=Pool(pool.endpoint, code_paths=[CODE]), timeout=60
    )
    batches = iter(loader)
    found = digests(itertools.islice(batches, 5))
    assert first.end(signal.SIGTERM) == 0
    rest: list[str] = []
    trainer = threading.Thread(target=lambda: rest.extend(digests(batches)))
    trainer.start()
    pool.start_worker()
    trainer.join()
    assert found + rest == expected
