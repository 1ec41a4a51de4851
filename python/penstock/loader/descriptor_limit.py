# SPDX-License-Identifier: Apache-2.0
"""Whether this process may open the descriptors that a connection takes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

_DESCRIPTORS_OF_A_CONNECTION = 4  # the TCP socket, and by which libzmq's threads wake each other


def check_can_connect() -> None:
    """Raises OSError where the limit on descriptors is reached, so that no worker can be connected
    to. ZeroMQ says nothing of it and tries for ever.
    """
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(_DESCRIPTORS_OF_A_CONNECTION):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise OSError(
                error.errno,
                f"DataLoader cannot connect to the pool's workers: this process may have {limit} "
                f"files open and a connection takes {_DESCRIPTORS_OF_A_CONNECTION}, for which "
                f"there is no room; raise the limit (ulimit -n), or close files",
            ) from error
