# SPDX-License-Identifier: Apache-2.0
"""How many files the processes that serve a pool may have open: as many as the system allows."""

from __future__ import annotations

# Below it, few connections fit beside a dataset's files. The same as _pool.DESCRIPTOR_LIMIT_LEAST,
# for `penstock env`, which does without native parts.
LEAST = 4096


def raise_descriptor_limit() -> list[str]:
    """Raise this process's soft limit to its hard one, at most to 2**20.

    Returns the lines for its log: that the limit has changed, and that it is too low all the same.
    For processes of penstock's own that serve; a program that trains keeps what it was given.
    """
    from penstock import _pool

    return _pool.raise_descriptor_limit()
