# SPDX-License-Identifier: Apache-2.0
"""Seconds and bytes as people read them."""

from __future__ import annotations


def spoken_time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{1e3 * seconds:.3g} ms"
    return f"{1e6 * seconds:.3g} µs"


def spoken_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def spoken_share(share: float) -> str:
    return f"{100 * share:.0f} %"
