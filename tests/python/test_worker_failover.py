# SPDX-License-Identifier: Apache-2.0
"""With seeding="batch" any worker may make any batch of a map-style dataset.

A worker with a slow batch made the others wait, and the death of one ended the training, although
another could have made exactly the same batches.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from penstock import DataLoader
from penstock.errors import PoolWarning

pytestmark = pytest.mark.slow


class Drawing(Dataset[torch.Tensor]):
    """A sample's random draws depend on its batch. Some samples kill the worker that makes them.

    A late batch is requested from a second worker too, which waits here until the first is dead: a
    death after the epoch's last batch is not reported.
    """

    def __init__(self, count: int, deadly: dict[int, str] | None = None) -> None:
        self.count = count
        self.deadly = deadly or {}  # by sample, a file with the id of the process that it killed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        name = self.deadly.get(index)
        if name is not None and get_worker_info() is not None:
            victim = 0 if name.endswith("always") else self.victim_of(Path(name))
            if victim in (0, os.getpid()):
                os.kill(os.getpid(), signal.SIGKILL)
            while is_running(victim):
                time.sleep(0.01)
        return index + torch.rand(3)

    def victim_of(self, path: Path) -> int:
        """The process that the sample kills: the first one to make it."""
        mine = path.with_name(f"{path.name}.{os.getpid()}")
        mine.write_text(str(os.getpid()))
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
        return int(path.read_text())


def is_running(pid: int) -> bool:
    """Whether any thread of the process is running: the first can be dead while others are still
    ending."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:  # the process was waited for since it was asked about
        return False
    for thread in threads:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] not in "ZX":
                return True
    return False


def loader_of(dataset: Any, num_workers: int = 3, **options: Any) -> Any:
    torch.manual_seed(3)
    return DataLoader(
        dataset, batch_size=4, num_workers=num_workers, seeding="batch", shuffle=True, **options
    )


def expected(count: int) -> list[torch.Tensor]:
    return list(loader_of(Drawing(count), 0))


def assert_same(batches: list[torch.Tensor], count: int) -> None:
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in expected(count)]


def test_batches_of_a_dead_worker_are_made_by_the_others(tmp_path: Path) -> None:
    deadly = {17: str(tmp_path / "a"), 61: str(tmp_path / "b")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PoolWarning)
        batches = list(loader_of(Drawing(100, deadly)))
    assert_same(batches, 100)
    told = [str(one.message) for one in caught if one.category is PoolWarning]
    assert len(told) == 2
    assert all("was killed by SIGKILL; the remaining workers (" in text for text in told)
    assert "(1) make its unfinished batches" in told[1]
    assert {one.filename for one in caught if one.category is PoolWarning} == {__file__}


class LeavingAChild(Drawing):
    """A sample's worker forks a process, which lives while a pipe is open, and dies."""

    def __init__(self, count: int, deadly: dict[int, str], pipe: tuple[int, int]) -> None:
        super().__init__(count)
        self.victims = deadly
        self.reader, self.writer = pipe
        self.fetched_count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched_count += 1  # which must not be made twice, so no other worker is asked ahead
        name = self.victims.get(index)
        is_victim = name is not None and self.victim_of(Path(name)) == os.getpid()
        if is_victim and get_worker_info() is not None:
            if os.fork() == 0:
                os.close(self.writer)
                os.read(self.reader, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_worker_death_is_detected_while_its_child_lives(tmp_path: Path) -> None:
    """The trainer waited for ever: the child held the worker's end of the connection open."""
    reader, writer = os.pipe()
    dataset = LeavingAChild(60, {30: str(tmp_path / "victim")}, (reader, writer))
    try:
        with pytest.warns(PoolWarning, match=r"was killed by SIGKILL.*remaining workers \(2\)"):
            batches = list(loader_of(dataset, timeout=20))
    finally:
        os.close(reader)
        os.close(writer)
    assert_same(batches, 60)


def test_worker_death_without_pending_batches_warns_at_epoch_end() -> None:
    loader = loader_of(Drawing(40), persistent_workers=True)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(10)]
    process = iterator.source.processes[1]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.warns(
        PoolWarning, match=r"was killed by SIGKILL.*remaining workers \(2\)"
    ) as caught:
        assert next(iterator, None) is None
    assert len(caught) == 1
    assert_same(batches, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PoolWarning)  # it is reported once
        assert len(list(loader)) == 10


def test_only_the_batch_that_kills_its_workers_fails(tmp_path: Path) -> None:
    dataset = Drawing(60, {30: str(tmp_path / "always")})
    loader = loader_of(dataset, 4)
    batches, errors = [], []
    iterator = iter(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoolWarning)
        while True:
            try:
                batches.append(next(iterator))
            except StopIteration:
                break
            except RuntimeError as error:
                errors.append(str(error))
    (error,) = errors
    assert "3 workers in a row died while making batch" in error
    whole = [batch.tolist() for batch in expected(60)]
    assert len(batches) == 14
    assert all(batch.tolist() in whole for batch in batches)


def test_death_of_all_workers_raises_torch_error(tmp_path: Path) -> None:
    deadly = {index: str(tmp_path / "always") for index in range(40)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoolWarning)
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\(?s?\)? ?\d+\)"):
            list(loader_of(Drawing(40, deadly), 2))


def test_surviving_persistent_workers_make_later_epochs(tmp_path: Path) -> None:
    loader = loader_of(Drawing(40, {7: str(tmp_path / "a")}), persistent_workers=True)
    reference = loader_of(Drawing(40), persistent_workers=True)
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PoolWarning)
        got = [[batch.tolist() for batch in loader] for _ in range(3)]
    torch.manual_seed(5)
    assert got == [[batch.tolist() for batch in reference] for _ in range(3)]


class Uneven(Drawing):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.2 if index % 17 == 3 else 0.001)
        return super().__getitem__(index)


@pytest.mark.parametrize("in_order", [True, False])
def test_slow_batches_keep_content_and_requested_order(in_order: bool) -> None:
    batches = [batch.tolist() for batch in loader_of(Uneven(120), in_order=in_order)]
    whole = [batch.tolist() for batch in expected(120)]
    if in_order:
        assert batches == whole
    assert sorted(batches) == sorted(whole)


class FirstBlocks(Drawing):
    """Sample 0 is made once the last one has been made."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count)
        self.done = folder / "done"

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.count - 1:
            self.done.touch()
        while index == 0 and not self.done.exists():
            time.sleep(0.01)
        return super().__getitem__(index)


def test_other_workers_run_further_ahead_of_a_late_batch(
    tmp_path: Path,
) -> None:
    # Two workers are asked for four batches ahead; the sixteenth lets the first one continue.
    dataset = FirstBlocks(64, tmp_path)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, seeding="batch")
    batches = [batch[:, 0].floor().tolist() for batch in loader]
    assert batches == [[4 * k, 4 * k + 1, 4 * k + 2, 4 * k + 3] for k in range(16)]


def test_late_batch_does_not_pull_user_sampler_further(
    tmp_path: Path,
) -> None:
    pulled = []

    def order() -> Any:
        for index in range(64):
            pulled.append(index)
            yield index

    class Order:
        def __iter__(self) -> Any:
            return order()

        def __len__(self) -> int:
            return 64

    dataset = FirstBlocks(64, tmp_path)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, seeding="batch", sampler=Order())
    timer = threading.Timer(0.5, dataset.done.touch)
    timer.start()
    next(iter(loader))
    timer.join()
    assert len(pulled) == 20


def test_stateful_dataset_keeps_round_robin_assignment(tmp_path: Path) -> None:
    class Stateful(Drawing):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

        def __getitem__(self, index: int) -> Any:
            info = get_worker_info()
            return -1 if info is None else info.id

    batches = [batch[0].item() for batch in loader_of(Stateful(48))]
    assert batches == [0, 1, 2] * 4


class SlowOnce(Dataset[torch.Tensor]):
    """One sample takes long for the worker that fetches it first."""

    def __init__(self, slow: int, folder: Path, slow_s: float, *, counts: bool = False) -> None:
        self.slow = slow
        self.folder = folder
        self.slow_s = slow_s
        self.counts = counts
        self.fetched_count = 0

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched_count += self.counts
        if index == self.slow:
            is_first = not any(self.folder.iterdir())
            (self.folder / str(os.getpid())).touch()
            time.sleep(self.slow_s if is_first else 0)
        time.sleep(0.001)
        return torch.rand(3) + index


@pytest.mark.long
def test_late_batch_is_requested_from_another_worker(tmp_path: Path) -> None:
    dataset = SlowOnce(100, tmp_path, 3600)  # which is not awaited
    batches = list(loader_of(dataset))
    assert len(list(tmp_path.iterdir())) == 2
    expected = list(loader_of(dataset, 0))
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in expected]


def test_late_batch_of_self_modifying_dataset_is_not_repeated(tmp_path: Path) -> None:
    list(loader_of(SlowOnce(100, tmp_path, 2, counts=True)))
    assert len(list(tmp_path.iterdir())) == 1
