# SPDX-License-Identifier: Apache-2.0
"""Recognise environment variables that look like secrets by their names. Their values are not in
reports, and are not sent to other machines automatically."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|BEARER|JWT|COOKIE|SESSION|DSN", re.IGNORECASE
)
_WORKING_FOLDERS = ("PWD", "OLDPWD")


def looks_secret(name: str) -> bool:
    return name not in _WORKING_FOLDERS and _SECRET.search(name) is not None
