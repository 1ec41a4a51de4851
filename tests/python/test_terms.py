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
        ("{", "terms.json are no JSON"),
        ("[]", "are a list; expected an object of jobs, users or both, such as"),
        ('{"a.py": {}}', r"are the keys \['a.py'\]; expected an object of jobs, users or both"),
        ('{"users": 3}', "the users in .* are a int; expected an object, such as in"),
        (
            '{"jobs": {"a": 3}}',
            "terms of 'a' in .*terms.json are 3; expected an object of priority, quota",
        ),
        ('{"jobs": {"a": {"prio": 3}}}', "expected an object of priority, quota or both"),
        ('{"jobs": {"a": {"priority": 0}}}', "have the priority 0; expected a number above 0"),
        ('{"jobs": {"a": {"priority": NaN}}}', "have the priority nan"),
        ('{"jobs": {"a": {"priority": true}}}', "have the priority True"),
        ('{"jobs": {"a": {"quota": -1}}}', "have the quota -1; expected a whole number of workers"),
        ('{"jobs": {"a": {"quota": 1.5}}}', "have the quota 1.5"),
        ('{"jobs": {"a": {"quota": 99999999999}}}', "have the quota 99999999999"),
    ],
)
def test_other_content_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        terms_of(tmp_path, text)
