# SPDX-License-Identifier: Apache-2.0
"""The file in which an operator lays down priorities and quotas."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pool.job_terms import read_job_terms


def terms_of(tmp_path: Path, text: str) -> object:
    path = tmp_path / "terms.json"
    path.write_text(text)
    return read_job_terms(str(path))


def test_priorities_and_quotas_are_read_by_name(tmp_path: Path) -> None:
    text = """{"a.py": {"priority": 2}, "b.py": {"quota": 0},
               "c.py": {"priority": 0.5, "quota": 7}, "d": {}}"""
    assert terms_of(tmp_path, text) == {
        "a.py": (2.0, None),
        "b.py": (1.0, 0),
        "c.py": (0.5, 7),
        "d": (1.0, None),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "terms.json are no JSON"),
        ("[]", "are a JSON list; expected an object such as"),
        ('{"a": 3}', "terms of 'a' in .*terms.json are 3; expected an object of priority, quota"),
        ('{"a": {"prio": 3}}', "expected an object of priority, quota or both"),
        ('{"a": {"priority": 0}}', "have the priority 0; expected a number above 0"),
        ('{"a": {"priority": NaN}}', "have the priority nan"),
        ('{"a": {"priority": true}}', "have the priority True"),
        ('{"a": {"quota": -1}}', "have the quota -1; expected a whole number of workers"),
        ('{"a": {"quota": 1.5}}', "have the quota 1.5"),
        ('{"a": {"quota": 99999999999}}', "have the quota 99999999999"),
    ],
)
def test_other_content_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        terms_of(tmp_path, text)
