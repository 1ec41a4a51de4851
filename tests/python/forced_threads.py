# SPDX-License-Identifier: Apache-2.0
"""A choice of fetch_threads="auto" for tests that must not depend on the load of the machine."""

from __future__ import annotations

import pytest

from penstock.tuning.thread_choice import ThreadChoice
from penstock.worker import automatic_threads


class FourThreads(ThreadChoice):
    """Four threads from the first batch on."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.threads = 4
        self._unmeasured = 99

    def is_measured(self) -> bool:
        return False


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic_threads, "ThreadChoice", FourThreads)
