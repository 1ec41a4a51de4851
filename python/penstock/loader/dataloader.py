# SPDX-License-Identifier: Apache-2.0
"""The DataLoader that replaces torch's."""

from __future__ import annotations

import contextlib
import os
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import Dataset, IterDataPipe, MapDataPipe, Sampler

from penstock import _C
from penstock.compat.iterators import BaseIterator
from penstock.errors import ClosedError, FallbackError
from penstock.graph.link import Link
from penstock.loader.automatic_iterator import AutomaticPoolIter
from penstock.loader.device import has_device, is_auto, staged_device
from penstock.loader.in_process_iterator import SingleProcessIter
from penstock.loader.loader_state import (
    begin_from,
    check_has_state,
    check_state,
    loaded_state,
    make_state,
    state_interval,
)
from penstock.loader.local_iterator import LocalPoolIter
from penstock.loader.lookahead import look_ahead
from penstock.loader.options import (
    DEFAULT_PREFETCH_FACTOR,
    DEFAULTS,
    check_options,
    chosen_keys,
    has_pool,
    is_parallel,
    own_options,
    reads_shards_of_rank,
    shard_count,
    shown_options,
)
from penstock.loader.parked_client import ParkedClient
from penstock.loader.rank_agreement import (
    check_replicable,
    compare_ranks,
    facts_of,
    facts_of_replica,
    facts_of_shards,
    speaks_for_group,
)
from penstock.loader.rank_states import part_of_rank
from penstock.loader.source import with_workers_apart
from penstock.loader.started_prefetch import StartedPrefetch, check_can_start
from penstock.loader.stats import LoaderReport, LoaderStats, make_report
from penstock.loader.step_times import PastWork, step_times
from penstock.loader.variable_pool import (
    begin_sendable,
    begin_tried,
    has_sent_batch,
    is_on_trial,
    leave_pool_of_another_state,
    leave_unsendable,
    named_pool,
    use_variable,
)
from penstock.pool.known_pickle import KnownPickle
from penstock.pool.travelling_code import TravellingCode
from penstock.program_line import warn
from penstock.ranks.replica_group import ReplicaGroup, check_place, ranks_of
from penstock.ranks.sharding import RankSharding, check_without_sharding, order_generator
from penstock.ranks.steps import StepAgreement
from penstock.stream.batch_seeds import DrawWarning
from penstock.stream.progress import GeneratorSnapshot, Progress, sampler_states
from penstock.stream.shard_state import ResumedDataset, copied_state
from penstock.tracking.batch_origin import ProvenanceTable
from penstock.tuning.load_meter import LoadMeter
from penstock.tuning.worker_tuner import AutomaticCount, WorkerTuner, first_count
from penstock.worker.arena_cap import arena_bytes

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from penstock.graph.link import Library
    from penstock.graph.plan import Plan

_T_co = TypeVar("_T_co", covariant=True)
_Method = TypeVar("_Method", bound=Callable[..., Any])


class _StateMethod:
    """A method that ``hasattr`` finds where the loader has a state, and nowhere else.

    The class itself has the plain function, for editors, ``help()`` and ``inspect.signature()``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        if loader is None:
            return self._function
        check_has_state(loader)
        return types.MethodType(self._function, loader)


def _where_it_has_state(method: _Method) -> _Method:
    return cast(_Method, _StateMethod(method))


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """torch's DataLoader, fed through shared memory by native code.

    Takes torch's arguments in torch's order and means the same by them: the batches, their order,
    the random numbers and the errors are those of ``torch.utils.data.DataLoader``. The options of
    penstock's own, below, may be assigned later. The next ``iter()`` heeds them, and starts
    persistent workers anew.

    snapshot_every_n_steps: as in torchdata's StatefulDataLoader, the steps between snapshots of
        samplers and of datasets in workers, from the first :meth:`state_dict` or
        :meth:`load_state_dict` on; 0 for none. Before that nothing is kept or sent. The state is
        exact after every batch whatever this number is: a resumed loader repeats what came after
        the snapshot.
    num_workers: "auto" measures how long the trainer waits for batches and how long workers take,
        and chooses the number from that; :attr:`worker_choice` says which number and why. "auto"
        needs ``seeding="batch"``, with which the stream is the same for any number of workers, and
        ``shards`` for an ``IterableDataset``. The attribute is the number in force, 1 or more:
        without workers there is nothing to measure. A new number takes effect in the middle of an
        epoch, or in the next one for an iterable dataset or with ``in_order=False``. New workers
        get the dataset as the trainer has it and run ``worker_init_fn``, persistent ones too.
        Workers that compute are at most as many as the CPUs that this process may use (its
        affinity, its cgroup, its share of a machine with ``LOCAL_WORLD_SIZE`` ranks). Workers that
        wait for storage are at most four times as many, or 32. To assign a number ends the
        choosing.
    device: batches arrive on this device, copied on a side stream ahead of use. A
        ``torch.device``, a string or an index; None and the CPU leave them where torch would. With
        ``num_workers=0`` an object that is no container is moved by its own ``to()``, and one
        without stays where it is. ``iter()``
        raises ``UnsupportedError`` when the device is not there. At most ``prefetch_bytes`` of
        batches, or 256 MiB, are on it ahead of use, and one batch beyond; the others wait on the
        host. Where its memory is full, batches wait as well; ``next()`` raises
        ``torch.OutOfMemoryError`` if there is none for the very batch that it waits for.
        CUDA graphs may be captured meanwhile.
        "auto" leaves batches on the host and copies ahead what the program copies: where it says
        ``.to(device)``, ``.cuda()`` or ``buffer.copy_(x)`` of a tensor of the batch, it is given a
        copy that was begun when the batch came. Tensors that it may copy are ``torch.Tensor`` by
        ``isinstance`` and not by ``type()``; all that is made of them is plain. Without workers, or
        without a device, batches are plain.
    seeding: "worker" (what None means) seeds each worker as torch does. "batch" seeds the global
        generators of torch, random and numpy anew before each batch, from the base seed, the number
        of the epoch and the place of the batch in it. A dataset and a collate_fn that draw from
        these generators then give the same stream for any ``num_workers``. With ``num_workers=0``
        the trainer's own generators stay as they were. "sample" seeds them before each sample of a
        map-style dataset, from the place of the sample in the order of the epoch, so that the
        draws do not depend on ``batch_size`` either. Generators that a dataset keeps to itself
        are not covered. A map-style dataset whose ``__getitem__`` takes ``generator`` is given a
        ``torch.Generator`` for each sample, which makes its draws independent of ``fetch_threads``
        too.
    shards: with ``seeding="batch"`` and an ``IterableDataset``, the number of shards in which it is
        read, which is also what ``get_worker_info().num_workers`` says. The stream then follows
        from this number and not from ``num_workers``. Shards beyond the first of a process read
        copies of the dataset, made by ``copy.deepcopy``. None: one shard for each worker. With
        ``shard_by_rank`` it is the number of shards of the job.
    prefetch_bytes: the most bytes that batches asked for ahead may take. A batch that has not come
        yet counts as the largest so far. One batch is always asked for. ``prefetch_factor``, which
        bounds the number of batches, holds as well. It is also the most bytes of batches that are
        on a CUDA ``device`` before they are given out.
    fetch_threads: up to this many threads of a worker (of the trainer with ``num_workers=0``) call
        ``dataset[i]`` for the samples of one batch, for storage that is slow to answer. Order and
        errors stay torch's, collate_fn runs as before, and no part of a batch overlaps the next
        batch. The dataset must be thread-safe. With more than 1, random numbers that samples draw
        from the global generators (torch, random, numpy) are not reproducible, because the threads
        share them. A dataset with ``__getitems__`` is still called once for a batch.
    overlap_epochs: with ``persistent_workers``, workers may make the first batches of the next
        epoch while one ends and between the two. These batches are used if that epoch begins as
        expected (nothing else drew from the generators of its order), and dropped otherwise; the
        stream is torch's either way. This is done for a map-style dataset in sequential order or
        shuffled by torch's own sampler, if fetching does not change the dataset and no other
        process can, as far as a worker can see. For all others the next epoch is fetched when it
        begins. False: never, for a dataset that reads files which the program writes between
        epochs.
    pool: "tcp://host:port", the address of a pool's controller. Batches then come from the workers
        that the controller names, on this machine or others, which may come, go and die while
        training runs. With ``num_workers`` > 0, so many processes of this trainer's own serve
        beside them. ``seeding`` is "batch" then, so that the stream is that of ``num_workers=0,
        seeding="batch"`` to the bit. The dataset, ``collate_fn`` and ``worker_init_fn`` (called
        once in a process, with 0) are sent by cloudpickle. ``prefetch_factor``,
        ``persistent_workers`` and ``timeout`` are allowed whatever ``num_workers`` is. Where
        batches are made within 5 ms, each worker is asked for up to 8 ahead even if
        ``prefetch_factor`` is less, together of at most 16 MiB and ``prefetch_bytes``. None: the
        pool that the environment's ``PENSTOCK_POOL`` names, if it can serve this loader and
        ``num_workers`` is not 0 or ``seeding`` is "batch" or "sample"; a warning says if it cannot.
        "": no pool.
    keys: the folder with this trainer's keys for the pool. None: ``PENSTOCK_KEYS``, else keys that
        this user's processes share on this machine.
    code_paths: folders (or single .py files) of your own modules that travel with the dataset. The
        modules in the folder of the program travel in any case, and so do those that it has
        imported from elsewhere and that belong to no installed package. Empty: the folders that the
        environment's ``PENSTOCK_CODE_PATHS`` lists, with ":" between them. None: no modules at all.
    trust_workers: lets batches of a pool carry any pickled object. Without it they carry tensors,
        numpy arrays, numbers, text, bytes, None and dicts, lists and tuples of them. Unpickling
        runs code that the sender chose: a worker that somebody took over could do whatever the
        trainer may.

    shard_by_rank: the loader gives this process its part of one order that knows no ranks, of a
        map-style dataset. A step takes the next samples of the order, and each rank a run of them.
        Every rank has the same number of steps. The order and all random numbers are the same for
        any number of ranks (``seeding`` is "sample"), and so is the state: any rank's
        :meth:`state_dict` says where the job is, and a job of another size goes on from it.
        Without a ``generator`` the order follows from seed 0; one that is given has to be in the
        same state on all ranks. ``sampler``, if it is given, is the order of all ranks. Of an
        ``IterableDataset`` shard s of ``shards`` is read by rank ``s % world_size``, and its
        batches are the same for any number of ranks (``seeding`` is "batch"). Its state in the
        middle of an epoch is that of one rank: :func:`penstock.merge_states` makes the job's.
    rank, world_size: this process, of so many, with ``shard_by_rank``. None: those of torch's
        default process group, or of the variables RANK and WORLD_SIZE that torchrun sets, or 0 of
        1. The attributes are the numbers in force.
    global_batch_size: the samples of a step over all ranks, in the place of ``batch_size``, which
        is that of one rank. The samples of a step are then the same for any number of ranks.
    remainder: with ``shard_by_rank``, what becomes of the samples that do not fill the last step.
        "pad": the ranks share them evenly, and some are given twice to make that so. "drop": they
        are left out. "uneven": the ranks share them, some one more than others, and ranks may have
        batches of different sizes in every step; where there are fewer samples than ranks, as
        "pad". None: "drop" with ``drop_last``, else "pad". Of an ``IterableDataset``, "drop" (what
        None means) ends the epoch on all ranks before the first step that one of them has no batch
        for, and "uneven" on each rank by itself; there is no "pad".
    replica_group: the ranks that are to have the very same batches, those of one model-parallel
        group: a process group, a device mesh of one dimension, or a list of ranks with this one.
        The first of them has each batch made, by ``pool`` or by ``num_workers`` processes of its
        own, and the others have it from that rank, which sends it once to each other machine. The
        ranks read their loaders alike: in the same order, as often, with the same seeds. With
        ``shard_by_rank``, ``rank`` and ``world_size`` count such groups and have to be given. Needs
        a map-style dataset. A model's cut is not used with such a loader.

    With ``num_workers`` > 0 a batch lies in memory that is shared with the worker that made it,
    each tensor in a storage of exactly its bytes. The memory goes back to the worker when the last
    tensor dies, and a user who keeps many batches gets copies. ``PENSTOCK_ARENA_BYTES`` is the most
    shared memory of one worker (default: 256 MiB). ``PENSTOCK_FALLBACK=error`` turns a fallback to
    torch's iterator (datapipes) into ``FallbackError``; :meth:`stats` gives the reason of a
    fallback.

    Example::

        from penstock import DataLoader

        loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
        for images, labels in loader:
            ...
    """

    _takes_states_at_once = False  # whether a program that makes one means to take states
    _loaded_state: dict[str, Any] | None  # the place that the next iter() goes on from
    _newest_iterator: weakref.ref[BaseIterator] | None
    _replicas: ReplicaGroup | None  # once its ranks have met
    _started: StartedPrefetch | None  # until the program calls iter()
    _step_agreement: StepAgreement | None  # once its ranks have agreed on steps
    _epoch_count: int

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int = 1,
        device: torch.device | str | int | None = None,
        seeding: Literal["worker", "batch", "sample"] | None = None,
        shards: int | None = None,
        prefetch_bytes: int | None = None,
        fetch_threads: int = 1,
        overlap_epochs: bool = True,
        pool: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        code_paths: Sequence[str | os.PathLike[str]] | None = (),
        trust_workers: bool = False,
        shard_by_rank: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        global_batch_size: int | None = None,
        remainder: Literal["pad", "drop", "uneven"] | None = None,
        replica_group: Sequence[int] | ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        self._set_own_state()
        self.replica_group = ranks_of(replica_group)
        self.shard_by_rank = shard_by_rank
        self.global_batch_size = global_batch_size
        options_of_ranks = {
            "rank": rank,
            "world_size": world_size,
            "global_batch_size": global_batch_size,
            "remainder": remainder,
        }
        sharding = None
        if shard_by_rank:
            check_place(self.replica_group, rank)
            sharding = RankSharding.of(
                {
                    **options_of_ranks,
                    "dataset": dataset,
                    "sampler": sampler,
                    "batch_sampler": batch_sampler,
                    "batch_size": batch_size,
                    "drop_last": drop_last,
                }
            )
            batch_size = sharding.batch_size
            rank, world_size = sharding.job
            remainder = sharding.remainder
            generator = order_generator() if generator is None else generator
        else:
            check_without_sharding(options_of_ranks)
        self.rank, self.world_size, self.remainder = rank, world_size, remainder
        self.pool = named_pool(pool)
        self.keys = chosen_keys(keys)
        self.code_paths = code_paths
        self.trust_workers = trust_workers
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.device = device
        self.seeding = seeding
        self.shards = shards
        self.prefetch_bytes = prefetch_bytes
        self.fetch_threads = fetch_threads
        self.overlap_epochs = overlap_epochs
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            first_count(num_workers, seeding, shards),
            collate_fn,
            pin_memory,
            drop_last,
            0 if has_pool(self) else timeout,
            worker_init_fn,
            generator=generator,
            **self._options_of_workers(
                multiprocessing_context=multiprocessing_context,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
            ),
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if has_pool(self):
            self._set_options_of_pool(
                timeout, prefetch_factor, persistent_workers, multiprocessing_context
            )
        else:
            use_variable(self, pool)
        if sharding is not None and not sharding.is_stream:
            # Torch's constructor made the sampler, and torch forbids assigning batch_sampler later.
            vars(self)["batch_sampler"] = sharding.batch_sampler(self.sampler)
        check_options(self)

    def _options_of_workers(self, **options: Any) -> dict[str, Any]:
        """Return the worker options for torch's constructor: none with a pool, since it would
        reject them without local workers.
        """
        return {} if has_pool(self) else options

    def _set_options_of_pool(
        self,
        timeout: float,
        prefetch_factor: int | None,
        persistent_workers: bool,
        multiprocessing_context: Any,
    ) -> None:
        if timeout < 0:
            raise ValueError(f"timeout is {timeout}; seconds, or 0 for none, are expected")
        if prefetch_factor is None:
            prefetch_factor = DEFAULT_PREFETCH_FACTOR
        if type(prefetch_factor) is not int or prefetch_factor < 1:
            raise ValueError(f"prefetch_factor is {prefetch_factor!r}; 1 or more is expected")
        self.timeout = timeout
        self.prefetch_factor = prefetch_factor
        vars(self)["persistent_workers"] = persistent_workers  # torch forbids assignment
        if self.num_workers > 0 or multiprocessing_context is not None:
            self.multiprocessing_context = multiprocessing_context  # torch needs workers for it

    def __repr__(self) -> str:
        dataset = getattr(self, "dataset", None)  # none before the constructor has come to it
        parts = [f"<{type(dataset).__name__}>", *shown_options(self)]
        end = " (closed)" if self._is_closed else ""
        return f"{type(self).__name__}({', '.join(parts)}){end}"

    def __enter__(self) -> Self:
        self._check_open("with")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, the connection to a pool and all iterators of this loader now.

        Without this call they end when the loader is deleted. The batches that the program has stay
        valid, and so do :meth:`stats`, :meth:`report` and :attr:`plan`. A loader that is closed
        stays closed; a copy of it is open. Call it from the training thread. Another call does
        nothing.

        ``with DataLoader(...) as loader:`` calls it at the end of the block.

        Raises:
            ClosedError: by a later ``iter()``, :meth:`start_prefetch`, :meth:`lookahead`,
                :meth:`state_dict` or :meth:`load_state_dict`, and by ``next()`` of an iterator of
                this loader; :meth:`close` itself does not raise it.

        Example::

            with DataLoader(dataset, num_workers=4, persistent_workers=True) as loader:
                for epoch in range(epochs):
                    for images, labels in loader:
                        ...
        """
        self._is_closed = True
        # The last one first; all of them, even if one raises or is interrupted.
        with contextlib.ExitStack() as ending:
            ending.callback(self._parked_client.end)
            if self._step_agreement is not None:
                ending.callback(self._step_agreement.close)
            for iterator in {*self._given_iterators, *self._live_iterators}:
                ending.callback(_end_iterator, iterator)
            ending.callback(self._drop_started)
        self._iterator = self._newest_iterator = None
        self._replicas = None

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            _refuse_closed(call)

    def __iter__(self) -> BaseIterator:
        self._check_open("iter()")
        began_at = time.perf_counter()
        started, self._started = self._started, None
        if started is None:
            iterator: Any = begin_tried(self, self._begin_iterator)
        elif started.is_of_use(self):
            iterator = started.iterator
            if started.is_fresh and is_on_trial(self) and not has_sent_batch(self, iterator):
                iterator = started.begin_anew(self, self._begin_iterator)
            iterator.begin_delivery(self)  # a model may have been offloaded since
        else:
            iterator = started.begin_anew(self, self._begin_iterator)
        self._newest_iterator = weakref.ref(iterator)
        self._given_iterators.add(iterator)
        begin_steps = getattr(iterator, "begin_steps", None)  # torch's own has none
        if begin_steps is not None:
            begin_steps(time.perf_counter() - began_at)
        self._iter_count += 1
        self._iter_s += time.perf_counter() - began_at
        return cast(BaseIterator, iterator)

    def _begin_iterator(self) -> BaseIterator:
        return begin_sendable(self, self._begin_as_it_is)  # type: ignore[no-any-return]

    def _begin_as_it_is(self) -> BaseIterator:
        check_options(self)
        live = getattr(self, "_iterator", None)  # frameworks delete it
        if isinstance(live, LocalPoolIter) and live.own_options != own_options(self):
            live._shutdown_workers()  # persistent workers keep the dataset they were started with
            self._iterator = None
        if self.shard_by_rank and not self._are_ranks_compared and speaks_for_group(self):
            self._compare_ranks()
        if self.replica_group is not None and self._replicas is None:
            self._join_replicas(self.replica_group)
        self._follow_copies(is_auto(self.device) and is_parallel(self) and has_device())
        begin = self._iterate_pool if has_pool(self) else super().__iter__
        if self._loaded_state is None:
            iterator = begin()
        else:
            iterator = begin_from(self, self._loaded_state, begin)
            self._loaded_state = None
        return iterator

    def _drop_started(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.drop(self)

    def _compare_ranks(self) -> None:
        facts = facts_of_shards if reads_shards_of_rank(self) else facts_of
        compare_ranks(self, facts(self, self._place_to_begin()))
        self._are_ranks_compared = True

    def _place_to_begin(self) -> dict[str, Any]:
        """Return the start of the next epoch, for a comparison with other ranks."""
        state = self._loaded_state or {}
        return {
            "epoch": state.get("epoch", self._epoch_count),
            "samples given before": state.get("samples", 0),
            "steps taken before": (state.get("shards") or {}).get("step", 0),
        }

    def _join_replicas(self, ranks: tuple[int, ...]) -> None:
        check_replicable(self)
        facts = facts_of_replica(self, self._place_to_begin())
        self._replicas = ReplicaGroup(ranks, facts, arena_bytes())

    def _iterate_pool(self) -> BaseIterator:
        """Iterate as torch's ``__iter__``, whose iterator persists only with local workers."""
        if not self.persistent_workers:
            return self._get_iterator()
        if self._iterator is None:
            self._iterator = self._get_iterator()
        else:
            self._iterator._reset(self)
        return self._iterator

    def _set_own_state(self) -> None:
        self._provenance: ProvenanceTable | None = None
        self._plan: Plan | None = None
        self._workers_apart: dict[str, str] = {}  # as PoolClient.workers_apart
        self._plan_changes = 0  # how often other calls moved than before
        self._load_meter: LoadMeter | None = None  # while a plan is priced by its measurements
        self._prefixes: dict[str, bytes] = {}  # messages to the workers, by the prefix's text
        self._shipment: bytes | None = None  # the message that sets which leaves stay with them
        self._fallback_reason: str | None = None
        self._iterator_kind: str | None = None
        self._past_counters: Counter[str] = Counter()
        self._past_work = PastWork()
        self._iter_count = 0  # calls of iter()
        self._iter_s = 0.0  # that they took
        self._live_iterators: weakref.WeakSet[LocalPoolIter] = weakref.WeakSet()
        self._given_iterators: weakref.WeakSet[BaseIterator] = weakref.WeakSet()  # by iter()
        self._is_closed = False
        self._newest_iterator = None
        self._started = None
        self._parked_client = ParkedClient()
        self._replicas = None
        self._step_agreement = None
        self._travelling_code = TravellingCode()
        self._known_pickle = KnownPickle()
        self._epoch_count = 0
        self._begun_count = 0  # epochs that an iterator was made or reset for
        self._draw_warning = DrawWarning()
        self._progress: Progress | None = None  # of the last iter()
        self._loaded_state = None
        self._are_ranks_compared = False  # since a state was loaded
        self._resuming: Progress | None = None  # while that makes an iterator
        self._resumed_datasets: dict[int, ResumedDataset] = {}  # in this process
        # Since a state was requested, or loaded.
        self._wants_states = self._takes_states_at_once
        self._is_known_sendable = False  # of a dataset that the variable's pool may serve
        self._are_batches_sent = False  # by the workers of that pool
        self._begun_order: Iterator[Any] | None = None  # the next iterator continues it
        self._tuner = WorkerTuner()  # idle unless num_workers is "auto"

    @property
    def plan(self) -> Plan | None:
        """The plan in force, or why there is none;
        None before :func:`penstock.offload` was asked for one.

        Its ``workers_apart`` names the workers of a pool whose kernels give other bits than this
        process's, and the families of these kernels.
        """
        for iterator in list(self._live_iterators):
            self._workers_apart.update(iterator.source.workers_apart)
        return with_workers_apart(self._plan, self._workers_apart)

    @property
    def worker_choice(self) -> _C.WorkerChoice | None:
        """How many workers ``num_workers="auto"`` chose last, and why; None before that.

        ``str()`` of it is a sentence. The number is that of the next ``iter()``, or in force.

        Example::

            print(loader.worker_choice)
        """
        return self._tuner.choice

    def stats(self) -> LoaderStats:
        """The statistics of this loader so far.

        Cheap; may be called at any time from the training thread.
        """
        counters = Counter(self._past_counters)
        work = self._past_work.copy()
        for iterator in list(self._live_iterators):
            counters.update(iterator.counters())
            iterator.add_work(work)
        counted: dict[str, Any] = dict(counters)
        return LoaderStats(
            ledger=step_times(counted),
            workers=work.workers,
            slow_samples=tuple(work.slow_samples),
            iterator=self._iterator_kind,
            fallback_reason=self._fallback_reason,
            worker_choice=self.worker_choice,
            epoch_end=None if self._step_agreement is None else self._step_agreement.epoch_end,
            **counted,
        )

    def report(self) -> LoaderReport:
        """Where the time of the steps so far went, and what to do about it.

        To be called at an epoch's end, or at any other time, from the training thread. ``str()`` of
        it is for people: the waiting by what it was for, each worker's part, the slowest samples
        with their indices, and a sentence or two of advice. ``to_json()`` has the same for
        programs. The numbers are those of :meth:`stats`; ``penstock doctor`` also tries what the
        advice says.

        Example::

            for epoch in range(epochs):
                for images, labels in loader:
                    ...
                print(loader.report())
        """
        return make_report(self, self.stats(), self._iter_count, self._iter_s)

    def lookahead(self, batch_count: int, select: Callable[[Any], Any] | None = None) -> list[Any]:
        """The next ``batch_count`` batches, in order; fewer where the epoch ends.

        ``select`` is called with each of these batches and its results are returned: the ids that
        an embedding will be asked for, say, so that a cache can fetch them. Without it the indices
        are returned, as the sampler yields them for a batch. The batches are still to be delivered,
        and the stream, the generators and the state are those of a program that does not look.

        Values can be seen of the ``prefetch_factor * num_workers`` batches that are asked for ahead
        (``prefetch_factor`` with ``num_workers="auto"``), for which this waits if need be; more is
        a ``ValueError``. Indices are known to the end of the epoch with torch's own samplers in
        batches, and as far ahead as values with others. With ``num_workers=0`` no values are known
        ahead, and indices with torch's own samplers from the first batch on; an iterable dataset
        has no indices; ``in_order=False`` has no known order: ``UnsupportedError``.

        :func:`penstock.embedding_ids` makes a ``select`` for ids that an offloaded model makes of a
        batch. ``select`` is given the very tensors that the loader will deliver. What it returns of
        them stays valid as long as it is kept, but is not to be written to, and shows what the
        program writes to the batch later. It is called for the same batch again by the next call
        that reaches it. Where a batch cannot be made, the list ends before it and ``next()`` raises
        the error in its place; a ``timeout`` that runs out is raised here. Batches that were looked
        at are held on top of ``prefetch_bytes``. With a CUDA ``device`` they may be used under the
        stream that was current here.

        The stream is that of the newest ``iter()``; an iterator has this method too, for its own.
        After the last batch of an epoch the list is empty.

        Example::

            loader = DataLoader(clicks, batch_size=512, num_workers=2, prefetch_factor=8)
            for ids, labels in loader:
                for coming in loader.lookahead(16, lambda batch: batch[0]):
                    cache.prefetch(coming)
                ...
        """
        self._check_open("lookahead()")
        iterator = None if self._newest_iterator is None else self._newest_iterator()
        return look_ahead(self, iterator, batch_count, select)

    def start_prefetch(self) -> None:
        """Has the workers begin with the batches of the next ``iter()``, and returns at once.

        To be called before work that takes a while, such as loading the model's checkpoint: the
        workers are started, or the pool is joined, and the first batches are asked for, as many as
        ``iter()`` asks for. The next ``iter()`` returns that iterator. Another call before it does
        nothing more. After :meth:`load_state_dict` it goes on at the place of the state. With
        ``shard_by_rank`` the ranks compare their loaders here.

        The random numbers that ``iter()`` would draw are drawn here, from the generators as they
        are now, so the stream is that of a program that calls ``iter()`` in this place. Until
        ``iter()``, :meth:`state_dict` is that of before this call.

        If the program meanwhile assigns an option, seeds a ``generator``, or changes an attribute
        of a sampler or of the dataset that is a number or a text (``set_epoch()`` does), ``iter()``
        drops the iterator and makes another, from the same draws. :meth:`load_state_dict`,
        pickling and copying drop it too. The global generators are put back then, unless the
        program has drawn from them since. Other changes of the dataset do not reach workers that
        run, and what persistent workers, which ran before, have drawn for dropped batches stays
        drawn.

        Raises ``UnsupportedError`` with ``num_workers=0`` and no pool, where nothing can be made
        ahead: to do nothing there would leave the draws to ``iter()``, and the stream would depend
        on the number of workers. So it does for datapipes. Raises ``ValueError`` while an iterator
        is in use in the middle of an epoch, and what ``iter()`` raises.

        Example::

            loader.load_state_dict(checkpoint["loader"])
            loader.start_prefetch()
            model.load_state_dict(checkpoint["model"])  # the workers make batches meanwhile
            for batch in loader:
                ...
        """
        self._check_open("start_prefetch()")
        check_can_start(self)
        if self._started is None or not self._started.is_of_use(self):
            self._drop_started()
            self._started = StartedPrefetch(self, self._begin_iterator)

    @_where_it_has_state
    def state_dict(self) -> dict[str, Any]:
        """``state_dict()`` says where the loader is in its stream, for :meth:`load_state_dict`.

        After ``state_dict()`` of a loader in the middle of an epoch another one, built alike, gives
        the batches that were not delivered yet, those that workers had begun included. It can be
        called at any time from the training thread, and is made of what JSON can hold if the states
        of the dataset and of the sampler are. With ``in_order=False`` it also has the places of the
        batches that others have overtaken, and a batch that raised an error comes again. Raises
        ``UnsupportedError`` (and the attribute is not there for ``hasattr``) for datapipes, and for
        workers with ``in_order=False`` and ``shard_by_rank``, and ``RuntimeError`` where a dataset
        or a sampler does not give its state. The first call has later batches bring along what a
        state needs; one in the middle of an epoch may take long to resume from.

        Example::

            for step, batch in enumerate(loader):
                ...
                if step == 100:
                    torch.save(loader.state_dict(), "loader.pt")
        """
        self._check_open("state_dict()")
        return self._make_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Makes the next ``iter()`` go on where the loader was that ``state_dict`` is of.

        An empty one makes it begin a new epoch, with a warning. Ends persistent workers. Raises
        ``ValueError`` when this loader's stream would be another than that of the loader that the
        state is of, and ``TypeError`` for anything but a dictionary.
        """
        self._check_open("load_state_dict()")
        leave_unsendable(self)
        check_has_state(self)
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"load_state_dict() was given {state_dict!r}; the dictionary that state_dict() "
                f"returned is expected; see under which name the checkpoint has it"
            )
        if state_dict:
            state_dict = part_of_rank(self, dict(state_dict))
            leave_pool_of_another_state(self, state_dict)
            check_state(self, state_dict)
        else:
            warn(
                "load_state_dict() was given an empty dictionary, so the loader begins a new epoch "
                "at its first batch; pass a result of state_dict() to go on from there",
                UserWarning,
            )
        self._wants_states = True
        self._drop_started()
        live = getattr(self, "_iterator", None)
        if isinstance(live, LocalPoolIter):
            live._shutdown_workers()
        self._iterator = self._newest_iterator = None
        self._progress = None
        self._loaded_state = copied_state(dict(state_dict)) or None
        self._are_ranks_compared = False

    def _make_state(self) -> dict[str, Any]:
        leave_unsendable(self)
        self._want_states()
        if self._started is not None:
            return self._started.state
        return self._state_of_now(asks_workers=True)

    def _state_of_now(self, asks_workers: bool) -> dict[str, Any]:
        if self._loaded_state is not None:
            return loaded_state(self, self._loaded_state)
        return make_state(self, self._progress, asks_workers)

    def _want_states(self) -> None:
        """Keep and send the data of states from now on, not before."""
        self._wants_states = True
        if self._progress is not None:
            self._progress.want_states(state_interval(self))
        for iterator in list(self._live_iterators):
            if not iterator._shutdown:
                iterator.source.want_states(state_interval(self))

    def _begin_progress(self) -> Progress:
        """Start an epoch's account. An iterator calls it before any draws for the epoch."""
        progress, self._resuming = self._resuming, None
        if progress is None:
            snapshot = GeneratorSnapshot.take(self)
            progress = Progress(self._epoch_count, snapshot, shard_count(self))
        if self._wants_states:
            progress.samplers_before = sampler_states(self)
        if self._wants_states or self.shard_by_rank:
            # A rank's state is its job's state, which a rank's place with its workers is not.
            progress.want_states(state_interval(self))
        progress.number = self._begun_count
        self._begun_count += 1
        self._progress = progress
        return progress

    def _get_iterator(self) -> BaseIterator:
        reason = self._reason_to_fall_back()
        if reason is not None:
            return self._fall_back(reason)
        if has_pool(self):
            # Here, since only pools need the code that packs and ships jobs.
            from penstock.loader.pool_iterator import PoolIter

            self._iterator_kind = "pool"
            return PoolIter(self)
        if self.num_workers == 0:
            self._iterator_kind = "torch"
            staged_device(self.device)
            return SingleProcessIter(self)
        iterator: LocalPoolIter
        if isinstance(self.num_workers, AutomaticCount):  # measured to be rational
            iterator = AutomaticPoolIter(self)
        else:
            self.check_worker_number_rationality()
            iterator = LocalPoolIter(self)
        self._iterator_kind = "penstock"
        return iterator

    def _reason_to_fall_back(self) -> str | None:
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return "the dataset is a datapipe, which only torch's iterator shards and seeds"
        return None

    def _fall_back(self, reason: str) -> BaseIterator:
        if os.environ.get("PENSTOCK_FALLBACK") == "error":
            raise FallbackError(
                f"torch's iterator would be used here: {reason}; PENSTOCK_FALLBACK is set to "
                f"'error'; unset it to allow that"
            )
        self._fallback_reason = reason
        self._iterator_kind = "fallback"
        return super()._get_iterator()

    def _next_epoch(self) -> int:
        """Return the number of the epoch that starts, from 0."""
        self._epoch_count += 1
        return self._epoch_count - 1

    def _follow_copies(self, is_wanted: bool) -> None:
        """Track the batches' tensors until the program copies them to a device, or stop that."""
        if is_wanted and self._provenance is None:
            self._provenance = ProvenanceTable()
        if self._provenance is not None:
            self._provenance.placements.follows_leaves = is_wanted

    def _install_prefix(
        self, prefix: str, constants: list[torch.Tensor], seed: int, library: Library
    ) -> None:
        """Have batches fetched from now on carry the results of ``prefix`` (IR text). Its random
        draws follow from ``seed`` and the batch's place in the stream. ``library`` is its compiled
        form, empty if there is none.
        """
        message = _C.encode_prefix(prefix, constants, seed, library.code, library.leaves)
        self._prefixes[prefix] = message
        for iterator in list(self._live_iterators):
            iterator.source.install_prefix(message)

    def _remove_prefixes(self, prefixes: set[str]) -> None:
        """Remove the results of these prefixes from later batches; others stay in force."""
        for prefix in prefixes:
            self._prefixes.pop(prefix, None)
        for iterator in list(self._live_iterators):
            iterator.source.remove_prefixes()
            for message in self._prefixes.values():
                iterator.source.install_prefix(message)

    def _show_plan(self, plan: Plan | None) -> None:
        """Makes ``plan`` the one of :attr:`plan`, and tells a pool of it."""
        before, self._plan = self._plan, plan
        if plan is not None and before is not None and plan.moved_calls != before.moved_calls:
            self._plan_changes += 1
        for iterator in list(self._live_iterators):
            iterator.source.show_plan(plan, self._plan_changes)

    def _set_shipment(self, message: bytes | None) -> None:
        """Have batches requested from now on sent without leaves that the trainer does not read.
        None: sent whole."""
        self._shipment = message
        for iterator in list(self._live_iterators):
            iterator.source.set_shipment(message)

    def _link(self) -> Link | None:
        """Return the network link to a pool's workers. None with workers of this machine."""
        iterator = None if self._newest_iterator is None else self._newest_iterator()
        link: Link | None = getattr(iterator, "link", None)
        return Link(1, 0.0, sends_whole=True) if link is None and self.pool else link

    def __getstate__(self) -> dict[str, Any]:
        # State that belongs to this process stays here: iterators, the provenance of live batches,
        # the plan of a model, measurements.
        self._drop_started()
        left_here = {
            "_given_iterators",
            "_is_closed",
            "_live_iterators",
            "_newest_iterator",
            "_parked_client",
            "_replicas",
            "_travelling_code",
            "_known_pickle",
            "_provenance",
            "_plan",
            "_plan_changes",
            "_workers_apart",
            "_load_meter",
            "_prefixes",
            "_shipment",
            "_started",
            "_step_agreement",
            "_progress",
            "_resumed_datasets",
            "_tuner",
            "_wants_states",
        }
        return {name: value for name, value in vars(self).items() if name not in left_here}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The state may be from torch's loader, pickled where penstock was not installed.
        self._set_own_state()
        self.__dict__.update({**DEFAULTS, **state})


def _end_iterator(iterator: Any) -> None:
    """Ends its workers, or what it keeps in this process, and has ``next()`` raise ClosedError."""
    # In the place of its methods, so that those of a loader that is open need not ask.
    vars(iterator).update(
        _next_data=lambda: _refuse_closed("next()"),
        lookahead=lambda *arguments, **named: _refuse_closed("lookahead()"),
    )
    # Both torch's iterator of workers and ours have this one.
    end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "release", None)
    if end is not None:
        end()


def _refuse_closed(call: str) -> NoReturn:
    raise ClosedError(f"{call} needs an open DataLoader, and this one is closed; make a new one")
