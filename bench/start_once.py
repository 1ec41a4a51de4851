# SPDX-License-Identifier: Apache-2.0
"""Starts a command once and prints, as JSON, how long that took, its peak of resident memory in
bytes, and its exit code. bench/start.py starts this with `python -I -S`.

    start_once.py READY COMMAND [ARGUMENT ...]

A command has started when it has ended or, with a READY that is not "", when it has printed a line
with READY in it; then it is ended by SIGTERM.

This is a separate process, with only the imports of a bare Python, since a process inherits a peak:
it includes its memory before it became another program.
"""

import os
import signal
import sys
import time


def main() -> None:
    ready, *command = sys.argv[1:]
    read_end, write_end = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write_end, 1), (os.POSIX_SPAWN_CLOSE, read_end)]
    begin = time.perf_counter()
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
    os.close(write_end)
    with open(read_end) as output:
        for line in output:
            if ready and ready in line:
                seconds = time.perf_counter() - begin
                peak_kb = own_peak_kb(pid)
                os.kill(pid, signal.SIGTERM)
                break
        _, status, usage = os.wait4(pid, 0)
    if not ready:
        seconds = time.perf_counter() - begin
        peak_kb = usage.ru_maxrss
    code = os.waitstatus_to_exitcode(status)
    print(f'{{"seconds": {seconds}, "peak_rss_bytes": {peak_kb * 1024}, "code": {code}}}')


def own_peak_kb(pid: int) -> int:
    """The figures of a living process. After its end they would include its children as well."""
    with open(f"/proc/{pid}/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
