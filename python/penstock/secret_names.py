# SPDX-License-Identifier: Apache-2.0
"""Which environment variables look like secrets by their names. Their values stand in no report,
and go to no other machine by themselves."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|BEARER|JWT|COOKIE|SESSION|DSN", re.IGNORECASE
)
_WORKING_FOLDERS = ("PWD", "OLDPWD")


def looks_secret(name: str) -> bool:
    return name not in _WORKING_FOLDERS and _SECRET.search(name) is not None
