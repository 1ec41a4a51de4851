# SPDX-License-Identifier: Apache-2.0
"""The journal of an engine's adapter."""

from __future__ import annotations

import contextlib
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engines.journal import Journal
from penstock.errors import PenstockError


def test_journal_keeps_its_entries_across_restarts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    first = journal.take_names(3)
    journal.note_stop(first[0], 12.5)
    journal.note_stop(first[1], 13.5)
    journal.note_gone(first[1])
    journal.note_spent(77)
    journal.note_endpoint("tcp://127.0.0.1:7000")
    again = Journal(tmp_path / "journal")
    assert again.pool == journal.pool
    assert again.endpoint == "tcp://127.0.0.1:7000"
    assert again.stopped_at == {first[0]: 12.5}
    assert again.spent_worker_ms == 77
    assert not set(again.take_names(3)) & set(first)


def test_journal_is_private_to_its_user(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"pool": "pk-1", "next": 5}\n')
    path.chmod(0o644)
    assert Journal(path).next_number == 5
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", range(1, 20))
def test_truncated_line_is_ignored(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    (name,) = journal.take_names(1)
    whole = path.read_bytes()
    journal.note_stop(name, 1.0)
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    again = Journal(path)
    assert again.stopped_at == {}
    assert again.take_names(1) != [name]
    assert Journal(path).next_number == 3


def test_journal_is_compacted(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    (name,) = journal.take_names(1)
    for count in range(4200):
        journal._line_count += 20  # as if more had been written
        journal.note_spent(count)
    journal.note_stop(name, 2.0)
    assert len((tmp_path / "journal").read_text().splitlines()) < 300
    assert Journal(tmp_path / "journal").spent_worker_ms == 4199


@pytest.mark.parametrize(
    "line",
    ["[]", "nonsense", '{"next": "many"}', '{"stop": "a"}', '{"pool": "pk-1; touch /tmp/x; "}'],
)
def test_malformed_journal_is_reported_with_the_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal"
    Journal(path)
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(PenstockError, match=f"cannot read the journal {path}: line 2 is"):
        Journal(path)


@contextlib.contextmanager
def files_of(bytes_max: int) -> Iterator[None]:
    """No file of this process grows beyond that: to the writer, the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LINE = len('{"next": 3}\n')


@pytest.mark.parametrize("room", range(LINE + 1))
def test_name_that_could_not_be_recorded_is_not_used(tmp_path: Path, room: int) -> None:
    """``room`` is the space left for it. Another line was written after half of one, and the
    journal became unreadable."""
    path = tmp_path / "journal"
    journal = Journal(path)
    given = journal.take_names(1)
    with files_of(path.stat().st_size + room):
        more = journal.take_names(1)
    assert (len(more) == 1) == (room == LINE) == (journal.trouble == "")
    journal.note_stop(given[0], 2.0)
    again = Journal(path)
    assert (again.pool, again.stopped_at) == (journal.pool, {given[0]: 2.0})
    assert not {*again.take_names(1)} & {*given, *more}


def test_unwritten_entries_are_written_once_there_is_space(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    first, second = journal.take_names(2)
    journal.note_stop(second, 1.0)
    with files_of(5):
        journal.note_stop(first, 2.0)
        journal.note_gone(second)
        journal.note_spent(9)
        journal.catch_up()
    assert journal.trouble == f"the journal cannot be written (File too large): {path}"
    assert [one.name for one in tmp_path.iterdir()] == ["journal"]
    journal.catch_up()
    assert journal.trouble == ""
    again = Journal(path)
    assert (again.stopped_at, again.spent_worker_ms) == ({first: 2.0}, 9)


def test_journal_opened_on_a_full_disk_keeps_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    (name,) = journal.take_names(1)
    journal.note_stop(name, 2.0)
    with files_of(5):
        again = Journal(path)
        assert again.take_names(1) == []
    assert (again.pool, again.stopped_at) == (journal.pool, journal.stopped_at)
    assert Journal(path).stopped_at == journal.stopped_at


def test_new_journal_on_a_full_disk_gives_no_names_until_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with files_of(5):
        journal = Journal(path)
        assert journal.take_names(1) == []
    journal.catch_up()
    assert Journal(path).pool == journal.pool
    assert len(journal.take_names(1)) == 1
