# SPDX-License-Identifier: Apache-2.0
"""The user's own modules that travel with the jobs of one loader."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock.job_code import PackedCode, pack_code


class TravellingCode:
    """Packs modules once, when the loader first sends a job.

    Later epochs use the files as they were then, as the trainer goes on with the modules that it
    has imported: to edit a file while training runs changes neither, and makes no new job.
    """

    def __init__(self) -> None:
        self._paths: list[str] | None = None
        self._packed: list[PackedCode] = []

    def packed(self, code_paths: Sequence[str | os.PathLike[str]]) -> list[PackedCode]:
        """Packs anew if ``code_paths`` were assigned since. Raises what pack_code raises."""
        paths = [os.path.realpath(path) for path in code_paths]
        if paths != self._paths:
            self._packed = pack_code(code_paths)
            self._paths = paths
        return self._packed
