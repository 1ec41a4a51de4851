# SPDX-License-Identifier: Apache-2.0
"""The file in which an operator sets priorities and quotas."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pool.terms import Terms, read_terms


def terms_of(tmp_path: Path, text: str) -> Terms:
    path = tmp_path / "terms.json"
    path.write_text(text)
    return read_terms(str(path))


def test_priorities_and_quotas_are_read_by_name(tmp_path: Path) -> None:
    text = """{"jobs": {"a.py": {"priority": 2}, "b.py": {"quota": 0}, "d": {}},
               "users": {"ann": {"priority": 0.5, "quota": 7}}}"""
    assert terms_of(tmp_path, text) == Terms(
        jobs={"a.py": (2.0, None), "b.py": (1.0, 0), "d": (1.0, None)}, users={"ann": (0.5, 7)}
    )
    assert terms_of(tmp_path, "{}") == Terms()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "terms.json are not valid JSON"),
        ("[]", "must be an object of jobs, users or both, such as .*, got a list"),
        ('{"a.py": {}}', r"an object of jobs, users or both, .*, got the keys \['a.py'\]"),
        ('{"users": 3}', "the users in .* must be an object, such as in .*, got a int"),
        (
            '{"jobs": {"a": 3}}',
            "terms of 'a' in .*terms.json must be an object of priority, quota or both, got 3",
        ),
        (
            '{"jobs": {"a": {"prio": 3}}}',
            "must be an object of priority, quota or both, got {'prio'",
        ),
        ('{"jobs": {"a": {"priority": 0}}}', "must have a priority above 0, got 0"),
        ('{"jobs": {"a": {"priority": NaN}}}', "must have a priority above 0, got nan"),
        ('{"jobs": {"a": {"priority": true}}}', "must have a priority above 0, got True"),
        ('{"jobs": {"a": {"quota": -1}}}', "must have a quota that is a number of workers, got -1"),
        ('{"jobs": {"a": {"quota": 1.5}}}', "that is a number of workers, got 1.5"),
        ('{"jobs": {"a": {"quota": 99999999999}}}', "that is a number of workers, got 99999999999"),
    ],
)
def test_invalid_terms_are_rejected(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        terms_of(tmp_path, text)
