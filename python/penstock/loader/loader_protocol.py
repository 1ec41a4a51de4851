# SPDX-License-Identifier: Apache-2.0
"""The parts of a DataLoader that its iterators, its options and its state use.

These modules are imported by `dataloader.py`, so none of them can import the class itself.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from penstock.loader.client_cache import ClientCache
from penstock.loader.step_times import WorkTimes
from penstock.pool.job_pickle import PickleCache
from penstock.pool.travelling_code import CodePacker
from penstock.stream.batch_seeds import DrawWarning
from penstock.stream.progress import Progress
from penstock.stream.shard_state import ResumedDataset
from penstock.tracking.batch_origin import ProvenanceTable
from penstock.tuning.load_meter import LoadMeter
from penstock.tuning.worker_tuner import WorkerTuner

if TYPE_CHECKING:
    from penstock.graph.plan import Plan


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


class LoaderProtocol(Protocol):
    """`penstock.DataLoader`. Names that start with an underscore are for this package alone."""

    # Torch's options.
    dataset: Any
    batch_size: Any
    sampler: Any
    batch_sampler: Any
    num_workers: Any
    collate_fn: Any
    drop_last: Any
    timeout: Any
    worker_init_fn: Any
    multiprocessing_context: Any
    generator: Any
    prefetch_factor: Any
    persistent_workers: Any
    in_order: Any
    # torchdata's.
    snapshot_every_n_steps: Any
    # penstock's.
    device: Any
    seeding: Any
    shards: int | None
    prefetch_bytes: Any
    fetch_threads: Any
    on_error: Any
    max_skipped: Any
    overlap_epochs: Any
    pool: Any
    keys: Any
    code_paths: Any
    trust_workers: Any
    ranks: Any
    shard_by_rank: bool
    rank: Any
    world_size: Any
    global_batch_size: Any
    remainder: Any
    replica_group: tuple[int, ...] | None

    # Torch's, as passed to its iterators.
    _dataset_kind: Any

    @property
    def _auto_collation(self) -> Any: ...

    @property
    def _index_sampler(self) -> Any: ...

    _sharding_words: str
    _draw_warning: DrawWarning
    _epoch_count: int
    _fallback_reason: str | None
    _live_iterators: weakref.WeakSet[Any]
    _iterator: Any  # torch's, of persistent workers
    _load_meter: LoadMeter | None
    _loaded_state: dict[str, Any] | None
    _newest_iterator: weakref.ref[Any] | None
    _client_cache: ClientCache
    _pickle_cache: PickleCache
    _is_known_sendable: bool
    _are_batches_sent: bool
    _begun_order: Iterator[Any] | None
    _past_counters: Counter[str]
    _work_times: WorkTimes
    _replicas: Any  # a ReplicaGroup, or None
    _prefixes: dict[str, bytes]  # messages to the workers, by the prefix's text
    _plan: Plan | None
    _plan_changes: int
    _workers_apart: dict[str, str]  # as PoolClient.workers_apart
    _progress: Progress | None
    _shipment: bytes | None
    _skipped_samples: Any  # a SkippedSamples
    _step_agreement: Any  # a StepAgreement, or None
    _provenance: ProvenanceTable | None
    _resuming: Progress | None
    _resumed_datasets: dict[int, ResumedDataset]
    _code_packer: CodePacker
    _tuner: WorkerTuner
    _wants_states: bool

    def _begin_progress(self) -> Progress: ...

    def _make_state(self) -> dict[str, Any]: ...

    def _state_of_now(self, asks_workers: bool) -> dict[str, Any]: ...

    def _next_epoch(self) -> int: ...
