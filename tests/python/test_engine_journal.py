# SPDX-License-Identifier: Apache-2.0
"""The journal of an engine's adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engines.journal import Journal
from penstock.errors import PenstockError


def test_a_journal_knows_after_a_restart_what_it_was_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    first = journal.take_names(3)
    journal.note_stop(first[0], 12.5)
    journal.note_stop(first[1], 13.5)
    journal.note_gone(first[1])
    journal.note_spent(77)
    again = Journal(tmp_path / "journal")
    assert again.pool == journal.pool
    assert again.stopped_at == {first[0]: 12.5}
    assert again.spent_worker_ms == 77
    assert not set(again.take_names(3)) & set(first)


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_line_that_was_cut_off_is_forgotten(tmp_path: Path, cut: int) -> None:
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


def test_a_journal_stays_short(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    (name,) = journal.take_names(1)
    for count in range(4200):
        journal._line_count += 20  # as if more had been written
        journal.note_spent(count)
    journal.note_stop(name, 2.0)
    assert len((tmp_path / "journal").read_text().splitlines()) < 300
    assert Journal(tmp_path / "journal").spent_worker_ms == 4199


@pytest.mark.parametrize("line", ["[]", "nonsense", '{"next": "many"}', '{"stop": "a"}'])
def test_a_journal_of_something_else_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal"
    Journal(path)
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(PenstockError, match=f"journal {path} cannot be read: line 2 is"):
        Journal(path)
