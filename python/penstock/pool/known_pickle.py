# SPDX-License-Identifier: Apache-2.0
"""Avoid pickling a dataset again if it has not changed since the previous epoch.

A job is identified by the hash of its pickle. Pickling and hashing 20 GB takes a minute; inspecting
the same data takes seconds: see :mod:`penstock.worker.fingerprint`, which also explains what
an inspection cannot see: the content of files. Objects that it cannot prove to be unchanged are
pickled again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.worker.fetching import FetchSpec
from penstock.worker.fingerprint import Fingerprint, fingerprint

# An inspection may take this long, or as long as the pickling that it could have avoided.
_LOOK_S_MIN = 0.25


class KnownPickle:
    """The hash of the objects that were pickled last for the jobs of one loader. Confined to the
    trainer's thread."""

    def __init__(self) -> None:
        self._look: tuple[Any, Fingerprint] | None = None  # before they were pickled
        self._found: tuple[Any, set[str]] | None = None  # the hash, and the modules in the pickle
        self._allowed_s = _LOOK_S_MIN
        self._failed_s = 0.0  # an inspection with this time limit was inconclusive

    def recall(
        self, fetch: FetchSpec, init_fn: Callable[[int], None] | None
    ) -> tuple[Any, set[str]] | None:
        """Return a copy of the hash and the modules of the last pickle if these objects are known
        to be unchanged since then. Otherwise, the caller must pickle them and call :meth:`note`."""
        before, self._look = self._look, self._look_at(fetch, init_fn)
        if self._found is None or before is None or self._look != before:
            self._found = None
            return None
        found, modules = self._found
        return found.copy(), modules

    def note(self, found: Any, modules: set[str], pickling_s: float) -> None:
        """Record the hash of the pickled objects that were last passed to :meth:`recall`."""
        self._found = (found.copy(), modules)
        self._allowed_s = max(_LOOK_S_MIN, pickling_s)

    def _look_at(
        self, fetch: FetchSpec, init_fn: Callable[[int], None] | None
    ) -> tuple[Any, Fingerprint] | None:
        if self._allowed_s < 2 * self._failed_s:
            return None
        roots = (fetch.dataset, fetch.collate_fn, init_fn)
        found = fingerprint(*roots, cost_s_max=self._allowed_s)
        self._failed_s = self._allowed_s if found is None else 0.0
        if found is None:
            return None
        options = (fetch.dataset_kind, fetch.auto_collation, fetch.drop_last, fetch.fetch_threads)
        return (*options, fetch.shards), found
