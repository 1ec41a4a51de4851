# SPDX-License-Identifier: Apache-2.0
"""The DataLoader that replaces torch's."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import torch
import torch.utils.data
from torch.utils.data import Dataset, Sampler

from penstock import _C
from penstock.compat.iterators import BaseIterator
from penstock.errors import ClosedError, FallbackError, UnsupportedError
from penstock.loader.automatic_iterator import AutomaticPoolIter
from penstock.loader.cache_stats import cache_stats_of, keep_owned
from penstock.loader.commit_ledger import CommitLedger
from penstock.loader.device import has_device, is_auto, staged_device
from penstock.loader.flat_arguments import (
    NOT_GIVEN,
    NotGiven,
    read_arguments,
    warn_of_flat,
)
from penstock.loader.grouped_arguments import (
    Pool,
    PoolField,
    Ranks,
    RanksField,
    is_sharded,
    ranks_in_use,
    unchecked,
)
from penstock.loader.in_process_iterator import SingleProcessIter
from penstock.loader.loader_run import LoaderRun
from penstock.loader.loader_state import (
    begin_from,
    check_has_state,
    check_state,
    commits_of,
    state_of_now,
    with_commits,
    with_data_checked,
)
from penstock.loader.local_iterator import LocalPoolIter
from penstock.loader.lookahead import look_ahead
from penstock.loader.options import (
    DEFAULT_PREFETCH_FACTOR,
    DEFAULTS,
    LoaderOptions,
    as_commit_option,
    check_name,
    chosen_keys,
    commit_option,
    name_of,
    shown_options,
)
from penstock.loader.options_check import check_options, warn_of_chunks
from penstock.loader.rank_agreement import (
    check_replicable,
    compare_ranks,
    facts_of,
    facts_of_replica,
    facts_of_shards,
)
from penstock.loader.rank_states import part_of_rank
from penstock.loader.repeated_batches import RepeatsFirst
from penstock.loader.resharding import check_can_reshard, reshard
from penstock.loader.skipped_samples import SkippedSample
from penstock.loader.started_prefetch import StartedPrefetch, check_can_start
from penstock.loader.stats import LoaderReport, LoaderStats, make_report
from penstock.loader.step_times import step_times
from penstock.loader.variable_pool import (
    begin_on_trial,
    begin_sendable,
    drop_pool_if_state_has_none,
    drop_pool_if_unsendable,
    has_sent_batch,
    is_on_trial,
    named_pool,
    use_variable,
)
from penstock.loader.visit_log import VisitLog
from penstock.loader.watched_steps import note_new_loader, watch_torch_iterator
from penstock.pool.worker_spec import arena_bytes
from penstock.program_line import warn
from penstock.ranks.replica_group import ReplicaGroup, ranks_of
from penstock.ranks.sharding import JobRank, RankSharding, order_generator
from penstock.stream.commits import BatchId
from penstock.stream.shard_state import copied_state
from penstock.tuning.worker_tuner import AutomaticCount, first_count

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from penstock.graph.plan import Plan

_T_co = TypeVar("_T_co", covariant=True)
_Loader = TypeVar("_Loader", bound="DataLoader[Any]")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_LEFT_HERE = ("_is_closed", "_run", "_started")


class _StateMethod:
    """A method that ``hasattr`` finds where the loader has a state, and nowhere else.

    The class itself has the plain function, for editors, ``help()`` and ``inspect.signature()``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        if loader is None:
            return self._function
        check_has_state(LoaderOptions.of(loader))
        return types.MethodType(self._function, loader)


def _state_method(method: _Method) -> _Method:
    return cast(_Method, _StateMethod(method))


class _CommitMethod:
    """The method ``commit()``, which leaves the option of the same name in ``vars()``, where
    frameworks that rebuild loaders look for it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        return self._function if loader is None else types.MethodType(self._function, loader)

    def __set__(self, loader: Any, value: Any) -> None:
        vars(loader)["commit"] = value


def _commit_method(method: _Method) -> _Method:
    return cast(_Method, _CommitMethod(method))


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Drop-in replacement for ``torch.utils.data.DataLoader``; batches arrive in shared memory.

    Takes torch's arguments in torch's order, with the same meaning: batches, their order, random
    numbers and errors match torch's. The keyword arguments from ``snapshot_every_n_steps`` on are
    penstock's. They may also be assigned as attributes; a change takes effect at the next
    ``iter()`` and restarts persistent workers.

    Args:
        dataset (Dataset): Map-style or iterable dataset to load from.
        batch_size (int | None): Number of samples per batch, 1 or more. None disables batching:
            each item of the dataset is delivered as a batch. With ``ranks``, the batch size of one
            rank. Default: 1.
        shuffle (bool | None): Draw a new random order for every epoch. Default: None, which means
            False.
        sampler (Sampler | Iterable | None): Yields the indices of the samples, in order. Mutually
            exclusive with ``shuffle``. With ``ranks``, it yields the order of all ranks and needs a
            length. Default: None.
        batch_sampler (Sampler | Iterable | None): Yields the list of indices of each batch.
            Mutually exclusive with ``batch_size``, ``shuffle``, ``sampler`` and ``drop_last``.
            Default: None.
        num_workers (int | "auto"): Number of worker processes. 0 makes the batches in this process.
            ``"auto"`` measures how long the trainer waits for batches and how long workers take to
            make them, and chooses the number accordingly; :attr:`worker_choice` has the number and
            the reason. ``"auto"`` requires ``seeding="batch"`` or ``"sample"``, with which the
            stream is the same for any number of workers, and ``shards`` for an ``IterableDataset``.
            The attribute is the number in use, at least 1, because measuring requires a worker. A
            new number takes effect in the middle of an epoch, or in the next epoch for an iterable
            dataset or with ``in_order=False``. New workers receive the dataset as it is in the
            trainer and run ``worker_init_fn``, persistent workers too. The number of workers that
            compute is limited to the CPUs available to this process (by affinity, by cgroup, and by
            its share of a machine with ``LOCAL_WORLD_SIZE`` ranks), the number of workers that wait
            for storage to four times as many, or to 32. Assigning a number disables automatic
            tuning. Default: 0.
        collate_fn (Callable[[list], Any] | None): Merges a list of samples into a batch. Default:
            None, which means torch's ``default_collate``, or ``default_convert`` without batching.
        pin_memory (bool): Deliver tensors in pinned memory. With workers, their shared memory is
            registered with CUDA, so batches are not copied for it. Default: False.
        drop_last (bool): Drop the last batch if it is incomplete. Default: False.
        timeout (float): Seconds to wait for a batch from the workers before a ``RuntimeError`` is
            raised; 0 or more. 0 waits indefinitely. Default: 0.
        worker_init_fn (Callable[[int], None] | None): Called in each worker with its number, from 0
            to ``num_workers - 1``, after seeding and before loading. In the processes of a pool it
            is called once, with 0. Default: None.
        multiprocessing_context (str | BaseContext | None): Start method of the workers: ``"fork"``,
            ``"spawn"``, ``"forkserver"`` or a context of ``multiprocessing``. With ``"spawn"`` and
            ``"forkserver"``, the dataset and the functions must be picklable. Requires
            ``num_workers`` > 0. Default: None, the default of the system.
        generator (torch.Generator | None): Source of the random order and of the workers' base
            seed. With ``ranks``, it must be in the same state on all ranks. Default: None, the
            global generator; with ``ranks``, a generator with seed 0.
        prefetch_factor (int | None): Number of batches requested ahead from each worker, 1 or more.
            Default: None, which means 2 with workers or a pool. Must be None without them.
        persistent_workers (bool): Keep the workers and their datasets between epochs. Requires
            workers or a pool. Default: False.
        pin_memory_device (str): Deprecated by torch. Default: ``""``.
        in_order (bool | int): Deliver batches in the order of the sampler. If False, a batch is
            delivered as soon as it is ready; this applies only with workers. A number N, an int of
            at least 2, bounds that: at most N batches are delivered before the oldest one that is
            not, so a slow batch holds up the others only when N of them have overtaken it. Default:
            True.
        snapshot_every_n_steps (int): Steps between snapshots of samplers and of datasets in
            workers, as in torchdata's ``StatefulDataLoader``; 0 takes none. Snapshots start with
            the first :meth:`state_dict` or :meth:`load_state_dict`; before that, no state is kept
            or sent. The state is exact after every batch regardless of this number: a resumed
            loader repeats the work since the last snapshot. Default: 1.
        device (torch.device | str | int | None): Deliver batches on this device, copied ahead of
            use on a side stream. None and the CPU leave them where torch would. At most
            ``prefetch_bytes`` bytes of batches, or 256 MiB, are on the device ahead of use, plus
            one batch; further batches wait on the host. They also wait if the device's memory is
            full; ``next()`` raises ``torch.OutOfMemoryError`` if there is no memory for the batch
            to be delivered. CUDA graphs may be captured meanwhile. With ``num_workers=0``, an
            object that is not a container is moved by its own ``to()``; an object without one is
            left as it is. ``iter()`` raises ``UnsupportedError`` if the device is not available.
            ``"auto"`` delivers batches on the host and copies ahead the tensors that the program
            copies: where the program calls ``.to(device)``, ``.cuda()`` or ``buffer.copy_(x)`` on a
            tensor of the batch, it receives a copy started when the batch arrived. Tensors that may
            be copied in this way are ``torch.Tensor`` by ``isinstance`` but not by ``type()``;
            results computed from them are plain tensors. Without workers or without a device,
            ``"auto"`` delivers plain batches. Default: None.
        seeding (str | None): How random numbers in workers are seeded. ``"worker"`` seeds each
            worker as torch does. ``"batch"`` seeds the global generators of torch, random and numpy
            before each batch, from the base seed, the epoch number and the batch's position in the
            epoch. Datasets and collate functions that draw from these generators then give the same
            stream for any ``num_workers``. With ``num_workers=0`` the trainer's generators keep
            their state. ``"sample"`` seeds these generators before each sample of a map-style
            dataset, from the sample's position in the order of the epoch, so draws do not depend on
            ``batch_size`` either. Generators private to a dataset are not seeded. A map-style
            dataset whose ``__getitem__`` has a parameter ``generator`` receives a
            ``torch.Generator`` for each sample, with which its draws do not depend on
            ``fetch_threads`` either. Default: None, which means ``"sample"`` with ``ranks`` and a
            map-style dataset, ``"batch"`` with ``pool``, with ``ranks`` and an iterable dataset, or
            with a ``replica_group`` whose ``rank`` is not given, and ``"worker"`` otherwise.
        shards (int | None): Number of shards in which an ``IterableDataset`` is read, 1 or more;
            requires ``seeding="batch"``, explicitly or by default. Each shard sees this number as
            ``get_worker_info().num_workers``, so the stream depends on it and not on
            ``num_workers``. A process that reads several shards uses copies of the dataset for all
            but the first, made by ``copy.deepcopy``. With ``ranks`` it is required, is the number
            of shards of the whole job, and must be at least ``world_size``. Default: None, one
            shard per worker.
        prefetch_bytes (int | None): Limit in bytes on the batches requested ahead, in addition to
            ``prefetch_factor``, which limits their number. A batch that has not arrived counts as
            the largest one so far. One batch is always requested. It also limits the bytes of
            batches on a CUDA ``device`` before they are delivered. Requires workers or a pool.
            Default: None, no limit.
        fetch_threads (int | str): Maximum number of threads per worker (or in the trainer with
            ``num_workers=0``) that call ``dataset[i]`` for the samples of one batch, for slow
            storage; 1 or more, or ``"auto"``. Order and errors match torch's, and ``collate_fn``
            runs as before. In a worker, threads without a sample of this batch go on with the next
            ones, up to ``prefetch_factor`` batches. The dataset must be thread-safe. With more than
            1, samples that draw from the global generators (torch, random, numpy) are not
            reproducible, because the threads share them. ``"auto"`` uses up to 32 threads while
            samples wait rather than compute, and gives the batches of one thread: it makes a batch
            again that drew from a global generator, and uses one thread from then on. A dataset
            with ``__getitems__`` is still called once per batch. Iterable
            datasets and ``batch_size=None`` allow only 1. Default: 1.
        on_error (str): Handling of a sample whose dataset or transform raises an exception.
            ``"raise"`` raises it in place of the batch. ``"skip"`` leaves the sample out of its
            batch and continues: the batch is smaller, and a batch without any sample left is
            omitted, so ``len(loader)`` is an upper limit. :attr:`skipped` lists the samples.
            ``MemoryError`` and exceptions of ``collate_fn``, ``worker_init_fn`` and the sampler are
            raised, and so is the exception of a batch without any sample left if the ranks of a job
            take the same number of steps (``shard_by_rank``, or a ``DistributedSampler``). Requires
            a map-style dataset. Default: ``"raise"``.
        max_skipped (int): Limit on the number of different samples that ``on_error="skip"`` leaves
            out over the life of the loader, including the loaders that it was resumed from; 1 or
            more. The exception of a further one is raised. Default: 100.
        overlap_epochs (bool): With ``persistent_workers``, allow workers to make the first batches
            of the next epoch while one ends and between the two. These batches are used if the next
            epoch starts as expected (no other code drew from the generators of its order), and
            dropped otherwise; the stream matches torch's either way. This applies to map-style
            datasets in sequential order or shuffled by torch's sampler, if workers can verify that
            fetching does not change the dataset and that no other process can. Pass False if the
            program writes files between epochs that the dataset reads. Default: True.
        commit (str | None): What :meth:`state_dict` covers. None: the batches that were delivered.
            ``"manual"``: the batches that the program passed to :meth:`commit`, in any order; those
            that were delivered and not committed are delivered again after a resume, once each,
            before the others. ``"auto"``: the same, and each step of an optimizer of torch commits
            all batches delivered before it, as in a loop with gradient accumulation. With
            ``ranks``, steps are committed; ranks that commit at different times merge their states
            with :func:`penstock.merge_states`. Requires a map-style dataset without a state.
            Default: None.
        pool (Pool | str | None): Pool of workers that make the batches, as a :class:`penstock.Pool`
            or, in the short form, the address of its controller, ``"tcp://host:port"``. The workers
            are on this machine or others, and may join, leave and fail during training. With
            ``num_workers`` > 0, that many processes of this trainer serve in addition. The stream
            is bit-for-bit identical to ``num_workers=0, seeding="batch"``. The dataset,
            ``collate_fn`` and ``worker_init_fn`` are sent by cloudpickle. ``prefetch_factor``,
            ``persistent_workers`` and ``timeout`` are allowed for any ``num_workers``. If a batch
            is made within 5 ms, up to 8 batches are requested ahead from each worker even if
            ``prefetch_factor`` is less, limited to 16 MiB together and to ``prefetch_bytes``.
            ``""`` means no pool. The attribute is the address in use; ``loader.keys``,
            ``loader.code_paths`` and ``loader.trust_workers`` are the other fields. Default: None,
            the pool named by the environment variable ``PENSTOCK_POOL`` or announced by
            :func:`penstock.announce_pool`, if any. If that pool cannot serve this loader, or
            ``num_workers`` is 0 with torch's seeding, a warning is issued and the pool is not used.
        ranks (Ranks | None): Ranks of a job that share the samples of this loader, or receive the
            same batches. ``Ranks()`` shares them among the ranks of the process group, or of
            torchrun. The attribute has the numbers in use, and each field is an attribute too:
            ``loader.rank``, ``loader.world_size``, ``loader.global_batch_size``,
            ``loader.remainder`` and ``loader.replica_group``. Default: None: this loader reads the
            whole dataset.
        name (str | None): Name by which displays tell the loaders of a program apart, such as
            ``"train"``: reports, traces, metrics, ``penstock top``, ``penstock doctor`` and the
            dashboard; 1 to 64 printable characters. Default: None: displays show the class of the
            dataset.
        keys (str | os.PathLike | None): Deprecated; write ``pool=Pool(address, keys=...)``.
        code_paths (Sequence[str | os.PathLike] | None): Deprecated; write ``pool=Pool(address,
            code_paths=...)``.
        trust_workers (bool): Deprecated; write ``pool=Pool(address, trust_workers=...)``.
        shard_by_rank (bool): Deprecated; write ``ranks=Ranks()``.
        rank (int | None): Deprecated; write ``ranks=Ranks(rank, world_size)``.
        world_size (int | None): Deprecated; write ``ranks=Ranks(rank, world_size)``.
        global_batch_size (int | None): Deprecated; write ``ranks=Ranks(global_batch_size=...)``.
        remainder (str | None): Deprecated; write ``ranks=Ranks(remainder=...)``.
        replica_group (ProcessGroup | DeviceMesh | Sequence[int] | None): Deprecated; write
            ``ranks=Ranks(replica_group=...)``.

    Raises:
        ValueError: If arguments have invalid values or exclude each other; also raised by
            ``iter()`` for values assigned later.
        TypeError: If an argument has the wrong type.

    Note:
        With ``num_workers`` > 0, a batch is in memory shared with the worker that made it, each
        tensor in a storage of exactly its size. The memory returns to the worker when the last
        tensor is freed; a program that keeps many batches receives copies. The environment variable
        ``PENSTOCK_ARENA_BYTES`` limits the shared memory of each worker in bytes (default:
        268435456, 256 MiB). With ``PENSTOCK_FALLBACK=error``, a fallback to torch's iterator (for
        datapipes) raises ``FallbackError``; :meth:`stats` has the reason of a fallback.

    Example::

        from penstock import DataLoader

        loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
        for images, labels in loader:
            ...
    """

    _run: LoaderRun
    _started: StartedPrefetch | None  # until the program calls iter()
    _is_closed = False
    _takes_states_at_once = False  # whether a program that makes one means to take states
    _sharding_words = "ranks=Ranks(...)"  # the argument by which ranks share one order

    name: str | None = None
    # The fields of the entries "pool" and "ranks" of vars(), from which frameworks rebuild loaders.
    pool = PoolField["str | None"]()
    keys = PoolField["str | os.PathLike[str] | None"]()
    code_paths = PoolField["Sequence[str | os.PathLike[str]] | None"]()
    trust_workers = PoolField[bool]()
    ranks: Ranks | None
    rank = RanksField["int | None"]()
    world_size = RanksField["int | None"]()
    global_batch_size = RanksField["int | None"]()
    remainder = RanksField['Literal["pad", "drop", "uneven"] | None']()
    replica_group = RanksField["tuple[int, ...] | None"]()

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
        in_order: bool | int = True,
        snapshot_every_n_steps: int = 1,
        device: torch.device | str | int | None = None,
        seeding: Literal["worker", "batch", "sample"] | None = None,
        shards: int | None = None,
        prefetch_bytes: int | None = None,
        fetch_threads: int | str = 1,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = 100,
        overlap_epochs: bool = True,
        commit: Literal["manual", "auto"] | None = None,
        pool: Pool | str | None = None,
        ranks: Ranks | None = None,
        name: str | None = None,
        keys: str | os.PathLike[str] | None | NotGiven = NOT_GIVEN,
        code_paths: Sequence[str | os.PathLike[str]] | None | NotGiven = NOT_GIVEN,
        trust_workers: bool | NotGiven = NOT_GIVEN,
        shard_by_rank: bool | NotGiven = NOT_GIVEN,
        rank: int | None | NotGiven = NOT_GIVEN,
        world_size: int | None | NotGiven = NOT_GIVEN,
        global_batch_size: int | None | NotGiven = NOT_GIVEN,
        remainder: Literal["pad", "drop", "uneven"] | None | NotGiven = NOT_GIVEN,
        replica_group: Sequence[int] | ProcessGroup | DeviceMesh | None | NotGiven = NOT_GIVEN,
    ) -> None:
        self._run, self._started = LoaderRun(self._takes_states_at_once), None
        check_name(name)
        if name is not None:  # a subclass may have a property of this name
            self.name = name
        flat = {
            "keys": keys,
            "code_paths": code_paths,
            "trust_workers": trust_workers,
            "shard_by_rank": shard_by_rank,
            "rank": rank,
            "world_size": world_size,
            "global_batch_size": global_batch_size,
            "remainder": remainder,
            "replica_group": replica_group,
        }
        flat = {name: value for name, value in flat.items() if value is not NOT_GIVEN}
        asked = read_arguments(pool, ranks, flat)
        group = ranks_of(asked.ranks.replica_group)
        sharding = None
        if asked.is_sharded:
            self._sharding_words = asked.sharding_words
            sharding = RankSharding.of(
                {
                    "rank": asked.ranks.rank,
                    "world_size": asked.ranks.world_size,
                    "global_batch_size": asked.ranks.global_batch_size,
                    "remainder": asked.ranks.remainder,
                    "share": asked.ranks.share,
                    "dataset": dataset,
                    "sampler": sampler,
                    "batch_sampler": batch_sampler,
                    "batch_size": batch_size,
                    "drop_last": drop_last,
                    "sharding_words": asked.sharding_words,
                }
            )
            if sharding.owned_count is not None:
                keep_owned(dataset, sharding.job.rank, sharding.job.world_size)
            batch_size = sharding.batch_size
            generator = order_generator() if generator is None else generator
            self.ranks = unchecked(
                asked.ranks,
                rank=sharding.job.rank,
                world_size=sharding.job.world_size,
                remainder=sharding.remainder,
                replica_group=group,
            )
        else:
            leaves = asked.ranks.leaves
            self.ranks = None if group is None else Ranks(replica_group=group, leaves=leaves)
        self.pool = unchecked(
            asked.pool,
            address=named_pool(asked.pool.address),
            keys=chosen_keys(asked.pool.keys),
        )
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.device = device
        self.seeding = seeding
        self.shards = shards
        self.prefetch_bytes = prefetch_bytes
        self.fetch_threads = fetch_threads
        self.on_error = on_error
        self.max_skipped = max_skipped
        self.overlap_epochs = overlap_epochs
        vars(self)["commit"] = as_commit_option(commit)
        if type(in_order) is int and in_order == 0:
            warn(
                "in_order=0 means in_order=False, with which any number of batches may overtake "
                "others; pass in_order=True for none",
                UserWarning,
            )
        has_pool = self.pool is not None or self.replica_group is not None
        of_workers: dict[str, Any] = {
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
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
            0 if has_pool else timeout,
            worker_init_fn,
            generator=generator,
            **({} if has_pool else of_workers),  # torch rejects them without local workers
            pin_memory_device=pin_memory_device,
            in_order=in_order,  # type: ignore[arg-type]
        )
        if has_pool:
            self._set_options_of_pool(
                timeout, prefetch_factor, persistent_workers, multiprocessing_context
            )
        else:
            use_variable(self, asked.pool.address)
        if sharding is not None and not sharding.is_stream:
            # Torch's constructor made the sampler, and torch forbids assigning batch_sampler later.
            vars(self)["batch_sampler"] = sharding.batch_sampler(self.sampler, asked.sharding_words)
        options = LoaderOptions.of(self)
        check_options(options)
        warn_of_chunks(options)
        warn_of_flat(asked, flat)
        note_new_loader(self)

    def _set_options_of_pool(
        self,
        timeout: float,
        prefetch_factor: int | None,
        persistent_workers: bool,
        multiprocessing_context: Any,
    ) -> None:
        if timeout < 0:
            raise ValueError(f"timeout must be a number of seconds, or 0 for none, got {timeout}")
        if prefetch_factor is None:
            prefetch_factor = DEFAULT_PREFETCH_FACTOR
        if type(prefetch_factor) is not int or prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be an int >= 1, got {prefetch_factor!r}")
        self.timeout = timeout
        self.prefetch_factor = prefetch_factor
        vars(self)["persistent_workers"] = persistent_workers  # torch forbids assignment
        if self.num_workers > 0 or multiprocessing_context is not None:
            self.multiprocessing_context = multiprocessing_context  # torch needs workers for it

    @property
    def shard_by_rank(self) -> bool:
        """Whether the ranks share the samples of one order. Assigning False ends that.

        Returns:
            bool: True with ``ranks``, except for a ``replica_group`` whose ``rank`` was not given.
        """
        return is_sharded(ranks_in_use(self))

    @shard_by_rank.setter
    def shard_by_rank(self, value: bool) -> None:
        if bool(value) == self.shard_by_rank:
            return
        if value:
            raise ValueError(
                "shard_by_rank must be True from the start, got True for a loader without ranks; "
                "make a new loader with ranks=Ranks()"
            )
        ranks = ranks_in_use(self)
        group, leaves = self.replica_group, None if ranks is None else ranks.leaves
        self.ranks = None if group is None else Ranks(replica_group=group, leaves=leaves)

    def __repr__(self) -> str:
        dataset = getattr(self, "dataset", None)  # the constructor may not have set it yet
        name = name_of(self)
        named = [] if name is None else [f"name={name!r}"]
        parts = [f"<{type(dataset).__name__}>", *named, *shown_options(self)]
        end = " (closed)" if self._is_closed else ""
        return f"{type(self).__name__}({', '.join(parts)}){end}"

    def __enter__(self: _Loader) -> _Loader:
        self._check_open("with")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, the connection to a pool and all iterators of this loader now.

        Without this call they end when the loader is deleted. The batches that the program has stay
        valid, and :meth:`stats`, :meth:`report` and :attr:`plan` continue to work. Afterwards
        ``iter()``, :meth:`start_prefetch`, :meth:`lookahead`, :meth:`state_dict`,
        :meth:`load_state_dict` and ``next()`` of this loader's iterators raise
        :class:`penstock.ClosedError`: take a state before. A closed loader stays closed, and a copy
        of it is open. Call this from the training thread; a second call does nothing.

        ``with DataLoader(...) as loader:`` closes the loader at the end of the block.

        Example::

            with DataLoader(dataset, num_workers=4, persistent_workers=True) as loader:
                for epoch in range(epochs):
                    for images, labels in loader:
                        ...
        """
        self._is_closed = True
        # The last one first; all of them, even if one raises or is interrupted.
        with contextlib.ExitStack() as ending:
            ending.callback(self._run.client_cache.end)
            if self._run.step_agreement is not None:
                ending.callback(self._run.step_agreement.close)
            for iterator in {*self._run.returned_iterators, *self._run.live_iterators}:
                ending.callback(_end_iterator, iterator)
            ending.callback(self._drop_started)
            if self._run.visits is not None:
                ending.callback(self._run.visits.close)
        self._iterator = self._run.newest_iterator = None
        self._run.replicas = None

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            _refuse_closed(call)

    def __iter__(self) -> BaseIterator:
        self._check_open("iter()")
        if self._run.commits is not None and self._run.commits.to_repeat:
            return cast(BaseIterator, RepeatsFirst(self))
        began_at = time.perf_counter()
        started, self._started = self._started, None
        if started is None:
            iterator: Any = begin_on_trial(self, self._begin_iterator)
        elif started.is_reusable(self):
            iterator = started.iterator
            if started.is_fresh and is_on_trial(self) and not has_sent_batch(self, iterator):
                iterator = started.restart(self, self._begin_iterator)
            iterator.begin_delivery(self._run)  # a model may have been offloaded since
        else:
            iterator = started.restart(self, self._begin_iterator)
        self._note_begun(iterator, began_at)
        return cast(BaseIterator, iterator)

    def _note_begun(self, iterator: Any, began_at: float) -> None:
        """Start the steps of an iterator, and note that the program has it."""
        begin_steps = getattr(iterator, "begin_steps", None)  # a subclass may have another iterator
        if begin_steps is not None:
            begin_steps(time.perf_counter() - began_at)
        self._run.note_iter(iterator, time.perf_counter() - began_at)

    def _end_persistent(self) -> None:
        """End the workers that persist between epochs, if there are any."""
        running = getattr(self, "_iterator", None)  # frameworks delete it
        if isinstance(running, LocalPoolIter):
            running._shutdown_workers()
        self._iterator = None

    def _begin_iterator(self) -> BaseIterator:
        return begin_sendable(self, self._check_and_begin)

    def _check_and_begin(self) -> BaseIterator:
        options, run = LoaderOptions.of(self), self._run
        check_options(options)
        live = getattr(self, "_iterator", None)  # frameworks delete it
        if isinstance(live, LocalPoolIter) and live.own_options != options.kept:
            self._end_persistent()  # they keep the dataset they were started with
        if options.shard_by_rank and not run.are_ranks_compared and options.speaks_for_group:
            facts = facts_of_shards if options.reads_shards_of_rank else facts_of
            compare_ranks(options, run, facts(options, run.epoch_start()))
            run.are_ranks_compared = True
        if options.replica_group is not None and run.replicas is None:
            check_replicable(options)
            start = facts_of_replica(options, run.epoch_start())
            run.replicas = ReplicaGroup(
                options.replica_group, start, arena_bytes(), options.leaf_readers
            )
        run.follow_copies(is_auto(options.device) and options.is_parallel and has_device())
        begin = self._iterate_pool if options.has_pool else super().__iter__
        if run.loaded_state is None or run.repeated is not None:
            return begin()
        iterator = begin_from(options, run, run.loaded_state, begin)
        run.loaded_state = None
        return iterator

    def _drop_started(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.drop(self)

    def _iterate_pool(self) -> BaseIterator:
        """Iterate as torch's ``__iter__``, whose iterator persists only with local workers."""
        if not self.persistent_workers:
            return self._get_iterator()
        if self._iterator is None:
            self._iterator = self._get_iterator()
        else:
            self._iterator._reset(self)
        return self._iterator

    @property
    def _index_sampler(self) -> Any:  # torch's name
        repeated = self._run.repeated
        return super()._index_sampler if repeated is None else repeated

    @_commit_method
    def commit(self, batch: Any) -> None:
        """Note that the program is done with a batch: no resumed loader delivers it again.

        Batches may be committed in any order and from any thread. The state then covers exactly the
        committed batches, regardless of what has been delivered since.

        Args:
            batch (Any): The batch as ``next()`` returned it, a tensor of it, or its
                :class:`penstock.BatchId`.

        Raises:
            ValueError: If the batch is committed already, was delivered by another loader or before
                :meth:`load_state_dict`, or is not known, as a copy on a device is not.
            UnsupportedError: Without ``commit="manual"`` or ``"auto"``.

        See Also:
            :meth:`batch_id`, :attr:`outstanding`

        Example::

            loader = DataLoader(prompts, batch_size=8, num_workers=4, commit="manual")
            for batch in loader:
                if step(batch):  # some steps are refused
                    loader.commit(batch)
        """
        self._ledger("commit()").commit(batch)

    def redeliver(self) -> Iterator[_T_co]:
        """Deliver the uncommitted batches of earlier epochs now.

        After :meth:`load_state_dict`, the next ``iter()`` delivers them before it continues with
        the epoch of the state. A program whose last epoch was over has no next ``iter()``: it calls
        this method.

        Returns:
            Iterator: The batches, oldest first, each once; empty if there are none.

        Raises:
            UnsupportedError: Without ``commit="manual"`` or ``"auto"``.

        See Also:
            :meth:`commit`

        Example::

            loader.load_state_dict(checkpoint["loader"])
            if checkpoint["epoch"] == epochs:
                for batch in loader.redeliver():
                    ...
        """
        self._check_open("redeliver()")
        ledger = self._ledger("redeliver()")
        return RepeatsFirst(self, has_epoch=False) if ledger.to_repeat else iter(())

    def batch_id(self, batch: Any = None) -> BatchId:
        """Return the id of a batch, which stays the same after a resume.

        Args:
            batch (Any): A batch as ``next()`` returned it, or a tensor of it. Batches without
                tensors, such as lists of strings, are known only while they are the last one.
                Default: None, the last batch that was delivered.

        Returns:
            BatchId: Two ints, which a program may save and pass to :meth:`commit` again.

        Raises:
            ValueError: If the batch is not known, as for :meth:`commit`, or none was delivered.
            UnsupportedError: Without ``commit="manual"`` or ``"auto"``.

        Example::

            for batch in loader:
                queue.put((loader.batch_id(), batch))
        """
        ledger = self._ledger("batch_id()")
        if batch is not None:
            return ledger.id_of(batch)
        if ledger.last is None:
            raise ValueError(
                "batch_id() requires a delivered batch, but this loader has delivered none since "
                "it was made or its state was loaded; call it after next()"
            )
        return ledger.last

    @property
    def outstanding(self) -> tuple[BatchId, ...]:
        """The batches that were delivered and not committed, the oldest epoch's first.

        Returns:
            tuple[BatchId, ...]: Empty without ``commit="manual"`` or ``"auto"``.
        """
        ledger = self._run.ledger(LoaderOptions.of(self))
        return () if ledger is None else ledger.outstanding

    def _ledger(self, call: str) -> CommitLedger:
        ledger = self._run.commits  # reading all options takes longer than a commit
        if ledger is None or commit_option(self) is None:
            ledger = self._run.ledger(LoaderOptions.of(self))
        if ledger is None:
            raise UnsupportedError(
                f'{call} requires commit="manual" or "auto", got commit=None, with which the state '
                f"covers the batches that were delivered; pass commit to DataLoader"
            )
        return ledger

    def record_visits(self, folder: str | os.PathLike[str] | None) -> None:
        """Record from the next ``iter()`` on which samples each step is given, in files that
        ``penstock visits`` reads.

        Each rank appends to a separate file in ``folder``: a record per batch, with its epoch,
        its step and the indices of its samples in their order, and a record when an epoch ends. A
        batch is recorded before ``next()`` returns it, in a mapping of the file: a killed process
        loses none, and a failure of the machine the ones that the system had not written yet. A
        resumed program continues the files, with any number of ranks. The stream is the same with
        and without a record.

        A record has 40 bytes for each batch and, unless the samples follow each other, as many
        bytes for each sample as the range of their indices needs: 3 for a million samples. Keys
        that are not integers are recorded as digests of their ``repr()``. Of an iterable dataset,
        only the places of batches and the lengths of their first tensors are recorded. Samples that
        ``on_error="skip"`` has left out are no visits.

        Args:
            folder (str | os.PathLike | None): Folder for the files, which is made if it does not
                exist; give each loader its own. None ends the record.

        Raises:
            ValueError: By ``iter()``, if a file of the folder is no record of visits.
            PenstockError: By ``iter()``, if another process records into the folder or a file is
                damaged; by ``next()``, if a file cannot grow.

        See Also:
            ``penstock visits``, which answers whether each epoch gave each sample once, and where
            two runs part.

        Example::

            loader.record_visits("run/visits")
            for batch in loader:
                ...
        """
        self._check_open("record_visits()")
        if folder is not None and not isinstance(folder, (str, os.PathLike)):
            raise TypeError(
                f"record_visits() requires the path of a folder, or None, got {folder!r}; pass a "
                f"string"
            )
        if self._run.visits is not None:
            self._run.visits.close()
        if self._run.progress is not None:
            self._run.progress.visits = None  # the rest of its epoch is not recorded
        self._run.visits = None if folder is None else VisitLog(os.fspath(folder))

    @property
    def plan(self) -> Plan | None:
        """The plan in use for the offloaded model, or the reason why there is none.

        Its ``workers_apart`` names the pool workers whose kernels give results with other bits than
        this process, and the families of these kernels. If the dataset reads images, its
        ``sample`` names the call that shows how they are made.

        Returns:
            Plan | None: None before :func:`penstock.offload` was called with this loader.

        See Also:
            :func:`penstock.explain_sample`: which steps of a sample are native.
        """
        plan = self._run.shown_plan()
        if plan is None:
            return None
        from penstock.images.sample_plan import reads_images

        if not reads_images(self.dataset):
            return plan
        return replace(
            plan,
            sample="The samples are images: print(penstock.explain_sample(loader.dataset)) shows "
            "which steps\nof making one are native.",
        )

    @property
    def worker_choice(self) -> _C.WorkerChoice | None:
        """The latest choice of ``num_workers="auto"``, with its reason and measurements.

        ``str()`` of it is a sentence. The number takes effect at the next ``iter()``, or is in use
        already.

        Returns:
            WorkerChoice | None: None before the first choice.

        Example::

            print(loader.worker_choice)
        """
        return self._run.tuner.choice

    @property
    def skipped(self) -> tuple[SkippedSample, ...]:
        """The samples that ``on_error="skip"`` has left out of delivered batches, each once.

        They are part of :meth:`state_dict`, except with ``shard_by_rank``, where a state belongs to
        all ranks and each rank lists the samples since its start.

        Returns:
            tuple[SkippedSample, ...]: In the order in which the samples first failed.

        Example::

            for sample in loader.skipped:
                print(sample)
        """
        return self._run.skipped.samples

    def stats(self) -> LoaderStats:
        """Return the statistics of this loader so far, over all of its iterators.

        May be called at any time from the training thread. Cheap, apart from ``cache``, for which
        all entries of a cache are counted.

        Returns:
            LoaderStats: Counts, bytes and seconds; ``print()`` shows them as text.

        Example::

            print(loader.stats().wait_s)  # seconds that the trainer waited for batches
        """
        run = self._run
        counters, work = run.totals()
        counted: dict[str, Any] = dict(counters)
        return LoaderStats(
            ledger=step_times(counted),
            workers=work.workers,
            slow_samples=tuple(work.slow_samples),
            iterator=run.iterator_kind,
            name=name_of(self),
            fallback_reason=run.fallback_reason,
            worker_choice=self.worker_choice,
            epoch_end=None if run.step_agreement is None else run.step_agreement.epoch_end,
            skipped_samples=run.skipped.times,
            cache=cache_stats_of(self.dataset),
            **counted,
        )

    def report(self) -> LoaderReport:
        """Report where the time of the steps so far went, and how to reduce it.

        May be called at any time from the training thread, for example at the end of an epoch. The
        report uses the numbers of :meth:`stats`; the command ``penstock doctor`` also tries the
        advice out.

        Returns:
            LoaderReport: ``str()`` of it shows the waiting time by cause, the share of each worker,
            the slowest samples with their indices, and a sentence or two of advice. ``to_json()``
            has the same for programs.

        Example::

            for epoch in range(epochs):
                for images, labels in loader:
                    ...
                print(loader.report())
        """
        return make_report(LoaderOptions.of(self), self._run, self.stats())

    def lookahead(self, batch_count: int, select: Callable[[Any], Any] | None = None) -> list[Any]:
        """Return the results of ``select`` for the next batches, or their indices.

        The batches are still delivered later, and looking ahead has no side effects on the stream,
        the generators or the state. It reads the stream of the newest ``iter()``; an iterator has
        this method too, for its own stream.

        Batches (with ``select``) are available as far as they are requested ahead:
        ``prefetch_factor * num_workers`` of them, or ``prefetch_factor`` with
        ``num_workers="auto"``. The call waits for them if necessary. Indices (without ``select``)
        are available to the end of the epoch with torch's samplers in batches, and as far ahead as
        batches with other samplers. With ``num_workers=0`` only indices are available, with torch's
        samplers, from the first batch on.

        Args:
            batch_count (int): Number of batches to look ahead, 1 or more.
            select (Callable[[Any], Any] | None): Called with each of these batches, for example to
                extract the ids that an embedding will look up, so that a cache can fetch them. It
                receives the same tensors that will be delivered. Tensors that it returns stay valid
                as long as they are kept, must not be written to, and show later writes of the
                program to the batch. It is called again for a batch that a later call reaches.
                Default: None, which returns indices.

        Returns:
            list: One entry per batch, in order: the result of ``select``, or the indices of the
            batch as the sampler yields them. Shorter than ``batch_count`` where the epoch ends, or
            before a batch that cannot be made, whose error ``next()`` raises in its place. Empty
            after the last batch of an epoch.

        Raises:
            ValueError: If ``batch_count`` is less than 1 or more than the number of batches
                requested ahead, or if no iterator of the loader is in use.
            TypeError: If ``batch_count`` is not an int or ``select`` is not callable.
            UnsupportedError: If batches or indices are not known ahead: with ``in_order=False``,
                for batches with ``num_workers=0``, for indices of an iterable dataset, and for
                datapipes.
            RuntimeError: If the ``timeout`` of the loader expires.

        Note:
            Batches that were looked at are held in addition to ``prefetch_bytes``. With a CUDA
            ``device`` they may be used under the stream that was current at this call.

        See Also:
            :func:`penstock.embedding_ids`: a ``select`` for the ids that an offloaded model
            computes.

        Example::

            loader = DataLoader(clicks, batch_size=512, num_workers=2, prefetch_factor=8)
            for ids, labels in loader:
                for coming in loader.lookahead(16, lambda batch: batch[0]):
                    cache.prefetch(coming)
                ...
        """
        self._check_open("lookahead()")
        return look_ahead(self._run, batch_count, select)

    def owner_of(self, index: int) -> int:
        """Return the rank that owns a sample of the dataset, for ``Ranks(share="by_cache")``.

        Each rank owns one of ``world_size`` consecutive blocks of nearly equal size. In each step,
        it gets first of all samples that it owns, so it need not keep others.

        Args:
            index (int): Index of the sample, from 0.

        Returns:
            int: Rank from 0 to ``world_size - 1``.

        Raises:
            ValueError: If the loader has no ranks that share one order, or ``index`` is not from 0
                to ``len(dataset) - 1``.
        """
        options = LoaderOptions.of(self)
        if not options.is_same_on_all_ranks:
            raise ValueError(
                "owner_of() requires ranks that share the samples of a map-style dataset, got a "
                "loader without; pass ranks=Ranks(share='by_cache')"
            )
        count = len(options.dataset)
        if not 0 <= index < count:
            raise ValueError(
                f"index must be from 0 to {count - 1}, got {index}; pass the index of a sample"
            )
        return _C.owners_of([index], count, options.job_rank.world_size)[0]

    def start_prefetch(self) -> None:
        """Start making the batches of the next ``iter()``; return without waiting for them.

        Call this before work that takes a while, such as loading a model's checkpoint: it starts
        the workers, or joins the pool, and requests the first batches, as many as ``iter()`` does.
        The next ``iter()`` returns that iterator. Further calls before it have no effect. After
        :meth:`load_state_dict`, prefetching starts at the position of the state. With ``ranks``,
        the ranks compare their loaders here.

        The random numbers for ``iter()`` are drawn here, from the current state of the generators,
        so the stream is the same as if ``iter()`` were called here. Until ``iter()`` is called,
        :meth:`state_dict` returns the state before ``start_prefetch()``.

        ``iter()`` discards the iterator and makes another from the same draws if the program
        meanwhile assigns an option, seeds a ``generator``, or changes an attribute of a sampler or
        of the dataset that is a number or text (``set_epoch()`` does). :meth:`load_state_dict`,
        pickling and copying discard it too. The global generators are then restored, unless the
        program has drawn from them since. Other changes of the dataset do not reach running
        workers, and draws that persistent workers have made for discarded batches are not undone.

        Raises:
            UnsupportedError: With ``num_workers=0`` and no pool, where batches cannot be made ahead
                (ignoring the call would leave the draws to ``iter()``, so the stream would depend
                on the number of workers), and for datapipes.
            ValueError: While an iterator is in use in the middle of an epoch.
            Exception: Any exception that ``iter()`` raises.

        Example::

            loader.load_state_dict(checkpoint["loader"])
            loader.start_prefetch()
            model.load_state_dict(checkpoint["model"])  # the workers make batches meanwhile
            for batch in loader:
                ...
        """
        self._check_open("start_prefetch()")
        check_can_start(self)
        if self._run.commits is not None and self._run.commits.to_repeat:
            raise UnsupportedError(
                "start_prefetch() does not support a loaded state with uncommitted batches of "
                "earlier epochs, which iter() delivers first; leave the call out"
            )
        if self._started is None or not self._started.is_reusable(self):
            self._drop_started()
            self._started = StartedPrefetch(self, self._begin_iterator)

    @_state_method
    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position in its stream, for :meth:`load_state_dict`.

        In the middle of an epoch, another loader built with the same arguments resumes with the
        first batch that was not delivered, including batches that workers had already started. May
        be called at any time from the training thread. The first call makes later batches carry the
        information that a state needs; resuming from a first state in the middle of an epoch may
        take long. With ``in_order=False`` the state also has the positions of the batches that
        others have overtaken, and a batch that raised an error is made again.

        Returns:
            dict[str, Any]: JSON-serializable if the states of the dataset and the sampler are.

        Raises:
            UnsupportedError: For datapipes, and for workers with ``in_order=False`` and ``ranks``,
                unless they commit. The attribute does not exist then for ``hasattr()``.
            RuntimeError: If a dataset or a sampler does not return its state.

        Example::

            for step, batch in enumerate(loader):
                ...
                if step == 100:
                    torch.save(loader.state_dict(), "loader.pt")
        """
        self._check_open("state_dict()")
        drop_pool_if_unsendable(self)
        options = LoaderOptions.of(self)
        self._run.want_states(options)
        if self._started is not None:
            return with_commits(options, self._run, self._started.state)
        running = getattr(self, "_iterator", None)
        return state_of_now(options, self._run, running, asks_workers=True)

    def load_state_dict(
        self, state_dict: dict[str, Any], *, allow_other_data: bool = False
    ) -> None:
        """Resume from a state: the next ``iter()`` continues where ``state_dict`` was taken.

        Stops persistent workers.

        Args:
            state_dict (dict[str, Any]): Result of :meth:`state_dict` of a loader built with the
                same arguments, or of :func:`penstock.merge_states`. An empty dictionary starts a
                new epoch, with a warning.
            allow_other_data (bool): Resume although the dataset's data has another version than the
                state names, so that the rest of the stream has other samples. The environment
                variable ``PENSTOCK_ALLOW_OTHER_DATA=1`` does the same for all loaders.

        Raises:
            ValueError: If this loader's stream would differ from the stream of the loader that the
                state was taken from, or if its data has another version.
            TypeError: If ``state_dict`` is not a mapping.
            UnsupportedError: If the loader has no state, as for :meth:`state_dict`.

        Example::

            loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)
            loader.load_state_dict(torch.load("loader.pt"))
            for batch in loader:  # the first batch that was not delivered
                ...
        """
        self._check_open("load_state_dict()")
        drop_pool_if_unsendable(self)
        options = LoaderOptions.of(self)
        check_has_state(options)
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"load_state_dict() requires a dictionary that state_dict() returned, got "
                f"{state_dict!r}; check under which name the checkpoint stores it"
            )
        if state_dict:
            state_dict = part_of_rank(options, dict(state_dict))
            drop_pool_if_state_has_none(self, state_dict)
            options = LoaderOptions.of(self)
            check_state(options, state_dict)
            state_dict = with_data_checked(
                options, self._run, state_dict, allow_other_data=allow_other_data
            )
            self._run.skipped.load(state_dict)
        else:
            warn(
                "load_state_dict() received an empty dictionary, so the loader starts a new epoch "
                "at its first batch; pass a result of state_dict() to resume",
                UserWarning,
            )
        self._run.wants_states = True
        self._drop_started()
        self._end_persistent()
        self._run.begin_at(copied_state(dict(state_dict)) or None)
        ledger = self._run.ledger(options)
        if ledger is not None:
            ledger.load(commits_of(options, state_dict))

    def reshard(
        self,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Continue as another rank, or with another number of ranks, from the next step on.

        Call this between two steps, on each rank of the new size and after the same step. The
        iterator in use continues: the ranks share the samples that no rank has been given, as ranks
        of that size would that resume from the job's state. Its workers and its connection to a
        pool stay; batches that they have made ahead are made again where another rank needs them.
        The workers of an iterable dataset are restarted, because each has its shards. Between two
        epochs the numbers apply to the next epoch. With ``commit``, steps that are not committed
        are delivered once more, divided over the new ranks.

        A rank that joins is started with ``ranks=Ranks(rank, world_size)`` of the new size, loads
        the state of any old rank with :meth:`load_state_dict`, and calls this method too. A rank
        that leaves calls :meth:`close`. The ranks of the new size meet in the job's store, as for
        their first batch, and either all of them change or none.

        Args:
            rank (int | None): New rank of this process. Default: None, with ``world_size=None``
                the rank in the present process group, or the rank that torchrun has set.
            world_size (int | None): New number of ranks. Default: None, as for ``rank``.
            state (Mapping[str, Any] | None): State of the job to continue from, the same on all
                ranks. In the middle of an epoch of an iterable dataset it is required, and is the
                result of :func:`penstock.merge_states`. An earlier state repeats the steps after
                it, for example a step in which a rank has died. Default: None, the present state.

        Raises:
            RankError: If the ranks call this with different sizes or after different steps, or one
                of them does not call it within 10 minutes. The loader continues at its old size.
            ValueError: If the numbers, or the batch size for them, are not possible, or ``state``
                is of another loader or of one rank only, or if steps of earlier epochs are not
                committed in the middle of an epoch.
            UnsupportedError: Without ``ranks``, with a ``replica_group``, with ``in_order=False``
                unless steps are committed, for a map-style dataset with a state, for a sampler
                without one that is not torch's, and between :meth:`start_prefetch` and ``iter()``.

        See Also:
            :func:`penstock.merge_states`, :meth:`state_dict`

        Example::

            for batch in loader:
                ...
                if group.has_changed():  # the program's own way to form a new process group
                    group.form()
                    loader.reshard(dist.get_rank(), dist.get_world_size())
        """
        self._check_open("reshard()")
        drop_pool_if_unsendable(self)
        options = LoaderOptions.of(self)
        check_can_reshard(options)
        if self._started is not None:
            raise UnsupportedError(
                "reshard() does not support a loader whose next epoch start_prefetch() has "
                "started; call it before start_prefetch(), or after iter()"
            )
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(
                f"state must be a dictionary that state_dict() or merge_states() returned, got "
                f"{state!r}; leave it out to continue from the present state"
            )
        reshard(self, JobRank.of(rank, world_size), self.state_dict(), state)

    def _get_iterator(self) -> BaseIterator:
        options, run = LoaderOptions.of(self), self._run
        if options.is_datapipe:
            return self._fall_back(
                "the dataset is a datapipe, which only torch's iterator shards and seeds"
            )
        if options.has_pool:
            # Here, since only pools need the code that packs and ships jobs.
            from penstock.loader.pool_iterator import PoolIter

            run.iterator_kind = "pool"
            return PoolIter(self)
        if options.num_workers == 0:
            run.iterator_kind = "torch"
            staged_device(options.device)
            return SingleProcessIter(self)
        iterator: LocalPoolIter
        if isinstance(options.num_workers, AutomaticCount):  # measured to be rational
            iterator = AutomaticPoolIter(self)
        else:
            self.check_worker_number_rationality()
            iterator = LocalPoolIter(self)
        run.iterator_kind = "penstock"
        return iterator

    def _fall_back(self, reason: str) -> BaseIterator:
        if os.environ.get("PENSTOCK_FALLBACK") == "error":
            raise FallbackError(
                f"torch's iterator would be used here ({reason}), but PENSTOCK_FALLBACK=error "
                f"forbids that; unset it to permit torch's iterator"
            )
        self._run.fallback_reason = reason
        self._run.iterator_kind = "fallback"
        iterator = super()._get_iterator()
        watch_torch_iterator(iterator, self)
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        # State that belongs to this process stays here.
        self._drop_started()
        state = {name: value for name, value in vars(self).items() if name not in _LEFT_HERE}
        return {**state, "_run": self._run.copied_fields()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The state may be from torch's loader, pickled where penstock was not installed.
        run = LoaderRun(self._takes_states_at_once)
        vars(run).update(state.get("_run", {}))
        self.__dict__.update({**DEFAULTS, **state, "_run": run, "_started": None})


def _end_iterator(iterator: Any) -> None:
    """End its workers or release its local resources; ``next()`` then raises ClosedError."""
    # Replaces the methods, so that an open loader need not check whether it is closed.
    vars(iterator).update(
        _next_data=lambda: _refuse_closed("next()"),
        lookahead=lambda *arguments, **named: _refuse_closed("lookahead()"),
    )
    # Both torch's iterator of workers and ours have this one.
    end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "release", None)
    if end is not None:
        end()


def _refuse_closed(call: str) -> NoReturn:
    raise ClosedError(f"{call} requires an open DataLoader, but this one is closed; make a new one")
