# SPDX-License-Identifier: Apache-2.0
"""The state of a loader's iterations: iterators, the place in the stream, plans, meters.

The options are in `options.py`. Neither record holds the loader, whose deletion ends the workers.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader

from penstock import _C
from penstock.compat.iterators import BaseIterator
from penstock.graph.link import Link
from penstock.loader.client_cache import ClientCache
from penstock.loader.commit_ledger import CommitLedger, commit_after_steps
from penstock.loader.options import LoaderOptions
from penstock.loader.pickle_watch import PickleWatch
from penstock.loader.rank_states import opened
from penstock.loader.skipped_samples import EpochSkips, SkippedSamples
from penstock.loader.source import Source, with_workers_apart
from penstock.loader.step_times import WorkTimes
from penstock.pool.job_pickle import PickleCache
from penstock.pool.travelling_code import CodePacker
from penstock.ranks.replica_group import ReplicaGroup
from penstock.ranks.resizing import ResizePast
from penstock.ranks.steps import StepAgreement
from penstock.stream.batch_seeds import DrawWarning
from penstock.stream.places import places_from_json
from penstock.stream.progress import GeneratorHolder, GeneratorSnapshot, Progress, sampler_states
from penstock.stream.shard_state import ResumedDataset
from penstock.tracking.batch_origin import ProvenanceTable
from penstock.tuning.load_meter import LoadMeter
from penstock.tuning.worker_tuner import WorkerTuner

if TYPE_CHECKING:
    from penstock.graph.link import Library
    from penstock.graph.plan import Plan
    from penstock.loader.visit_log import VisitLog

_NEVER = 1 << 62
_LISTED_MAX = 5  # steps in a message
# The fields that a pickle or a copy of a loader has; the others belong to this process.
_COPIED = (
    "epoch_count",
    "begun_count",
    "loaded_state",
    "are_ranks_compared",
    "draw_warning",
    "pickle_watch",
    "iterator_kind",
    "fallback_reason",
    "iter_count",
    "iter_s",
    "past_counters",
    "work_times",
    "is_known_sendable",
    "are_batches_sent",
)


class WorkerIterator(Protocol):
    """Iterator over workers, as its loader uses it."""

    source: Source
    _shutdown: bool

    def counters(self) -> dict[str, Any]: ...

    def add_work(self, work: WorkTimes) -> None: ...


class LoaderRun:
    """State of one loader's iterations. Confined to the trainer's thread."""

    def __init__(self, wants_states: bool = False) -> None:
        """With ``wants_states`` keep the data of states from the start."""
        # Iterators.
        self.newest_iterator: weakref.ref[BaseIterator] | None = None
        self.live_iterators: weakref.WeakSet[WorkerIterator] = weakref.WeakSet()
        self.returned_iterators: weakref.WeakSet[BaseIterator] = weakref.WeakSet()  # by iter()
        self.iterator_kind: str | None = None
        self.fallback_reason: str | None = None
        # The place in the stream.
        self.epoch_count = 0
        self.begun_count = 0  # epochs that an iterator was made or reset for
        self.progress: Progress | None = None  # of the last iter()
        self.loaded_state: dict[str, Any] | None = None  # the next iter() continues from it
        self.resuming: Progress | None = None  # while that makes an iterator
        self.begun_order: Iterator[Any] | None = None  # the next iterator continues it
        self.resumed_datasets: dict[int, ResumedDataset] = {}  # in this process
        self.commits: CommitLedger | None = None  # once there may be some
        self.visits: VisitLog | None = None  # while they are recorded
        self.repeated: list[Any] | None = None  # its batches, while an earlier epoch is repeated
        self.wants_states = wants_states  # since a state was requested, or loaded
        self.data_version: tuple[Any, str | None] | None = None  # by epoch and dataset
        self.skipped = SkippedSamples()
        self.draw_warning = DrawWarning()
        self.pickle_watch = PickleWatch()
        # Ranks.
        self.are_ranks_compared = False  # since a state was loaded
        self.resize_folder: str | None = None  # where its ranks agreed on their number last
        self.resize_past = ResizePast()
        self.step_agreement: StepAgreement | None = None  # once its ranks have agreed on steps
        self.replicas: ReplicaGroup | None = None  # once its ranks have met
        # Plans of offloaded models.
        self.provenance: ProvenanceTable | None = None
        self.plan: Plan | None = None
        self.plan_changes = 0  # how often other calls moved than before
        self.workers_apart: dict[str, str] = {}  # as PoolClient.workers_apart
        self.load_meter: LoadMeter | None = None  # while a plan is priced by its measurements
        self.prefixes: dict[str, bytes] = {}  # messages to the workers, by the prefix's text
        self.shipment: bytes | None = None  # the message that sets which leaves stay with them
        # Measurements.
        self.iter_count = 0  # calls of iter()
        self.iter_s = 0.0  # that they took
        self.past_counters: Counter[str] = Counter()
        self.work_times = WorkTimes()
        self.tuner = WorkerTuner()  # idle unless num_workers is "auto"
        # Pools.
        self.has_pool = False  # an address, in the last epoch
        self.client_cache = ClientCache()
        self.code_packer = CodePacker()
        self.pickle_cache = PickleCache()
        self.is_known_sendable = False  # of a dataset that the variable's pool may serve
        self.are_batches_sent = False  # by the workers of that pool

    def copied_fields(self) -> dict[str, Any]:
        """Return the fields of the run of a copy of the loader."""
        return {name: getattr(self, name) for name in _COPIED}

    def begin_progress(self, options: LoaderOptions) -> Progress:
        """Start an epoch's account. An iterator calls it before any draws for the epoch."""
        progress, self.resuming = self.resuming, None
        if progress is None:
            snapshot = GeneratorSnapshot.take(options)
            progress = Progress(self.epoch_count, snapshot, options.shard_count)
        if self.wants_states or options.shard_by_rank:
            progress.samplers_before = sampler_states(options)
        if self.wants_states or options.shard_by_rank:
            # A rank's state is its job's state, which a rank's place with its workers is not.
            progress.want_states(state_interval(options))
        self.has_pool = options.pool is not None
        progress.number = self.begun_count
        progress.skips = EpochSkips.of(options, self.skipped)
        ledger = self.ledger(options)
        if ledger is not None and progress.commits is None:
            progress.commits = ledger.begin_epoch(progress)
        if self.visits is not None:
            progress.visits = self.visits.begin_epoch(options, progress, self.loaded_state)
        self.begun_count += 1
        self.progress = progress
        return progress

    def ledger(self, options: LoaderOptions) -> CommitLedger | None:
        """Return the commits of the loader's batches; None if the program makes none."""
        if options.commit is None:
            return None
        if self.commits is None:
            self.commits = CommitLedger(options.title)
        if options.commit == "auto":
            commit_after_steps(self.commits)
        return self.commits

    def next_epoch(self) -> int:
        """Return the number of the epoch that starts, from 0."""
        self.epoch_count += 1
        return self.epoch_count - 1

    def want_states(self, options: LoaderOptions) -> None:
        """Keep and send the data of states from now on, not before."""
        self.wants_states = True
        if self.progress is not None:
            self.progress.want_states(state_interval(options))
        for iterator in list(self.live_iterators):
            if not iterator._shutdown:
                iterator.source.want_states(state_interval(options))

    def begin_at(self, state: dict[str, Any] | None) -> None:
        """Have the next ``iter()`` continue from ``state``; with None, start an epoch."""
        self.newest_iterator = None
        self.progress = None
        self.loaded_state = state
        self.are_ranks_compared = False

    def epoch_start(self) -> dict[str, Any]:
        """Return the start of the next epoch, for a comparison with other ranks."""
        return place_of({"epoch": self.epoch_count, **(self.loaded_state or {})})

    def note_iter(self, iterator: BaseIterator, loading_s: float) -> None:
        """Note that ``iter()`` returns ``iterator`` after ``loading_s``."""
        self.newest_iterator = weakref.ref(iterator)
        self.returned_iterators.add(iterator)
        self.iter_count += 1
        self.iter_s += loading_s

    @property
    def newest(self) -> BaseIterator | None:
        """Return the iterator of the last ``iter()``, if the program still has it."""
        return None if self.newest_iterator is None else self.newest_iterator()

    def totals(self) -> tuple[Counter[str], WorkTimes]:
        """Return the counters, and the times of workers and samples, of all iterators so far."""
        counters, work = Counter(self.past_counters), self.work_times.copy()
        for iterator in list(self.live_iterators):
            counters.update(iterator.counters())
            iterator.add_work(work)
        return counters, work

    def follow_copies(self, is_wanted: bool) -> None:
        """Track the batches' tensors until the program copies them to a device, or stop that."""
        if is_wanted and self.provenance is None:
            self.provenance = ProvenanceTable()
        if self.provenance is not None:
            self.provenance.placements.follows_leaves = is_wanted

    def install_prefix(
        self, prefix: str, constants: list[torch.Tensor], seed: int, library: Library
    ) -> None:
        """Have batches fetched from now on carry the results of ``prefix`` (IR text). Its random
        draws follow from ``seed`` and the batch's place in the stream. ``library`` is its compiled
        form, empty if there is none.
        """
        message = _C.encode_prefix(prefix, constants, seed, library.code, library.leaves)
        self.prefixes[prefix] = message
        for iterator in list(self.live_iterators):
            iterator.source.install_prefix(message)

    def remove_prefixes(self, prefixes: set[str]) -> None:
        """Remove the results of these prefixes from later batches; others stay in force."""
        for prefix in prefixes:
            self.prefixes.pop(prefix, None)
        for iterator in list(self.live_iterators):
            iterator.source.remove_prefixes()
            for message in self.prefixes.values():
                iterator.source.install_prefix(message)

    def show_plan(self, plan: Plan | None) -> None:
        """Set the plan in force, and report it to a pool."""
        before, self.plan = self.plan, plan
        if plan is not None and before is not None and plan.moved_calls != before.moved_calls:
            self.plan_changes += 1
        for iterator in list(self.live_iterators):
            iterator.source.show_plan(plan, self.plan_changes)

    def shown_plan(self) -> Plan | None:
        """Return the plan in force, with the workers that have other kernels."""
        for iterator in list(self.live_iterators):
            self.workers_apart.update(iterator.source.workers_apart)
        return with_workers_apart(self.plan, self.workers_apart)

    def set_shipment(self, message: bytes | None) -> None:
        """Have batches requested from now on sent without leaves that the trainer does not read.
        None: sent whole."""
        self.shipment = message
        for iterator in list(self.live_iterators):
            iterator.source.set_shipment(message)

    @property
    def link(self) -> Link | None:
        """Return the network link to a pool's workers. None with workers of this machine."""
        link: Link | None = getattr(self.newest, "link", None)
        return Link(1, 0.0, sends_whole=True) if link is None and self.has_pool else link


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Place in the stream before an iterator is made that may be given up again."""

    progress: Progress | None
    epoch_count: int
    loaded_state: dict[str, Any] | None
    generators: GeneratorSnapshot

    @staticmethod
    def take(run: LoaderRun, holder: GeneratorHolder) -> RunSnapshot:
        generators = GeneratorSnapshot.take(holder)
        return RunSnapshot(run.progress, run.epoch_count, run.loaded_state, generators)

    def restore(self, run: LoaderRun) -> None:
        """Restore the place. The generators are restored by the caller, as far as they may be."""
        run.progress = self.progress
        run.epoch_count = self.epoch_count
        run.loaded_state = self.loaded_state


def place_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the place in the stream that a loader's state has, for a comparison of ranks."""
    state = opened(dict(state))
    place = {
        "epoch": state["epoch"],
        "samples given before": state.get("samples", 0),
        "steps taken before": (state.get("shards") or {}).get("step", 0),
    }
    if state.get("commits") is not None or state.get("left") is not None:
        place["uncommitted steps"] = _format_uncommitted(state)
    return place


def _format_uncommitted(state: Mapping[str, Any]) -> str:
    """Return the steps that a state has to deliver again, oldest first: some, and a digest."""
    steps = [
        (epoch["epoch"], place)
        for epoch in (state.get("commits") or {"earlier": ()})["earlier"]
        for place, _, _ in epoch["batches"]
    ]
    left = state.get("left")
    if left is not None:
        number = (state.get("commits") or {}).get("epoch", state["epoch"])
        steps += [(number, place) for place in places_from_json(left["missing"])]
    if not steps:
        return "none"
    digest = hashlib.sha256(repr(steps).encode()).hexdigest()[:8]
    listed = ", ".join(map(str, steps[:_LISTED_MAX]))
    return f"{listed}{', ...' if len(steps) > _LISTED_MAX else ''} ({len(steps)}, SHA-256 {digest})"


def run_of(loader: DataLoader[Any]) -> LoaderRun:
    """Return the run of a `penstock.DataLoader`."""
    run: LoaderRun = loader._run  # type: ignore[attr-defined]
    return run


def innermost_loader(loader: Any) -> Any:
    """Return the loader that a framework's loader wraps, or `loader` itself.

    accelerate's `prepare()` keeps it as `base_dataloader`, Fabric's `setup_dataloaders()` as
    `_dataloader`. An attribute set on the wrapper does not reach the loader that is iterated.
    """
    # accelerate's wrapper is no DataLoader, despite its `__class__`.
    while not issubclass(type(loader), DataLoader):
        inner = getattr(loader, "base_dataloader", None) or getattr(loader, "_dataloader", None)
        if not isinstance(inner, DataLoader):
            break
        loader = inner
    return loader


def state_interval(options: LoaderOptions) -> int:
    """Return the number of steps between snapshots, once states are wanted."""
    if options.is_map and (not options.in_order or options.shard_by_rank):
        return 1  # a resume does not know which process made which batch
    return int(options.snapshot_every_n_steps) or _NEVER
