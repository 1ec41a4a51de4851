# SPDX-License-Identifier: Apache-2.0
"""Has prefixes compiled by AOTInductor beside the training, and gives workers the libraries.

Whether it is used is for each worker to find out: it has to give the executor's bits, and to take
less time. Nothing waits for the compiler, and nothing is lost where it fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from penstock.cut.live_cut import GraphCall, LiveCut
from penstock.cut.prefix_compiler import CompileJob
from penstock.graph.compiled_library import Library, LibraryLeaves
from penstock.graph.planning import PlannedCut
from penstock.graph.prefix_inputs import leaves_of

logger = logging.getLogger(__name__)

# A cut that was used so often will be used on.
CALLS_BEFORE_COMPILING = 32
CALLS_BETWEEN_LOOKS = 16
EXIT_S_MAX = 5.0


class CompiledPrefixes:
    """The compiled prefixes of one offloaded model. Confined to the training thread."""

    def __init__(self, install: Callable[[PlannedCut], None]) -> None:
        """`install` gives workers a prefix anew, with its library."""
        self._install = install
        self._libraries: dict[str, Library] = {}  # by prefix; empty where there is none
        self._process: _Compilation | None = None
        self._call_count = 0

    def library_of(self, prefix: str) -> Library:
        return self._libraries.get(prefix, Library())

    def look_at(self, cut: LiveCut, call: GraphCall) -> None:
        """To be called for each call of a cut that is used."""
        if self._process is not None:
            self._call_count += 1
            if self._call_count % CALLS_BETWEEN_LOOKS == 0 and self._process.has_ended():
                self._take(self._process)
            return
        is_settled = cut.priced is None or not cut.priced.wants_timed_calls
        is_new = cut.planned.prefix not in self._libraries
        if is_new and is_settled and cut.used_count >= CALLS_BEFORE_COMPILING:
            self._libraries[cut.planned.prefix] = Library()
            self._begin(cut, call)

    def close(self) -> None:
        """Ends a compiler that is at work."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _begin(self, cut: LiveCut, call: GraphCall) -> None:
        try:
            job, leaves = _job_for(cut, call)
            self._process = _Compilation(cut.planned, job, leaves)
        except Exception as error:
            logger.debug("a prefix cannot be compiled", exc_info=True)
            logger.info("penstock: a prefix is not compiled: %s", error)

    def _take(self, compilation: _Compilation) -> None:
        self._process = None
        code, reason = compilation.result()
        if not code:
            logger.info("penstock: a prefix is not compiled: %s", reason)
            return
        logger.info("penstock: a prefix was compiled; workers use it where it is as good")
        self._libraries[compilation.planned.prefix] = Library(code, compilation.leaves)
        self._install(compilation.planned)


def _job_for(cut: LiveCut, call: GraphCall) -> tuple[CompileJob, LibraryLeaves]:
    """The job to compile for calls like `call`. Raises ValueError with the reason where that
    cannot be said without the process that trains."""
    planned, lowering = cut.planned, cut.lowering
    assert planned.reference is not None
    if cut.drawn is not None:
        raise ValueError("it draws random numbers")
    if "declared::" in planned.prefix:
        raise ValueError("it has an operator of the program's own")
    placeholders = [node for node in planned.reference.graph.nodes if node.op == "placeholder"]
    inputs: list[Any] = []
    job_leaves: list[tuple[int, torch.Tensor]] = []
    library_leaves: list[tuple[int, torch.Tensor]] = []
    leaves = leaves_of(lowering, call.inputs, call.handle.leaf_count)
    for index, (node, item, value) in enumerate(
        zip(placeholders, lowering.inputs, call.inputs, strict=True)
    ):
        inputs.append(None)
        if not node.users:
            continue
        if item.kind == "leaf":
            leaf = leaves[item.leaf_index]
            shape = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            job_leaves.append((index, shape))
            library_leaves.append((item.leaf_index, shape))
        elif item.kind == "state" or type(value) not in (torch.Tensor, int, float, bool):
            raise ValueError(f"it reads {item.label}, a {type(value).__name__}")
        else:
            inputs[index] = value
    return CompileJob(planned.reference, inputs, job_leaves), library_leaves


class _Compilation:
    """A compiler at work in a process of its own, through files without a name."""

    def __init__(self, planned: PlannedCut, job: CompileJob, leaves: LibraryLeaves) -> None:
        self.planned, self.leaves = planned, leaves
        self._library, self._messages = (
            os.fdopen(os.memfd_create(name), "w+b")
            for name in ("penstock-library", "penstock-messages")
        )
        with os.fdopen(os.memfd_create("penstock-job"), "w+b") as jobs:
            torch.save(job, jobs)
            jobs.flush()
            jobs.seek(0)
            descriptors = (jobs.fileno(), self._library.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cut.prefix_compiler", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=self._messages,
                env=os.environ
                | {
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                },
                start_new_session=True,  # with the compilers that it starts
            )
        self.end = weakref.finalize(self, _end, self._process)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> tuple[bytes, str]:
        """The library, and if there is none the reason."""
        with self._library, self._messages:
            self._messages.seek(0)
            said = self._messages.read().decode(errors="replace").strip()
            if self._process.returncode != 0:
                status = f"the compiler ended with {self._process.returncode}"
                return b"", said.rpartition("\n")[2] or status
            self._library.seek(0)
            return self._library.read(), "the compiler gave nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a compiler, and the processes that it has started, and waits for it."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(EXIT_S_MAX)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
