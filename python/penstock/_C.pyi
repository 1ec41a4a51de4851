# SPDX-License-Identifier: Apache-2.0
"""The Python interface of penstock's native part that works on tensors. A test compares it with the
module. _pool.pyi is the interface of the part that does not need torch."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar, Literal

import numpy as np
import torch

# worker

def tune_malloc() -> None: ...
def is_plain_tensor(object: object) -> bool: ...
def are_own(tensors: Sequence[torch.Tensor]) -> bool: ...

class PlainContent:
    def __init__(self, cost_s_max: float) -> None: ...
    def digest(self, value: object) -> bytes | None: ...
    def spend(self, cost_s: float) -> None: ...
    @property
    def is_opaque(self) -> bool: ...

def encode_prefix(
    text: str,
    constants: Sequence[torch.Tensor],
    seed: int,
    library: bytes = b"",
    library_leaves: Sequence[tuple[int, torch.Tensor]] = (),
) -> bytes: ...
def encode_value(value: object, name: str = "value") -> bytes: ...
def decode_value(data: bytes) -> Any: ...
def has_only_atoms(values: list[Any]) -> bool:
    """Return whether each value is a number, a str, bytes or None, of exactly these types."""

class WorkerRequest:
    @property
    def is_epoch(self) -> bool: ...
    @property
    def is_early_epoch(self) -> bool: ...
    @property
    def is_for_states(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_pickled(self) -> bool: ...
    @property
    def sequence(self) -> int: ...
    @property
    def first_place(self) -> int: ...
    @property
    def shard_id(self) -> int: ...
    def indices(self) -> Any: ...

class FetchClock:
    def __init__(self) -> None: ...
    def begin(self) -> None: ...
    def times(self) -> tuple[float, float, int]:
        """Return the seconds on samples since begin(), and the seconds and index of the slowest."""

class TimedSamples:
    def __init__(self, dataset: Any, clock: FetchClock) -> None: ...
    def __getitem__(self, index: Any) -> Any: ...

class TimedCollate:
    draws_nothing: bool
    def __init__(
        self, collate_fn: Callable[[Any], Any], clock: FetchClock, draws_nothing: bool
    ) -> None: ...
    def __call__(self, samples: Any) -> Any: ...

class SampleRows:
    """Moves tensors of samples into their rows of the batch as the samples are fetched."""
    def begin(self, sample_count: int) -> None: ...
    def fetch(self, dataset: Any, index: Any) -> Any: ...
    def end(self) -> bool: ...

class ReadAdvisor:
    """Has the kernel read files ahead."""

    def __init__(self, thread_count: int = 8) -> None: ...
    def advise(self, paths: Sequence[str]) -> None: ...
    @property
    def checked(self) -> int:
        """Files that were checked."""
    @property
    def cold(self) -> int:
        """Files that were not in memory."""

class WorkerServer:
    @staticmethod
    def open(
        *,
        channel_fd: int,
        prefetch_factor: int,
        arena_bytes: int,
        waits_for_slabs: bool,
        trainer_pid: int,
    ) -> WorkerServer:
        """Open the worker's end, taking ownership of ``channel_fd``."""
    def next(self, timeout_s: float) -> WorkerRequest | None: ...
    def upcoming(self) -> list[WorkerRequest]:
        """Return the requests for batches that have arrived, each once."""
    def begin(self) -> None: ...
    def fetch_clock(self) -> FetchClock: ...
    def answer(
        self,
        request: WorkerRequest,
        batch: object,
        raises: bool,
        threads_drew: bool,
        dataset_stays: bool,
        state: bytes | None,
        dumps: Callable[[object], tuple[bytes, list[torch.Tensor]]],
    ) -> None: ...
    def answer_end(self, request: WorkerRequest, state: bytes | None) -> None: ...
    def answer_states(self, request: WorkerRequest, states: bytes) -> None: ...
    def serve_rows(self, sources: Sequence[torch.Tensor]) -> WorkerRequest: ...
    def collate(self, samples: list[Any], default_collate: Callable[[Any], Any]) -> Any: ...
    def sample_rows(self) -> SampleRows: ...
    def new_bytes(self, bytes: int) -> torch.Tensor | None: ...

class PoolWork:
    @property
    def trainer_id(self) -> int: ...
    @property
    def tenancy(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def first_place(self) -> int: ...
    @property
    def is_recall(self) -> bool: ...
    @property
    def is_named(self) -> bool: ...
    @property
    def lane(self) -> int: ...
    @property
    def is_lane_start(self) -> bool: ...
    @property
    def is_pickled(self) -> bool: ...
    def indices(self) -> Any: ...
    @property
    def seeds(self) -> bytes: ...
    @property
    def state(self) -> bytes: ...
    @property
    def blobs(self) -> list[bytes]: ...

class PoolStanding:
    @property
    def trainer_id(self) -> int: ...
    @property
    def drain_cause(self) -> str | None: ...
    @property
    def left_count(self) -> int: ...

class BatchServer:
    def next(self, timeout_s: float) -> PoolWork | None: ...
    def take_notices(self) -> list[str]: ...
    @property
    def standing(self) -> PoolStanding: ...
    @property
    def is_wanted(self) -> bool: ...
    def blob(self, id: bytes, timeout_s: float) -> bytes | None: ...
    def has_prefix(self, id: bytes) -> bool: ...
    def add_prefix(self, id: bytes, message: bytes) -> None: ...
    def begin(self) -> None: ...
    def fetch_clock(self) -> FetchClock: ...
    def answer(
        self,
        work: PoolWork,
        batch: object,
        threads_drew: bool,
        state: bytes | None,
        dumps: Callable[[object], tuple[bytes, list[torch.Tensor]]] | None,
        sample_count: int,
        dataset_size: int | None,
        may_be_kept: bool = False,
        draws_nothing: bool = False,
    ) -> None:
        """Send a batch. ``dataset_size`` is for C++ trainers: -1 for an iterable dataset. A batch
        that may be kept is a function of the work; ``draws_nothing``: not of its seeds."""

    def answer_rows(
        self,
        work: PoolWork,
        sources: Sequence[torch.Tensor],
        dataset_size: int | None,
        may_be_kept: bool = False,
    ) -> bool: ...
    def answer_kept(self, work: PoolWork) -> bool:
        """Answer a recall if the batch is still available; return whether it was."""
    def answer_end(self, work: PoolWork) -> None: ...
    def answer_error(
        self, work: PoolWork, type_name: str, text: str, state: bytes | None
    ) -> None: ...
    def give_up(self) -> None: ...
    def decline(self, reason: str) -> None: ...
    def leave(self, reason: str) -> None: ...
    def drain(self) -> None: ...
    def collate(self, samples: list[Any], default_collate: Callable[[Any], Any]) -> Any: ...
    def sample_rows(self) -> SampleRows: ...
    def new_bytes(self, bytes: int) -> torch.Tensor | None: ...

class PoolServer(BatchServer):
    @staticmethod
    def start(
        *,
        bind: str,
        advertised: str | None,
        data_bind: str | None,
        data_advertised: str | None,
        controller: str | None,
        key_folder: str | None,
        about: str,
        name: str,
        arena_bytes: int,
        blob_bytes_max: int,
        patience_s: float,
        parent_pid: int,
        handover: str,
        powercap: str,
        exit_fd: int,
        grace_s: float,
    ) -> PoolServer: ...
    @property
    def worker_id(self) -> int: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def advertised(self) -> str: ...
    @property
    def data_endpoint(self) -> str: ...
    @property
    def data_advertised(self) -> str: ...
    @property
    def signal_fd(self) -> int: ...
    def close(self) -> None: ...

class JobServer(BatchServer):
    @staticmethod
    def open(fd: int, arena_bytes: int) -> JobServer:
        """Open the server, taking ownership of ``fd``."""

class JobOrder:
    @property
    def job(self) -> int: ...
    @property
    def fd(self) -> int:
        """A descriptor for the job's process; this process must close it after the fork."""
    @property
    def error_fd(self) -> int:
        """The same, for its standard error."""
    @property
    def log_name(self) -> str: ...

class JobEnd:
    @property
    def job(self) -> int: ...

class WarmChannel:
    @staticmethod
    def open(fd: int) -> WarmChannel:
        """Open the channel, taking ownership of ``fd``."""
    def ready(self, about: str) -> None: ...
    def next(self) -> JobOrder | JobEnd | None:
        """Return the next event; None when the server and all job processes have ended."""
    def started(self, job: int, pid: int) -> None:
        """Report that a job was started; ``pid`` is 0 if the fork failed."""
    def close_in_child(self) -> None: ...

# loader

def interrupt_when_dropped() -> object: ...
def set_batch_types(
    flatten: Callable[[Any, bool], tuple[str, tuple[Any, ...]] | None],
    make: Callable[[str, tuple[Any, ...], bool], Any],
) -> None: ...
def is_profiled() -> bool: ...
def in_profiler_range(name: str, call: Callable[[], Any]) -> Any: ...

class MeasuredWork:
    """Means over a stretch of an epoch with a fixed number of workers.

    Attributes:
        workers (int): Number of workers at work.
        wait_s (float): Seconds per batch that the trainer waited.
        trainer_s (float): Seconds per batch that the trainer worked.
        worker_s (float): Wall-clock seconds per batch that one worker worked.
        cpu_share (float | None): Share of ``worker_s`` on a CPU or waiting for one, from 0 to 1;
            None if unknown.
        trainer_cpus (float): CPUs used by the trainer's process, including while it waited.
        stalled_share (float): Share of the trainer's time that was waiting, from 0 to 1.
        idle_share (float): Share of the workers' time that was idle, from 0 to 1.
    """

    workers: int
    wait_s: float
    trainer_s: float
    worker_s: float
    cpu_share: float | None
    trainer_cpus: float
    stalled_share: float
    idle_share: float
    def __init__(
        self,
        workers: int,
        wait_s: float,
        trainer_s: float,
        worker_s: float,
        cpu_share: float | None,
        trainer_cpus: float,
    ) -> None: ...

class WorkerLimits:
    """Bounds set by the machine and the loader."""

    cpus: int
    waiting_workers: int
    shards: int | None
    first_workers: int
    def __init__(self, cpus: int, shards: int | None = None) -> None: ...

class Remainder:
    PAD: ClassVar[Remainder]
    DROP: ClassVar[Remainder]
    UNEVEN: ClassVar[Remainder]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class RankShareOptions:
    """The share of a rank in an epoch: csrc/sampling/rank_share.h."""

    def __init__(
        self,
        *,
        rank: int,
        rank_count: int,
        step_size: int,
        remainder: Remainder,
        first_step: int,
        first_sample: int,
        earlier: Sequence[tuple[int, int, int]],  # first step, its first sample, step size
    ) -> None: ...

class RankShare:
    def __init__(self, sample_count: int, options: RankShareOptions) -> None: ...
    @property
    def step_count(self) -> int: ...
    def first_place(self, step: int) -> int: ...
    def step_samples(self, step: int) -> tuple[int, list[int]]: ...
    def owned_samples(self, step: int, owners: Sequence[int]) -> list[int]: ...
    def samples(self, step: int) -> list[int]: ...
    def order_part(self, step: int) -> tuple[int, int]: ...  # the first place and the count
    def can_divide(self, first: int, count: int) -> bool: ...
    def samples_before(self, step: int) -> int: ...
    def runs_of(self, steps: Sequence[int]) -> list[tuple[int, int, int]]: ...
    @staticmethod
    def of_step(first: int, count: int, options: RankShareOptions) -> RankShare: ...

def owners_of(indices: Sequence[int], dataset_size: int, rank_count: int) -> list[int]: ...
def samples_evaluated_twice(sample_count: int) -> list[int]: ...
def samples_per_request(sample_count: int) -> int: ...

class MixtureSchedule:
    """The order in which the sources of a mixture are drawn: csrc/sampling/mixture_schedule.h."""

    WHOLE: ClassVar[int]
    @staticmethod
    def shares_of(weights: Sequence[float]) -> list[int]: ...
    @staticmethod
    def samples_until_end(shares: Sequence[int], lengths: Sequence[int]) -> int: ...
    def __init__(self, shares: Sequence[int], lags: Sequence[int]) -> None: ...
    def next(self) -> int: ...
    @property
    def shares(self) -> list[int]: ...
    @property
    def lags(self) -> list[int]: ...

class ChunkOrder:
    """The order of the samples of chunks in one epoch: csrc/sampling/chunk_order.h."""

    SAMPLES_MAX: ClassVar[int]
    RUN_MAX: ClassVar[int]
    def __init__(
        self,
        lengths: np.ndarray[Any, Any],
        *,
        open_max: int,
        reader_count: int,
        run_length: int,
        shuffle: bool,
        key: int,
    ) -> None: ...
    def next(self, count: int) -> np.ndarray[Any, Any]: ...
    def skip(self, count: int) -> None: ...
    @property
    def left_count(self) -> int: ...

class CostStep:
    def batch(self, rank: int) -> list[int]: ...
    @property
    def batch_sizes(self) -> list[int]: ...

class CostPacker:
    """Packs samples with different costs into batches: csrc/sampling/cost_packer.h."""

    def __init__(self, costs: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None: ...
    def next(self, budget: float, rank_count: int, batch_size_max: int) -> CostStep | None: ...
    @property
    def left_count(self) -> int: ...

class BeladyCache:
    """Keeps the keys that are read soonest: csrc/cache/belady_cache.h."""

    def __init__(self, capacity: int) -> None: ...
    def begin(self, keys: np.ndarray[Any, Any]) -> int: ...
    def foresee(self, keys: np.ndarray[Any, Any]) -> None: ...
    def read(
        self, keys: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any] | None
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]: ...
    def slots(self, keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...
    @property
    def foreseen_count(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def kept_size(self) -> int: ...
    @property
    def kept_count(self) -> int: ...
    @property
    def hit_count(self) -> int: ...
    @property
    def miss_count(self) -> int: ...

class StoreCount:
    HIT: ClassVar[StoreCount]
    HIT_BYTES: ClassVar[StoreCount]
    MISS: ClassVar[StoreCount]
    DISK_HIT: ClassVar[StoreCount]
    DISK_HIT_BYTES: ClassVar[StoreCount]
    DISK_ENTRY: ClassVar[StoreCount]
    DISK_ENTRY_BYTES: ClassVar[StoreCount]
    DISK_FULL: ClassVar[StoreCount]
    MADE: ClassVar[StoreCount]
    COMPARED: ClassVar[StoreCount]
    DAMAGED: ClassVar[StoreCount]
    UNCERTAIN: ClassVar[StoreCount]
    RANDOM_WARN: ClassVar[StoreCount]
    MEMORY_WARN: ClassVar[StoreCount]
    DISK_WARN: ClassVar[StoreCount]
    def __init__(self, value: int) -> None: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

_Bytes = bytes  # hidden in the class by its property
_Dumps = Callable[[Any], tuple[bytes, list[torch.Tensor]]]
_Loads = Callable[[bytes, list[torch.Tensor]], Any]

class StorableSample:
    """A sample as bytes that a cache keeps: csrc/worker/stored_sample.h."""

    def __init__(self, sample: Any, dumps: _Dumps) -> None: ...
    @property
    def bytes(self) -> int: ...
    def is_same(self, other: StorableSample) -> bool: ...
    def to_bytes(self, index: int, tag: int) -> _Bytes: ...

def load_sample(index: int, tag: int, data: bytes, loads: _Loads, missing: Any) -> Any:
    """Return ``missing`` if the bytes belong to another sample or are damaged."""

class SampleStore:
    """Samples in memory that processes share: csrc/shm/sample_store.h."""

    @staticmethod
    def create(*, sample_count: int, budget_bytes: int) -> SampleStore: ...
    @staticmethod
    def attach(fd: int) -> SampleStore: ...
    @property
    def fd(self) -> int: ...
    @property
    def sample_count(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    def has_room(self, index: int) -> bool: ...
    @property
    def is_exhausted(self) -> bool: ...
    @property
    def are_all_barred(self) -> bool: ...
    def get(self, index: int, tag: int, loads: _Loads, missing: Any) -> Any: ...
    def put(self, index: int, tag: int, sample: StorableSample) -> bool: ...
    def keep_only(self, first: int, end: int) -> None: ...
    def keeps(self, index: int) -> bool: ...
    def note_missed(self, index: int) -> None: ...
    def bar(self, index: int) -> None: ...
    def is_barred(self, index: int) -> bool: ...
    def bar_all(self) -> None: ...
    def contents(self) -> tuple[int, int, int]:
        """Return the number of samples, their bytes, and the number of barred samples."""

    def count(self, kind: StoreCount, number: int = 1) -> int: ...
    def counted(self, kind: StoreCount) -> int: ...

class PackerOptions:
    def __init__(self, *, row_length: int, bins_max: int, splits: bool) -> None: ...

class PackerCounts:
    documents: int
    empty_documents: int
    split_documents: int
    dropped_documents: int
    dropped_tokens: int
    rows: int
    row_tokens: int

    def __init__(self) -> None: ...

class Packer:
    """Packs documents into rows, lists of (document, first, length): csrc/sampling/packer.h."""

    def __init__(self, options: PackerOptions) -> None: ...
    @staticmethod
    def continuing(
        options: PackerOptions, bins: Sequence[Sequence[tuple[int, int, int]]], counts: PackerCounts
    ) -> Packer | None: ...
    def add(self, length: int) -> list[list[tuple[int, int, int]]]: ...
    def add_all(self, lengths: np.ndarray[Any, Any]) -> None: ...
    def flush(self) -> list[list[tuple[int, int, int]]]: ...
    @property
    def bins(self) -> list[list[tuple[int, int, int]]]: ...
    @property
    def counts(self) -> PackerCounts: ...

class WorkerChoice:
    """Number of workers chosen by ``num_workers="auto"``, and the measurements behind it.

    Returned by ``loader.worker_choice`` and ``loader.stats().worker_choice``. ``str()`` of it is a
    sentence.

    Attributes:
        workers (int): Number of workers chosen.
        reason (str): ``"stalled"``: more, because the trainer waited. ``"settled"``: as many as
            before. ``"limit"``: the trainer waited, and the limit is reached. ``"no gain"``: the
            trainer waited, and more workers did not help. ``"taken back"``: an increase that made
            batches no faster was reverted. ``"part gain"``: an increase made batches only as fast
            as fewer workers would have. ``"idle"``: fewer workers are enough. ``"times"``: chosen
            from the times of batches alone.
        measured (MeasuredWork): Means over the last stretch of an epoch.
        limit (int): Largest number that would have been chosen.
        limited_by (str): Cause of the limit: ``"CPUs"``, ``"shards"``, ``"cap"`` or ``"pool"``.
        cpus (int): CPUs available.
        fewer (MeasuredWork | None): Measurements of a smaller number of workers for which the
            trainer waited too long, if any.
    """

    workers: int
    reason: Literal[
        "stalled", "settled", "limit", "no gain", "taken back", "part gain", "idle", "times"
    ]
    measured: MeasuredWork
    limit: int
    limited_by: Literal["CPUs", "shards", "cap", "pool"]
    cpus: int
    fewer: MeasuredWork | None

class WorkerLessons:
    """The results of earlier choices."""

def choose_workers(
    measured: MeasuredWork, limits: WorkerLimits, lessons: WorkerLessons
) -> tuple[WorkerChoice, WorkerLessons]: ...

class StallMeter:
    """Accumulates parts of epochs for one number of workers. Times are in seconds."""

    def begin(
        self,
        owner: int,
        workers: int,
        counters: dict[str, Any],
        workers_cpu_s: float | None,
        trainer_cpu_s: float,
        now_s: float,
    ) -> None: ...
    def is_open(self, owner: int) -> bool: ...
    def note(self, called_at_s: float, returned_at_s: float) -> None: ...
    def end(
        self, counters: dict[str, Any], workers_cpu_s: float | None, trainer_cpu_s: float
    ) -> None: ...
    def has_seen(self, seconds: float, batches: int) -> bool: ...
    def take(self) -> MeasuredWork: ...
    kept_count: int

class WorkerTuner:
    meter: StallMeter
    def __init__(self, window_s: float) -> None: ...
    def is_due(self, workers: int) -> bool: ...
    def choose(self, limits: WorkerLimits) -> WorkerChoice: ...
    def give_up(self, workers_before: int) -> None: ...

class BatchOrigin:
    """The source of leaves that were not sent with a batch."""

class AheadWishes:
    """The batch tensors to copy to a device as soon as a batch arrives. Thread-safe."""

    def __init__(self) -> None: ...
    def set(self, device: str, leaves: list[int], keys: list[str]) -> None: ...
    def clear(self) -> None: ...

class AheadCopies:
    """Copies of a batch's tensors on a device. For the training thread."""

    @property
    def device(self) -> str: ...
    def take(self, place: int) -> torch.Tensor | None:
        """Return the copy of the tensor at a place in the batch, only once; None if there is none.
        Block until its source has been read."""

class Client:
    class Event:
        BATCH: ClassVar[Client.Event]
        SHARD_ENDED: ClassVar[Client.Event]
        WORKER_LOST: ClassVar[Client.Event]
        WORKER_GONE: ClassVar[Client.Event]
        END: ClassVar[Client.Event]
        NEWS: ClassVar[Client.Event]
        NOTHING: ClassVar[Client.Event]
        def __init__(self, value: int) -> None: ...
        def __int__(self) -> int: ...
        @property
        def name(self) -> str: ...
        @property
        def value(self) -> int: ...

    def __init__(
        self,
        *,
        worker_count: int,
        prefetch_factor: int,
        prefetch_bytes: int,
        shard_count: int,
        slab_count: int,
        overtaking_max: int,
        any_worker: bool,
        keep_workers: bool,
        keep_indices: bool,
        pin_memory: bool,
        device: str | None,
        ahead: AheadWishes | None,
    ) -> None: ...
    def open_channel(self, worker_id: int) -> tuple[int, int]:
        """Return the descriptors of the trainer's and the worker's end, which the client owns."""

    def note_started(self, worker_id: int, pid: int) -> None:
        """Record that the worker has its end, and close that end here."""

    def start(self) -> None: ...
    def drop_epoch(self) -> None: ...
    def awaited(self) -> tuple[int, int, Any, bool] | None: ...
    def install_prefix(self, message: bytes) -> None: ...
    def remove_prefixes(self) -> None: ...
    def want_states(self, every: int, question: int) -> None: ...
    def worker_states(self, timeout_s: float) -> bytes | None: ...
    def recall(self, origin: BatchOrigin) -> None: ...
    def recalled(
        self, origin: BatchOrigin, timeout_s: float
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int, None] | None: ...
    def forget_recall(self, origin: BatchOrigin) -> None: ...
    def stop(self) -> None: ...
    def retire_held(self) -> None: ...

class EpochProgress:
    def __init__(self, shard_count: int) -> None: ...
    @property
    def answered_count(self) -> int: ...
    @property
    def yielded_count(self) -> int: ...
    @property
    def shard_counts(self) -> list[int]: ...
    @property
    def last_shard_id(self) -> int | None: ...
    @property
    def is_finished(self) -> bool: ...
    def shard_state(self, shard_id: int) -> bytes | None: ...
    def shard_state_count(self, shard_id: int) -> int: ...
    def set_shard_state(self, shard_id: int, state: bytes) -> None: ...
    def answer(self, shard_id: int, is_error: bool) -> None: ...
    def note_error(self) -> None: ...
    def skip_answer(self) -> None: ...
    def finish(self) -> None: ...
    def resume(
        self, answered_count: int, yielded_count: int, last_shard_id: int | None
    ) -> None: ...
    def set_shard_answers(self, shard_id: int, count: int) -> None: ...
    def share_out(self, shard_count: int) -> None: ...

class Stream:
    def __init__(
        self,
        client: Client,
        *,
        is_iterable: bool,
        asks_while_room: bool,
        may_begin_early: bool,
        is_seeded_by_batch: bool,
    ) -> None: ...
    def begin_with_sampler(
        self,
        *,
        base_seed: int,
        epoch: int,
        by_sample: bool,
        progress: EpochProgress,
        base_generator: torch.Generator | None,
        sample_count: int,
        batch_size: int,
        drop_last: bool,
        shuffle: bool,
        generator: torch.Generator | None,
        share: RankShareOptions | None,
    ) -> None: ...
    def begin_with_indices(
        self,
        *,
        base_seed: int,
        epoch: int,
        by_sample: bool,
        progress: EpochProgress,
        pull: Callable[[], tuple[object, int]],
        dumps: Callable[[object], bytes],
    ) -> None: ...
    def next(
        self,
        timeout_s: float,
        loads: Callable[[bytes, list[torch.Tensor]], Any] | None,
        open_storage: Callable[[int, int], torch.UntypedStorage],
        stand_in: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[int, Any, Any, int, bytes | None]: ...
    def look_ahead(
        self,
        batch_count: int,
        timeout_s: float,
        loads: Callable[[bytes, list[torch.Tensor]], Any] | None,
        open_storage: Callable[[int, int], torch.UntypedStorage],
        stand_in: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> tuple[int, Any, Any, int, bytes | None]: ...
    def give_ahead(self) -> None: ...
    def begin_steps(self) -> None: ...
    def enter_step(self) -> None: ...
    def leave_step(self) -> None: ...
    def drop_rest(self) -> None: ...
    def begin_ranks(self) -> None: ...
    def end_ranks(self) -> None: ...
    def workers(self) -> dict[int, tuple[int, float, float, float, float, float]]: ...
    def slow_samples(self) -> list[tuple[float, int | None, int, int, int | None, int]]: ...
    def record_steps(self, count_max: int) -> None: ...
    def step_records(self) -> list[dict[str, Any]]: ...
    worker_count: int
    def load_counters(self) -> tuple[int, int, float, float, int, int, float]: ...
    def counters(self) -> dict[str, Any]: ...

def identity_of_launched_job() -> str: ...

class ReplicaKeys:
    def __init__(self) -> None: ...
    @property
    def public_key(self) -> str: ...

class Relay:
    def __init__(
        self,
        *,
        keys: ReplicaKeys,
        leader: str,
        bind_host: str,
        followers: list[tuple[str, str, str]],
        arena_bytes: int,
        held_bytes_max: int,
        leaves: Sequence[tuple[str, bool, Sequence[bool]]] = (),
    ) -> None: ...
    @property
    def addresses(self) -> list[tuple[int, str, str]]: ...
    @property
    def awaited_follower(self) -> tuple[str, float] | None: ...
    @property
    def handed_count(self) -> int: ...
    def close(self) -> None: ...

class ShipmentOrder:
    @property
    def message(self) -> bytes | None:
        """The shipment to announce to workers; None to send whole batches."""

class LeafWithholding:
    def __init__(self) -> None: ...
    def take(self, model: int, verify_every: int) -> None: ...
    def forget(self, model: int) -> ShipmentOrder | None: ...
    def note_call(
        self,
        model: int,
        batch: tuple[Sequence[int], Set[int], bool] | None,
        cuts: Sequence[tuple[Set[int], Set[str], bool]],
    ) -> ShipmentOrder | None: ...
    def send_whole(self) -> ShipmentOrder | None: ...
    def note_recall(self, leaf: int) -> ShipmentOrder | None: ...
    @property
    def watched_leaves(self) -> set[int]: ...
    @property
    def is_withholding(self) -> bool: ...

class PoolClient(Client):
    def __init__(
        self,
        *,
        controller: str,
        key_folder: str | None,
        job: str,
        about: str,
        worker_count_max: int,
        arena_bytes: int,
        is_iterable: bool,
        trust_workers: bool,
        own_workers: list[tuple[int, str, str]],
        prefetch_factor: int,
        prefetch_bytes: int,
        shard_count: int,
        overtaking_max: int,
        keep_indices: bool,
        pin_memory: bool,
        device: str | None,
        ahead: AheadWishes | None,
        gpu_uuid: str,
        job_identity: str = "",
        rank: tuple[int, int] = (0, 1),
        relay: Relay | None = None,
        leaves_by_rank: bool = False,
        own_keys: tuple[ReplicaKeys, str] | None = None,
    ) -> None: ...
    def set_plan(self, json: str, change_count: int) -> None: ...
    def put_blob(self, id: bytes, bytes: bytes) -> None: ...
    def use_blobs(self, ids: list[bytes]) -> None: ...
    def set_lanes(self, places: dict[int, tuple[int, bytes]]) -> None: ...
    def lose_own_worker(self, worker_id: int) -> None: ...
    @property
    def open_worker_count(self) -> int: ...
    @property
    def workers_apart(self) -> dict[str, str]:
        """Workers whose kernels compute other bits than this process's, by their places, with the
        affected families for people."""
    def describe_pool(self) -> str: ...
    @property
    def controller_silence_s(self) -> float | None: ...

# graph

class GraphInput:
    @property
    def kind(self) -> str: ...
    @property
    def leaf_index(self) -> int: ...
    @property
    def source(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def sizes(self) -> list[int | str]: ...
    @property
    def digest(self) -> str: ...

class Graph:
    def __eq__(self, other: object) -> bool: ...
    @property
    def inputs(self) -> list[GraphInput]: ...
    @property
    def value_names(self) -> list[str]: ...
    @property
    def output_names(self) -> list[str]: ...
    @property
    def output_keys(self) -> list[str]: ...
    @property
    def constant_names(self) -> list[str]:
        """The names of the constant inputs, in order."""
    @property
    def held_names(self) -> list[str]:
        """The names of the constant and state inputs, in order."""
    @property
    def made_names(self) -> set[str]:
        """The names of the values that nodes compute."""
    @property
    def operators(self) -> set[str]: ...
    @property
    def node_count(self) -> int: ...
    def without_outputs(self, names: Set[str]) -> Graph: ...
    def flow(
        self, extents: Mapping[str, tuple[int, int]]
    ) -> tuple[dict[int, int], list[tuple[int | None, int | None, int | None, int]]]:
        """Return how many bytes calls pass to each other, see csrc/graph/call_flow.h: the bytes
        that each call allocates, and edges as (source, target, leaf, bytes). Extents are (bytes,
        memory number) by name."""
    @property
    def bits_forms(self) -> list[str]:
        """The form of each node on a device, as in a table of device bits."""

    def put_equal_twins(self) -> None:
        """Have nodes on a device that a CPU would round differently computed as on the device."""

    def annotate(self) -> None: ...

class Verdict:
    @property
    def level(self) -> str: ...
    @property
    def movable(self) -> bool: ...
    @property
    def has_other_bits(self) -> bool:
        """Whether it may be moved although a CPU may compute other bits than the device."""
    @property
    def is_inexact(self) -> bool:
        """Whether it has other bits, or depends on a value that has."""
    @property
    def reason(self) -> str: ...

class ValueSize:
    @property
    def bytes(self) -> int: ...
    @property
    def storage(self) -> int: ...

class Calibration:
    @property
    def node_s(self) -> list[float]: ...
    @property
    def trainer_node_s(self) -> list[float]: ...
    @property
    def copy_bytes_per_s(self) -> float:
        """The rate from pinned memory to the program's device; 0 without a device."""
    @property
    def values(self) -> list[ValueSize]: ...

class Loads:
    def __init__(
        self, *, trainer_s: float, worker_s: float, link_s: float = ..., cpus: float = ...
    ) -> None: ...
    @property
    def trainer_s(self) -> float: ...
    @property
    def worker_s(self) -> float: ...
    @property
    def link_s(self) -> float: ...
    @property
    def cpus(self) -> float: ...

class StageSeconds:
    @property
    def trainer_s(self) -> float: ...
    @property
    def worker_s(self) -> float: ...
    @property
    def link_s(self) -> float: ...

class PlanGroup:
    @property
    def group(self) -> int | None: ...
    @property
    def label(self) -> str: ...
    @property
    def operators(self) -> list[str]: ...
    @property
    def level(self) -> str: ...
    @property
    def replicated(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def worker_s(self) -> float: ...
    @property
    def trainer_s(self) -> float: ...

class Plan:
    @property
    def moved(self) -> list[PlanGroup]: ...
    @property
    def kept(self) -> list[PlanGroup]: ...
    @property
    def boundary(self) -> list[str]: ...
    @property
    def raw_leaves(self) -> list[int]: ...
    @property
    def raw_bytes(self) -> int: ...
    @property
    def maximal_bytes(self) -> int: ...
    @property
    def boundary_bytes(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def worker_s(self) -> float: ...
    @property
    def trainer_s(self) -> float: ...
    @property
    def seconds(self) -> StageSeconds: ...
    @property
    def step_s(self) -> float | None: ...
    def moved_labels(self, graph: Graph) -> dict[str, str]:
        """Return, by name of each moved value, the label of the call that computes it."""

class Prices:
    """The properties of a loader on which the prices of a plan depend; see csrc/graph/price.h."""

    worker_count: float
    link_bytes_per_s: float
    raw_stays: bool
    loads: Loads | None
    def __init__(
        self,
        *,
        worker_count: float = ...,
        worker_second: float = ...,
        trainer_scale: float = ...,
        worker_scale: float = ...,
        trainer_node_s: float = ...,
        link_bytes_per_s: float = ...,
        write_bytes_per_s: float = ...,
        read_bytes_per_s: float = ...,
        cut_s: float = ...,
        raw_stays: bool = ...,
        loads: Loads | None = ...,
    ) -> None: ...
    @staticmethod
    def of_local_workers(
        worker_count: float, trainer_scale: float = 1.0, worker_scale: float = 1.0
    ) -> Prices: ...
    @staticmethod
    def of_pool(worker_count: float, *, link_bytes_per_s: float, sends_whole: bool) -> Prices:
        """`link_bytes_per_s` is the total of all workers; 0 while it is unknown."""

def parse_graph(text: str) -> Graph: ...
def device_bits_tables() -> list[str]:
    """Return the tables of measured device types that penstock includes."""

def add_device_bits(table: str) -> None:
    """Add a table of a measured device type. Raise ValueError if it is malformed."""

def analyse_effects(
    graph: Graph,
    allow_random: bool = False,
    known_outside: Set[str] = ...,
    memory: Mapping[str, int] = ...,
    may_be_inexact: Set[str] = ...,
) -> list[Verdict]: ...
def make_plan(
    graph: Graph,
    verdicts: Sequence[Verdict],
    calibration: Calibration,
    *,
    cut: str = "auto",
    prices: Prices = ...,
) -> Plan: ...

class PricedPlans:
    """A graph and the plans made from it; see csrc/graph/repricer.h."""

    graph: Graph
    verdicts: list[Verdict]  # by node
    calibration: Calibration
    prices: Prices
    chosen: Plan
    none: Plan
    maximal: Plan
    def __init__(
        self,
        graph: Graph,
        verdicts: Sequence[Verdict],
        calibration: Calibration,
        *,
        cut: str,
        prices: Prices,
    ) -> None: ...

class ShownPrice:
    times: int
    changes: int
    trainer_s: float
    worker_s: float
    link_s: float
    step_s: float
    workers: float
    is_held: bool

class PricedCut:
    """A cut in use, with the measurements of its graph, which the next cut inherits."""

    shown: ShownPrice | None
    wants_timed_calls: bool
    def __init__(
        self, plans: PricedPlans, has_suffix: bool, like: PricedCut | None = None
    ) -> None: ...
    def next_timed_call(self) -> str | None:
        """Return the part to time in this call: "whole", "suffix" or None."""
    def note_timed_call(self, call: str, seconds: float) -> None: ...

class MeasuredLoads:
    workers: int
    trainer_s: float
    fetch_s: float
    prefix_s: float
    bytes: float
    link_bytes_per_s: float
    step_s: float

class LoadMeter:
    """The costs of a batch while a loader is running; see csrc/graph/load_meter.h."""

    step_count: int
    def __init__(self) -> None: ...
    def begin(self, workers: int, in_flight_max: int) -> None: ...
    def note(
        self,
        called_at_s: float,
        returned_at_s: float,
        counters: tuple[int, int, float, float, int, int, float],
        sends_whole: bool,
    ) -> None: ...
    def note_waiting(self, seconds: float) -> None: ...
    def note_device(self, seconds: float) -> None: ...
    def skip(self) -> None: ...
    def forget(self) -> None: ...

class Repricer:
    """Decides when the plan of a model changes; see csrc/graph/repricer.h."""

    is_window_due: bool
    measured: MeasuredLoads
    def __init__(
        self, meter: LoadMeter, *, shift: float = ..., trial_windows: int = ...
    ) -> None: ...
    def note_call(self, cut: PricedCut, weight: int) -> None: ...
    def take_window(self, cpus: int) -> bool: ...
    def change_of(self, cut: PricedCut) -> Literal[True] | Prices | None:
        """Return True to restore the plan that was replaced last, or prices for a new plan."""
    def changed(self, old: PricedCut, new: PricedCut) -> bool:
        """Record the replacement; return whether the new one is the plan that was replaced last."""
    def give_up(self, cut: PricedCut) -> None: ...

def extract_prefix(graph: Graph, plan: Plan, draws_of: str = "", settings: str = "") -> Graph: ...
def value_keys(graph: Graph, draws_of: str = "") -> list[str]: ...
def content_digest(tensor: torch.Tensor) -> str: ...
def capture_torchscript(
    module: Any, leaves: Sequence[torch.Tensor]
) -> tuple[Graph, list[torch.Tensor]]: ...
def written_arguments(operator: str) -> list[tuple[int, int | None]]:
    """Return the positions of the arguments that an operator writes, each with the position of the
    flag that enables the write."""

def functional_twin(operator: str) -> tuple[str, bool] | None:
    """Return the operator that computes the values that another writes, and whether it
    is just a view."""

def overload_with_numbers(operator: str, positions: Set[int]) -> str | None:
    """Return the overload that takes numbers in place of the operator's tensors."""

class CapturedCall:
    def __init__(
        self, unit: int, is_droppable: bool, reads_intermediate: bool, reads: Sequence[int]
    ) -> None: ...

class NeededCalls:
    """The calls needed to reassemble a part of a captured program; see
    csrc/graph/call_flow.h."""

    calls: set[int]
    def __init__(self, calls: Sequence[CapturedCall], forbidden_units: Set[int]) -> None: ...
    def need(self, call: int) -> tuple[bool, int, int | None] | None:
        """Add a call and all calls that it needs. If it cannot run, return why: whether it reads an
        intermediate value, the call, and its reader."""
    def need_region(self, first: int, last: int) -> None: ...

class InputConditions:
    """The input sizes for which a lowering is valid; see csrc/graph/size_ops.h."""

    def __init__(
        self,
        *,
        symbols: Sequence[tuple[int, int]],
        fixed_sizes: Sequence[tuple[int, int, int]],
        fixed_ints: Sequence[tuple[int, int]],
        guards: Sequence[Any],
        strides: Sequence[tuple[int, Sequence[Any]]],
        unusual: Callable[[Sequence[int]], bool] | None,
    ) -> None: ...
    def hold(self, inputs: Sequence[Any]) -> bool: ...

class ScriptCall:
    def __init__(self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    @property
    def tensors(self) -> list[torch.Tensor]: ...
    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> ScriptCall: ...
    def is_like(self, other: ScriptCall) -> bool: ...

class ScriptPart:
    @property
    def optimized_operators(self) -> list[str]: ...
    def run(self, callee: Any, call: ScriptCall, more: Sequence[torch.Tensor] = ...) -> Any: ...

class ScriptProgram:
    def __init__(
        self, callee: Any, call: ScriptCall, leaf_indices: Sequence[int | None]
    ) -> None: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def constants(self) -> list[torch.Tensor]: ...
    def holds(self) -> bool: ...
    def suffix(self, plan: Plan, *, is_optimized: bool = ...) -> ScriptPart: ...
    def reference(self, plan: Plan) -> ScriptPart: ...
    def is_optimized_alike(self, plan: Plan, whole: ScriptPart, part: ScriptPart) -> bool: ...

def whole_script(callee: Any) -> ScriptPart: ...

# runtime

class Executor:
    def __init__(
        self,
        graph: Graph,
        constants: Sequence[torch.Tensor],
        *,
        allow_random: bool = False,
        allow_state: bool = False,
    ) -> None: ...
    def refusal(self, leaves: Sequence[torch.Tensor]) -> str | None: ...
    def run(
        self, leaves: Sequence[torch.Tensor], seed: int | None = None
    ) -> list[torch.Tensor]: ...
    @property
    def draws(self) -> bool: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def saved_node_count(self) -> int: ...

class PrefixRest:
    """The trainer's part of a prefix whose nodes that are exact on every CPU ran in a worker."""

    def __init__(self, text: str, constants: Sequence[torch.Tensor]) -> None: ...
    @property
    def keys(self) -> list[str]:
        """The keys of the values that such a worker sends."""
    def run(
        self, leaves: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the outputs of the prefix. ``given`` are the values of those keys."""

def numeric_fingerprint() -> list[int]:
    """Return fingerprints of this process's kernel results by family; the last is of all."""

def spoken_families(families: int) -> str: ...
def kernel_settings() -> str:
    """Return the settings of torch that affect results and differ from its defaults."""

def seed_of_batch(prefix_seed: int, epoch_seed: int, sequence: int) -> int: ...
def place_on_devices(
    graph: Graph, leaves: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]
) -> tuple[Graph, dict[str, str]]:
    """Return the graph with its nodes on the devices of its inputs, and the devices of its values
    by name; values on the CPU are left out."""

def calibrate(
    graph: Graph,
    verdicts: Sequence[Verdict],
    leaves: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor | None],
    *,
    round_count: int = ...,
    seconds_max: float = ...,
) -> Calibration: ...

# images

_Box = tuple[int, int, int, int]  # left, top, width, height
# A penstock.images.chains.Chain.
_Chain = tuple[
    _Box,
    tuple[float, ...] | None,
    _Box,
    bool,
    bool,
    tuple[tuple[str, Any], ...],
    str,
]

class JpegLibrary:
    def __init__(self, path: str) -> None: ...
    def open_bytes(self, file: bytes) -> tuple[int, int, int, int] | None: ...
    def make_bytes(
        self, file: bytes, number: int, chain: _Chain, is_by_shrinkage: bool
    ) -> bytes | None: ...
    def make_planes(
        self, file: bytes, number: int, chain: _Chain, is_by_shrinkage: bool, tables: torch.Tensor
    ) -> torch.Tensor | None: ...

def set_avx2_for_test(is_used: bool) -> None: ...
