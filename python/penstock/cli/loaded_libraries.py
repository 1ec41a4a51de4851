# SPDX-License-Identifier: Apache-2.0
"""Run as a program, it loads penstock's native parts and tells which libraries they brought.

`penstock env` runs it in a process of its own, which a part that does not fit may end.
"""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path

# Libraries of the system's, or those that a wheel brings, with the function that tells the version.
_TELLERS = {"libsodium": "sodium_version_string", "libcrypto": "OpenSSL_version"}


def main() -> None:
    """Prints a line for the libraries, as JSON, before what may fail, and one at last."""
    from penstock import _pool

    print(json.dumps({"libraries": loaded_libraries(_pool.zmq_version())}), flush=True)
    from penstock import _C

    told = {"libraries": loaded_libraries(_pool.zmq_version()), "module": _C.__file__}
    print(json.dumps(told), flush=True)


def loaded_libraries(zmq_version: str) -> dict[str, list[str]]:
    """By name, a version and a file for each that this process has loaded: Python may have brought
    another one of the same name."""
    found: dict[str, list[str]] = {"libzmq": [], **{name: [] for name in _TELLERS}}
    for file in sorted(_loaded_files()):
        name = re.match(r"lib[a-z]+", Path(file).name)
        if name is not None and name[0] in found:
            told = zmq_version if name[0] == "libzmq" else _told_by(file, _TELLERS[name[0]])
            found[name[0]].append(f"{told} ({file})")
    return found


def _loaded_files() -> set[str]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return {fields[5] for line in maps.splitlines() if len(fields := line.split(None, 5)) == 6}


def _told_by(file: str, function: str) -> str:
    ask = getattr(ctypes.CDLL(file), function)
    ask.restype = ctypes.c_char_p
    answer: bytes = ask(0)
    return answer.decode()


if __name__ == "__main__":
    main()
