# SPDX-License-Identifier: Apache-2.0
"""The temporary folder that a worker process of a pool extracts the modules of jobs in.

It belongs to the process that started the worker, since one that is killed takes nothing away. What
a killed starter has left is taken away by the next one of the same user.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path


class CodeFolder:
    """Is there from construction until :meth:`remove`; mode 0700."""

    def __init__(self) -> None:
        _remove_orphans()
        self.path = tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _prefix() -> str:
    return f"penstock-code-{os.getuid()}-"


def _remove_orphans() -> None:
    pattern = re.compile(rf"{_prefix()}(\d+)-")
    for path in Path(tempfile.gettempdir()).glob(f"{_prefix()}*"):
        match = pattern.match(path.name)
        if match is not None and not _is_alive(int(match[1])):
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid():
                    shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
