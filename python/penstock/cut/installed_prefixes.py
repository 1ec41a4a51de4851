# SPDX-License-Identifier: Apache-2.0
"""Manage the prefixes that a loader's workers run for one offloaded model.

They are installed, compiled, and withdrawn when their results are no longer used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, Protocol

import torch

from penstock.cut.live_cut import GraphCall, KnownIds, LiveCut
from penstock.cut.prefix_compiler import CompileJob
from penstock.graph.link import Library, LibraryLeaves
from penstock.graph.lowering import leaves_of
from penstock.graph.planning import PlannedCut
from penstock.loader.loader_run import LoaderRun
from penstock.tracking.batch_origin import BatchHandle
from penstock.tracking.loader_use import LoaderUse

logger = logging.getLogger(__name__)

# Number of uses after which a cut is expected to remain in use.
CALLS_BEFORE_COMPILING = 32
CALLS_BETWEEN_CHECKS = 16
EXIT_S_MAX = 5.0

# A cut that was not used in this many calls, while batches carried all that it needs, is forgotten.
# If such calls recur, it is planned again, at most once in as many calls: planning runs operators.
UNUSED_CALLS_MAX = 64
FORGOTTEN_MAX = 2


class InstalledPrefixes:
    """The prefixes of one offloaded model. Confined to the training thread."""

    def __init__(self, user: int, host: Callable[[], LoaderRun | None], use: LoaderUse) -> None:
        """``user`` is the offloaded model's context id."""
        self.compiler: CompiledPrefixes | None = None  # set if prefixes are to be compiled
        self.known_ids: list[KnownIds] = []  # by cut that is in use
        self._user = user
        self._host = host
        self._use = use
        self._installed: set[str] = set()
        self._unused = UnusedCuts()

    def compile(self) -> None:
        """Compile prefixes from now on."""
        self.compiler = CompiledPrefixes(self._send)

    def add_graph(self, cuts: CutsOfGraph) -> None:
        """Note that a captured graph has cuts, which may become unused."""
        self._unused.add(cuts)

    def install(self, cut: PlannedCut) -> None:
        """Make workers run the prefix of a cut, if it has one."""
        if cut.prefix and cut.prefix not in self._installed:
            self._installed.add(cut.prefix)
            if self._use.take_prefix(self._user, cut.prefix):
                self._send(cut)

    def _send(self, cut: PlannedCut) -> None:
        """Send workers a prefix, or the compiled library of a prefix that they have."""
        host = self._host()
        if host is not None and cut.prefix in self._installed:
            library = Library() if self.compiler is None else self.compiler.library_of(cut.prefix)
            host.install_prefix(cut.prefix, list(cut.prefix_constants), cut.seed, library)

    def withdraw(self, cut: PlannedCut) -> None:
        """Note that a cut is no longer in use.

        The workers stop running its prefix, unless another cut in use has the same one.
        """
        self.known_ids[:] = [known for known in self.known_ids if known.planned is not cut]
        if all(known.planned.prefix != cut.prefix for known in self.known_ids):
            self._withdraw({cut.prefix})

    def note_call(self, batch: BatchHandle | None) -> None:
        """Withdraw prefixes whose results are unused; call after each call of the model."""
        if batch is not None and self._unused.end_call(batch.boundary.keys()):
            self._withdraw(self._unused.orphans(self._installed))

    def close(self) -> None:
        """Withdraw all prefixes, and stop a running compiler."""
        if self.compiler is not None:
            self.compiler.close()
        self.known_ids.clear()
        self._withdraw(self._installed)

    def _withdraw(self, prefixes: Set[str]) -> None:
        """Make the workers stop running the given prefixes, as far as they are installed."""
        host, given = self._host(), self._installed & prefixes
        if host is not None and given:
            unused = self._use.drop_prefixes(self._user, given)
            if unused:
                host.remove_prefixes(unused)
            self._installed -= given
            self.known_ids[:] = [
                known for known in self.known_ids if known.planned.prefix not in given
            ]


class CompiledPrefixes:
    """Compiles prefixes of one offloaded model with AOTInductor during training.

    Workers receive the libraries. Confined to the training thread.

    Each worker decides whether to use a library: it has to give the executor's bits, and to take
    less time. Training does not wait for the compiler, and a failure has no effect.
    """

    def __init__(self, install: Callable[[PlannedCut], None]) -> None:
        """`install` sends workers a prefix again, with its library."""
        self._install = install
        self._libraries: dict[str, Library] = {}  # by prefix; empty if there is none
        self._process: _Compilation | None = None
        self._call_count = 0

    def library_of(self, prefix: str) -> Library:
        return self._libraries.get(prefix, Library())

    def examine(self, cut: LiveCut, call: GraphCall) -> None:
        """Consider a cut for compilation; call for each call of a cut that is used."""
        if self._process is not None:
            self._call_count += 1
            if self._call_count % CALLS_BETWEEN_CHECKS == 0 and self._process.has_ended():
                self._take(self._process)
            return
        is_settled = cut.priced is None or not cut.priced.wants_timed_calls
        is_new = cut.planned.prefix not in self._libraries
        if is_new and is_settled and cut.used_count >= CALLS_BEFORE_COMPILING:
            self._libraries[cut.planned.prefix] = Library()
            self._begin(cut, call)

    def close(self) -> None:
        """Stop a running compiler."""
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
        logger.info(
            "penstock: a prefix was compiled; workers use it if it gives the same bits faster"
        )
        self._libraries[compilation.planned.prefix] = Library(code, compilation.leaves)
        self._install(compilation.planned)


def _job_for(cut: LiveCut, call: GraphCall) -> tuple[CompileJob, LibraryLeaves]:
    """Return the job to compile for calls like `call`.

    Raises ValueError, with the reason, if the job depends on the process that trains.
    """
    planned, lowering = cut.planned, cut.lowering
    assert planned.reference is not None
    if cut.drawn is not None:
        raise ValueError("it draws random numbers")
    if "declared::" in planned.prefix:
        raise ValueError("it has a custom operator of the program")
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
    """A compiler in a separate process, which communicates through unnamed files."""

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
                start_new_session=True,  # together with the compilers that it starts
            )
        self.end = weakref.finalize(self, _end, self._process)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> tuple[bytes, str]:
        """Return the library, and the reason if there is none."""
        with self._library, self._messages:
            self._messages.seek(0)
            output = self._messages.read().decode(errors="replace").strip()
            if self._process.returncode != 0:
                status = f"the compiler exited with code {self._process.returncode}"
                return b"", output.rpartition("\n")[2] or status
            self._library.seek(0)
            return self._library.read(), "the compiler produced no library"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a compiler and the processes that it has started, and wait for it."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(EXIT_S_MAX)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class CutsOfGraph(Protocol):
    """The cuts in use of one captured graph, which owns them: they are freed together."""

    @property
    def cuts(self) -> Sequence[LiveCut]: ...

    def forget_unused(self, cut: LiveCut) -> None:
        """Stop using a cut, and withdraw its prefix."""


class UnusedCuts:
    """Finds the unused cuts of one offloaded model. Confined to the training thread.

    A program may leave captured graphs behind: a changed number made Dynamo capture another graph,
    or a pattern of calls does not recur. Their prefixes would run for every batch that fits them.
    """

    def __init__(self) -> None:
        self._of_graphs: weakref.WeakSet[CutsOfGraph] = weakref.WeakSet()
        self._call_count = 0

    def add(self, cuts: CutsOfGraph) -> None:
        self._of_graphs.add(cuts)

    def end_call(self, shipped: Set[str]) -> bool:
        """Count a call; call after each call of the model.

        The batch carried the boundary tensors `shipped`, by key. Return whether the unused cuts
        were checked after this call.
        """
        self._call_count += 1
        if self._call_count < UNUSED_CALLS_MAX:
            return False
        self._call_count = 0
        cuts = [
            (owner, cut)
            for owner in list(self._of_graphs)
            for cut in owner.cuts
            if cut.suffix is not None
        ]
        wanted = {key for _, cut in cuts if cut.is_used for key in _keys(cut)}
        for owner, cut in cuts:
            if not cut.is_used and shipped & _keys(cut) - wanted:
                owner.forget_unused(cut)
            cut.is_used = False
        return True

    def orphans(self, installed: Iterable[str]) -> set[str]:
        """Return the prefixes of graphs that were freed, as after `torch._dynamo.reset()`."""
        owned = {cut.planned.prefix for owner in list(self._of_graphs) for cut in owner.cuts}
        return set(installed) - owned


def _keys(cut: LiveCut) -> set[str]:
    return set(cut.keys)
