# SPDX-License-Identifier: Apache-2.0
"""A scenario in progress: a separate pool, streams one after the other, faults, and the tally."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from faults import crash, kill
from leftovers import ENDING_SECONDS_MAX, left_behind
from outcomes import Outcome
from pool_processes import PoolProcesses, Process, Worker
from process_traces import SHARED_MEMORY, is_running, wait_gone
from streams import KINDS, Differences, Stream, compare, stalls
from trainers import Trainer
from worker_processes import servers

CLEAR_ERROR_S = 10.0  # from the fault, or from the last batch after it
SETTLED_S = 2.0  # after which a worker that has started makes batches
LINES_SHOWN = 25
# How the process that started a worker reports the worker's death by its own fault.
CRASH_LINE = re.compile("SIG(BUS|SEGV|ABRT|ILL|FPE)")
# The same for a job's process, reported by its server, which may be the trial's doing.
JOB_CRASH_LINE = re.compile(r"a job process of trainer \w+ was ended by SIGSEGV")
CRASHES = {signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
# A scenario gives up when streams end and no fault was possible.
STREAMS_WITHOUT_FAULT_MAX = 4


def count_reported_crashes(lines: Sequence[str]) -> tuple[int, int]:
    """The number of lines that report a process ended by its own fault: job processes by SIGSEGV,
    and all others."""
    jobs = sum(JOB_CRASH_LINE.search(line) is not None for line in lines)
    return jobs, sum(CRASH_LINE.search(line) is not None for line in lines) - jobs


class Trial:
    def __init__(
        self,
        scenario: str,
        folder: Path,
        *,
        seed: int,
        fault_count: int,
        stream_options: Mapping[str, Any] | None = None,
        worker_counts: Sequence[int] = (),
    ) -> None:
        """``worker_counts`` are the numbers of workers of each supervisor, if a scenario sets
        them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.outcome = Outcome(scenario, seed)
        self.rng = random.Random(f"{scenario} {seed}")
        self.fault_count = fault_count
        self.stream_options = dict(stream_options or {})
        self.worker_counts = tuple(worker_counts)
        self.pool = PoolProcesses(folder)
        self.controller: Process  # the scenario's to set, where it does something to it
        self.workers: list[Worker] = []  # each a supervisor, with one worker or several
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.pool.environment["TMPDIR"] = str(self.temporary)
        self._shared_before = set(os.listdir(SHARED_MEMORY))
        self._began_at = time.monotonic()
        self._killed: set[int] = set()
        self._crash_count = 0  # of processes of jobs, which the trial has crashed
        self._trainer_count = 0
        self._fault_times: list[float] = []
        self._listening_since: dict[int, float] = {}

    # ---- Faults

    @property
    def wants_more(self) -> bool:
        return self.outcome.fault_count < self.fault_count

    def fault(self, what: str) -> None:
        """To be called right before the fault."""
        self.outcome.fault_count += 1
        self._fault_times.append(time.monotonic())
        print(f"  {self.outcome.scenario}: {self.outcome.fault_count}. {what}", flush=True)

    def kill(self, *pids: int) -> None:
        """With SIGKILL, which cannot be caught."""
        self._killed.update(pids)
        kill(pids)

    def end_job(self, server: int, job: int, number: signal.Signals) -> None:
        """With SIGKILL or SIGSEGV. Its server, which has to make batches with another one, counts
        as newly started."""
        self._listening_since[server] = time.monotonic()
        if number == signal.SIGSEGV:
            self._crash_count += 1
            crash(job)
        else:
            self.kill(job)
        self.expect_end(job)

    def end_warm(self, server: int, warm: int) -> None:
        """Its server can fork no more processes, so that it has to end, too."""
        self.kill(warm)
        self.expect_end(server)

    def expect_end(self, pid: int) -> None:
        """Of a process that was the target of the fault, or that depends on such a process."""
        self._killed.add(pid)
        if wait_gone([pid], ENDING_SECONDS_MAX):
            self.report_failure(f"process {pid} was to end and has not")

    def expect_servers(self) -> None:
        """Each server is there, as far as its worker is, except those ended by a fault."""
        for worker in self.pool.processes:
            if not isinstance(worker, Worker) or worker.process.poll() is not None:
                continue
            for _, _, pid in worker.served(0):
                if pid not in self._killed and not is_running(pid):
                    self.report_failure(
                        f"worker process {pid} has ended, which nothing was done to"
                    )

    # ---- Workers

    def start_workers(self, counts: Sequence[int]) -> None:
        """In place of the earlier ones: a supervisor with this many workers, for each count."""
        self.workers = [self.pool.start_worker(processes=count) for count in counts]
        self.settled()  # the time counts from here on

    def listening(self) -> dict[int, int]:
        """The servers that listen now, and how many workers each has."""
        running = {pid for worker in self.workers for pid in servers(worker.process.pid)}
        told = (pid for worker in self.workers for _, _, pid in worker.served(0))
        return Counter(pid for pid in told if pid in running)

    def settled(self) -> dict[int, int]:
        """The workers among them that can be relied on to make batches now."""
        now = time.monotonic()
        found = self.listening()
        for pid in found:
            self._listening_since.setdefault(pid, now)
        return {
            pid: count
            for pid, count in found.items()
            if now - self._listening_since[pid] >= SETTLED_S
        }

    @property
    def are_all_settled(self) -> bool:
        return sum(self.settled().values()) == sum(self.worker_counts)

    # ---- Streams

    def streams(self, **options: Any) -> Iterator[Stream]:
        """Another one until there were enough faults."""
        idle_count = 0
        for number in range(10**6):
            if not self.wants_more:
                return
            before = self.outcome.fault_count
            kind = KINDS[number % len(KINDS)]
            stream_options = {**options, **self.stream_options}
            yield Stream(kind, self.rng.randrange(2**31), **stream_options)
            idle_count = 0 if self.outcome.fault_count > before else idle_count + 1
            if idle_count == STREAMS_WITHOUT_FAULT_MAX:
                return self.report_failure(
                    f"{idle_count} streams were over before anything was done"
                )

    @contextlib.contextmanager
    def training(
        self,
        stream: Stream,
        *,
        within: Sequence[str] = (),
        may_fail: bool = False,
        waits_for_a_batch: bool = True,
        **options: Any,
    ) -> Iterator[Trainer]:
        """A trainer that has delivered a batch, followed to its end, when it is judged."""
        trainer = self.start_trainer(stream, within=within, **options)
        first_fault = len(self._fault_times)
        try:
            if waits_for_a_batch:
                trainer.wait_for_batches(1)
            yield trainer
            code = trainer.finish()
            self.check_delivery([trainer], stream, code, may_fail=may_fail)
        finally:
            trainer.close()
        found = stalls(trainer.deliveries, self._fault_times[first_fault:], stream.handover_s)
        said = ", ".join(f"{stall:.2f}" for stall in found) or "none"
        print(f"  {self.outcome.scenario}: a stream of {stream.kind}; stalls: {said}", flush=True)
        self.outcome.stalls += found

    def start_trainer(
        self,
        stream: Stream,
        *,
        within: Sequence[str] = (),
        resumes: Trainer | None = None,
        **options: Any,
    ) -> Trainer:
        """``resumes`` has been killed; the new one resumes from the state that it saved."""
        self._trainer_count += resumes is None
        options = {"pool": self.pool.endpoint, **options}
        return Trainer(
            stream,
            {name: value for name, value in options.items() if value is not None},
            self.folder / f"trainer {self._trainer_count}",
            self.pool.environment,
            within=within,
            is_resumed=resumes is not None,
        )

    def check_delivery(
        self,
        trainers: Sequence[Trainer],
        stream: Stream,
        code: int | None,
        *,
        may_fail: bool = False,
    ) -> None:
        """The batches that the trainers delivered; each resumed from the state saved by the one
        before it."""
        expected = stream.expected()
        last = trainers[-1]
        found: list[str] = []
        for trainer in trainers:
            first = trainer.first_place or 0
            if trainer.first_place is None:
                continue  # it was killed before it had a loader
            # Batches that its predecessor delivered after it had saved are delivered again, and the
            # same.
            for place, digest in enumerate(found[first:], first):
                if place < len(expected) and digest != expected[place]:
                    self.outcome.differences += Differences(different=1)
            found = found[:first] + trainer.digests
        self.outcome.batch_count += len(found)
        if code == 0 and last.is_complete:
            self._add(compare(expected, found), stream)
            return
        self._add(compare(expected[: len(found)], found), stream)
        ending = f"{stream.kind}: the trainer ended with {code} after {len(found)} batches"
        lines = last.said.strip().splitlines()
        if code is None:
            self.report_failure(f"{ending}: it hung\n{last.said[-4000:]}")
        elif code != 1 or not may_fail:
            self.report_failure(f"{ending}\n{last.said[-4000:]}")
        else:
            assert last.ended_at is not None
            known = [last.began_at, *self._fault_times[-1:]]
            known += [one.at for one in last.deliveries[-1:]]
            took_s = last.ended_at - max(known)
            if took_s > CLEAR_ERROR_S:
                self.report_failure(
                    f"{ending}, {took_s:.1f} s after the fault\n{last.said[-4000:]}"
                )
            self.outcome.errors.append(lines[-1] if lines else "(nothing)")
            print(f"  {self.outcome.scenario}: the stream ended by: {lines[-1:]}", flush=True)

    def _add(self, differences: Differences, stream: Stream) -> None:
        self.outcome.differences += differences
        if differences:
            self.report_failure(f"{stream}: {differences}")

    # ---- The end

    def report_failure(self, what: str) -> None:
        self.outcome.failures.append(what)
        print(f"  {self.outcome.scenario}: WRONG: {what}", flush=True)
        for process in self.pool.processes:
            print(f"  --- {process.process.args}", *process.lines[-LINES_SHOWN:], sep="\n    ")

    def end_processes(self, first: int) -> None:
        """Workers of the pool, from the one with that number on: as users do, with SIGTERM."""
        ended = self.pool.processes[first:]
        for process in reversed(ended):
            try:
                code = process.end()
            except subprocess.TimeoutExpired:
                self.report_failure(f"does not end by SIGTERM: {process.process.args}")
                process.end(signal.SIGKILL)
                continue
            job_count, other_count = count_reported_crashes(process.lines)
            self._crash_count -= job_count
            if -code in CRASHES or other_count or self._crash_count < 0:
                self.report_failure(f"crashed: {process.process.args}, exit code {code}")
        for process in ended:
            if process.process.stdout is not None:
                process.process.stdout.close()
        del self.pool.processes[first:]

    def close(self) -> None:
        """Ends the pool, and looks for leftovers."""
        self.end_processes(0)
        runtime = Path(self.pool.environment["XDG_RUNTIME_DIR"])
        for left in left_behind(runtime, self.temporary, self._killed, self._shared_before):
            self.outcome.failures.append(f"left behind: {left}")
        self.outcome.seconds = time.monotonic() - self._began_at
