# SPDX-License-Identifier: Apache-2.0
"""Raise the number of files that a pool's processes may have open to the system's maximum."""

from __future__ import annotations

# Below this, few connections fit in addition to a dataset's files. The same as
# _pool.DESCRIPTOR_LIMIT_LEAST, for `penstock env`, which runs without native parts.
LEAST = 4096


def raise_descriptor_limit() -> list[str]:
    """Raise this process's soft limit to its hard limit, to at most 2**20.

    Return lines for the log: that the limit has changed, and that it is still too low. Call it only
    in penstock's server processes; a training program keeps the limit that it was given.
    """
    from penstock import _pool

    return _pool.raise_descriptor_limit()
