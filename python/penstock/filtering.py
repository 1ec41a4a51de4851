# SPDX-License-Identifier: Apache-2.0
"""Filters of map-style data: the samples that a predicate accepts, found by workers ahead of use.

The result is an order of indices, so everything that follows from an order of indices is unchanged:
ranks, states, pools, samplers and commits. A filter inside of a stream would make the number of
steps unknown before its end, on which ranks have to agree.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import reprlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset

from penstock import _C
from penstock.errors import RankError
from penstock.loader.dataloader import DataLoader
from penstock.loader.grouped_arguments import Pool, Ranks
from penstock.ranks.job_store import read_of_ranks, restart_prefix, stores_of_job
from penstock.ranks.sharding import JobRank
from penstock.stream.batch_seeds import accepts_generator, below_subsets, selected

_T = TypeVar("_T")
_Answers = np.ndarray[Any, np.dtype[np.bool_]]

_PIECE_MAX = 1 << 22  # samples of one message to other ranks; a store takes up to 8 MiB
_PIECES_PER_RANK = 64
_FORMAT = "penstock selection 1"


def filtered(
    dataset: Dataset[_T],
    predicate: Callable[[Any], bool],
    *,
    inputs: Any = None,
    num_workers: int | Literal["auto"] = 0,
    fetch_threads: int | str = 1,
    pool: Pool | str | None = None,
    ranks: Ranks | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Subset[_T]:
    """Select the samples of a map-style dataset that a predicate accepts.

    Workers read each sample once, or each item of ``inputs``, and call the predicate with it. The
    result has the accepted samples in the dataset's order, and is used like any dataset: batches
    are full, its length is known, all ranks of a job have the same number of steps, and a loader's
    state resumes with any number of workers and ranks. It is the same for any ``num_workers``,
    ``pool`` and ``ranks``. A state that was taken with another selection is refused.

    The predicate must give the same answer whenever it sees a sample. One percent of the samples,
    at least 64 and at most 4096, are evaluated twice, and a different answer is an error: for
    example of a predicate that draws random numbers or remembers earlier samples, or of a dataset
    with random augmentation that the predicate looks at.

    Args:
        dataset (Dataset): Map-style dataset with a length.
        predicate (Callable[[Any], bool]): Called with a sample; True accepts it. It must be
            picklable where the dataset must be: with spawned workers, and by cloudpickle with a
            pool.
        inputs (Sequence | Dataset | None): What the predicate is called with in the place of
            samples: item i belongs to sample i. For lengths, labels or other columns that are
            cheaper to read than samples. Default: None, the samples.
        num_workers (int | "auto"): Number of worker processes, as in :class:`DataLoader`. Default:
            0, this process.
        fetch_threads (int | str): Threads in each worker that read samples, as in
            :class:`DataLoader`. Default: 1.
        pool (Pool | str | None): Pool of workers, as in :class:`DataLoader`. Default: None.
        ranks (Ranks | None): Share the evaluation among the ranks of a job, each of which must call
            this function. Ranks exchange the results in the job's store. Default: None, each
            process evaluates all samples.
        cache (str | os.PathLike | None): File for the result. If it exists, it is read instead of
            evaluating all samples, and compared with the answers for the samples above. With
            ``ranks``, only the first rank uses it. Default: None.
        progress (Callable[[int, int], object] | None): Called in this process with the number of
            samples evaluated so far, and with their total number in this process. Default: None.

    Returns:
        Subset: The accepted samples. Its ``indices`` are 8 bytes for each of them, which workers
        share.

    Raises:
        ValueError: If no sample is accepted; if the predicate raises, returns anything but True or
            False, or gives another answer than before; if ``cache`` is of another dataset or
            predicate; or if an argument is invalid.
        TypeError: If an argument has the wrong type.
        RankError: If another rank fails, or has made no progress for 10 minutes.

    See Also:
        :class:`Packer`, which leaves out empty documents while it reads; ``on_error="skip"`` of
        :class:`DataLoader`, for samples that cannot be read.

    Example::

        kept = penstock.filtered(images, lambda sample: min(sample[0].shape[1:]) >= 224,
                                 num_workers=8, cache="kept.idx")
        loader = penstock.DataLoader(kept, batch_size=64, shuffle=True, num_workers=8)
    """
    _check(dataset, predicate, inputs, ranks)
    source: Any = dataset if inputs is None else inputs
    work = _Work.of(len(source), _Exchange.of(ranks))
    file = None if cache is None else Path(cache)
    options = {"num_workers": num_workers, "fetch_threads": fetch_threads, "pool": pool}
    accepted = _evaluate(_verdicts(source, predicate), work, options, file, progress)
    indices = array("q")
    indices.frombytes(np.flatnonzero(accepted).astype(np.int64).tobytes())
    if not indices:
        raise ValueError(
            f"predicate must accept at least one sample, got none of {work.sample_count}; print "
            f"its argument and its result"
        )
    kept = Subset(dataset, indices)
    # For states and for the comparison of ranks.
    kept.selection = hashlib.sha256(indices).hexdigest()[:16]  # type: ignore[attr-defined]
    return kept


def _check(dataset: Any, predicate: Any, inputs: Any, ranks: Any) -> None:
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map:
        raise ValueError(
            f"dataset must be map-style, with __getitem__() and __len__(), got "
            f"{type(dataset).__name__}; leave samples out of an iterable dataset in its __iter__()"
        )
    if len(dataset) == 0:
        raise ValueError(f"dataset must have at least one sample, got an empty {_name(dataset)}")
    if not callable(predicate):
        raise TypeError(
            f"predicate must be callable, got {reprlib.repr(predicate)}; pass a function that "
            f"returns True for the samples to keep"
        )
    if inputs is not None and len(inputs) != len(dataset):
        raise ValueError(
            f"inputs must have one item for each of the {len(dataset)} samples, got {len(inputs)}; "
            f"pass a sequence in the order of the dataset"
        )
    if ranks is not None and not isinstance(ranks, Ranks):
        raise TypeError(f"ranks must be a Ranks or None, got {ranks!r}; pass Ranks()")
    if ranks is not None and ranks.replica_group is not None:
        raise ValueError(
            "ranks must have no replica_group, since all processes of the job share the "
            "evaluation; pass Ranks()"
        )


def _name(value: Any) -> str:
    return type(value).__name__


class _Exchange(NamedTuple):
    """This process among those that share the evaluation, and their store."""

    job: JobRank
    store: Any  # None for one process

    @staticmethod
    def of(ranks: Ranks | None) -> _Exchange:
        if ranks is None:
            return _Exchange(JobRank(0, 1), None)
        job = JobRank.of(ranks.rank, ranks.world_size)
        if job.world_size == 1:
            return _Exchange(job, None)
        stores = stores_of_job()
        if not stores:
            raise ValueError(
                f"ranks requires a process group or torchrun, by which {job.world_size} ranks "
                f"exchange their results, got neither; call torch.distributed.init_process_group(),"
                f" or leave ranks out"
            )
        prefix, store = f"{restart_prefix()}/filters", stores[0]
        number = store.add(f"{prefix} of rank {job.rank}", 1)
        store = dist.PrefixStore(f"{prefix}/{number}", store)  # type: ignore[attr-defined]
        return _Exchange(job, store)

    def share(self, key: str, value: Any) -> None:
        if self.store is not None:
            self.store.set(key, json.dumps(value))

    def read(self, key: str, owner: int) -> Any:
        found = read_of_ranks(
            self.store,
            {owner: key},
            who=f"rank {self.job.rank} of {self.job.world_size}",
            task="evaluate its part of the samples",
            duty="call penstock.filtered() with the same arguments",
        )[owner]
        if isinstance(found, dict) and "error" in found:
            raise RankError(
                f"rank {owner} could not evaluate its part of the samples: {found['error']}"
            )
        return found

    def end(self, keys: Sequence[str]) -> None:
        """Delete the results once all ranks have read them."""
        if self.store is not None and self.store.add("readers", 1) == self.job.world_size:
            for key in [*keys, "cached", "readers"]:
                self.store.delete_key(key)


class _Work(NamedTuple):
    """The samples to evaluate, in pieces that the ranks evaluate in turn."""

    sample_count: int
    chunk_size: int
    piece_size: int
    spots: np.ndarray[Any, Any]  # samples to evaluate once more
    exchange: _Exchange

    @staticmethod
    def of(sample_count: int, exchange: _Exchange) -> _Work:
        pieces = exchange.job.world_size * _PIECES_PER_RANK
        return _Work(
            sample_count,
            chunk_size=_C.samples_per_request(sample_count),
            piece_size=min(_PIECE_MAX, -(-sample_count // pieces)),
            spots=np.array(_C.samples_evaluated_twice(sample_count), dtype=np.int64),
            exchange=exchange,
        )

    @property
    def pieces(self) -> list[range]:
        starts = range(0, self.sample_count, self.piece_size)
        return [range(at, min(at + self.piece_size, self.sample_count)) for at in starts]

    def own_spots(self) -> np.ndarray[Any, Any]:
        rank, world_size = self.exchange.job
        return self.spots[rank::world_size]


def _evaluate(
    verdicts: _Verdicts,
    work: _Work,
    options: dict[str, Any],
    file: Path | None,
    progress: Callable[[int, int], object] | None,
) -> _Answers:
    """Return the answers for all samples, of which this rank evaluates its part."""
    exchange = work.exchange
    rank, world_size = exchange.job
    cached = None
    if rank == 0:
        try:
            cached = None if file is None else _read(file, work.sample_count)
        except ValueError as error:
            exchange.share("cached", _failure(error))
            raise
        exchange.share("cached", cached is not None)
    is_cached = cached is not None if exchange.store is None else exchange.read("cached", 0)
    accepted = np.zeros(work.sample_count, dtype=np.bool_) if cached is None else cached
    owners = [0 if is_cached else at % world_size for at in range(len(work.pieces))]
    own = [at for at, owner in enumerate(owners) if owner == rank]
    shared = 0
    try:
        to_evaluate = [] if is_cached else [work.pieces[at] for at in own]
        answers = _answers(verdicts, _Chunks(to_evaluate, work), options, progress)
        for at in own:
            piece = work.pieces[at]
            if not is_cached:
                for start in range(piece.start, piece.stop, work.chunk_size):
                    found = next(answers)
                    accepted[start : start + len(found)] = found
            bits = np.packbits(accepted[piece.start : piece.stop])
            exchange.share(str(at), bits.tobytes().hex())
            shared += 1
        again = np.concatenate([*answers, np.zeros(0, np.bool_)])
    except Exception as error:
        for at in own[shared:]:
            exchange.share(str(at), _failure(error))
        raise
    for at, owner in enumerate(owners):
        if owner != rank:
            piece = work.pieces[at]
            bits = np.frombuffer(bytes.fromhex(exchange.read(str(at), owner)), dtype=np.uint8)
            accepted[piece.start : piece.stop] = np.unpackbits(bits, count=len(piece))
    exchange.end([str(at) for at in range(len(owners))])
    _compare(accepted, again, work.own_spots(), file if is_cached else None)
    if file is not None and rank == 0 and not is_cached:
        _write(file, accepted)
    return accepted


def _failure(error: Exception) -> dict[str, str]:
    return {"error": f"{_name(error)}: {error}"}


def _answers(
    verdicts: _Verdicts,
    chunks: _Chunks,
    options: dict[str, Any],
    progress: Callable[[int, int], object] | None,
) -> Iterator[_Answers]:
    done_count, total_count = 0, chunks.sample_count
    with DataLoader(
        verdicts,
        batch_sampler=chunks,
        collate_fn=_joined,
        seeding="batch",  # keeps the trainer's generators, too
        generator=torch.Generator(),
        name="filter",
        **options,
    ) as loader:
        for answers in loader:
            yield answers.numpy()
            done_count += len(answers)
            if progress is not None:
                progress(done_count, total_count)


def _joined(answers: list[bool]) -> torch.Tensor:
    return torch.tensor(answers, dtype=torch.bool)


class _Chunks(Sampler[list[int]]):
    """The samples of each request: first of the pieces, then the samples to evaluate again."""

    def __init__(self, pieces: Sequence[range], work: _Work) -> None:
        self.pieces, self.size = pieces, work.chunk_size
        self.again: list[int] = work.own_spots().tolist()

    @property
    def sample_count(self) -> int:
        return sum(map(len, self.pieces)) + len(self.again)

    def __len__(self) -> int:
        parts: Iterator[Sequence[int]] = itertools.chain(self.pieces, [self.again])
        return sum(-(-len(part) // self.size) for part in parts)

    def __iter__(self) -> Iterator[list[int]]:
        parts: Iterator[Sequence[int]] = itertools.chain(self.pieces, [self.again])
        for part in parts:
            for start in range(0, len(part), self.size):
                yield list(part[start : start + self.size])


class _Verdicts(Dataset[bool]):
    """The predicate's answers for the items of a dataset."""

    def __init__(self, dataset: Any, predicate: Callable[[Any], bool]) -> None:
        self.dataset, self.predicate = dataset, predicate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> bool:
        return self.judge(self.dataset[index], index)

    def judge(self, sample: Any, index: int) -> bool:
        try:
            answer: Any = self.predicate(sample)
        except Exception as error:
            raise ValueError(
                f"predicate must return True or False for every sample, but raised "
                f"{_name(error)}: {error} for sample {index}; handle this sample in the predicate"
            ) from error
        is_tensor = isinstance(answer, torch.Tensor) and answer.dtype == torch.bool
        if isinstance(answer, (bool, np.bool_)) or (is_tensor and answer.dim() == 0):
            return bool(answer)
        raise ValueError(
            f"predicate must return True or False, got {reprlib.repr(answer)} of type "
            f"{_name(answer)} for sample {index}; return bool(...)"
        )


class _BatchVerdicts(_Verdicts):
    """The same for a dataset that reads lists of indices."""

    def __getitems__(self, indices: list[int]) -> list[bool]:
        samples = self.dataset.__getitems__(indices)
        return [self.judge(one, index) for one, index in zip(samples, indices, strict=True)]


class _SeededVerdicts(_Verdicts):
    """The same for a dataset that takes the generator of each sample."""

    def __getitem__(self, index: int, generator: Any = None) -> bool:
        dataset, place = selected(self.dataset, index)
        return self.judge(dataset.__getitem__(place, generator=generator), index)


def _verdicts(source: Any, predicate: Callable[[Any], bool]) -> _Verdicts:
    if getattr(below_subsets(source), "__getitems__", None):
        return _BatchVerdicts(source, predicate)
    if accepts_generator(source):
        return _SeededVerdicts(source, predicate)
    return _Verdicts(source, predicate)


def _compare(
    accepted: _Answers, again: _Answers, spots: np.ndarray[Any, Any], cache: Path | None
) -> None:
    wrong = spots[accepted[spots] != again]
    if not len(wrong):
        return
    sample, first = wrong[0], accepted[wrong[0]]
    if cache is not None:
        raise ValueError(
            f"cache must be of the same dataset and predicate, but {cache} has {first} for sample "
            f"{sample} and the predicate returned {not first}; delete the file, or name another"
        )
    raise ValueError(
        f"predicate must give the same answer for the same sample, got {first} and then "
        f"{not first} for sample {sample} ({len(wrong)} of {len(spots)} samples evaluated twice "
        f"differ); use no random numbers and nothing remembered of other samples, and filter data "
        f"before its random augmentation, for example with inputs="
    )


def _read(file: Path, sample_count: int) -> _Answers | None:
    """Return the answers of a cache file; None without one."""
    try:
        head, _, bits = file.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    try:
        found = json.loads(head)
        is_whole = (
            found["format"] == _FORMAT and found["sha256"] == hashlib.sha256(bits).hexdigest()
        )
    except (ValueError, TypeError, KeyError):
        is_whole = False
    if not is_whole:
        raise ValueError(
            f"cache must be a file that penstock.filtered() has written, got another or a damaged "
            f"one in {file}; delete it, or name another"
        )
    if found["samples"] != sample_count:
        raise ValueError(
            f"cache must be of the same dataset, with {sample_count} samples, got {file} of "
            f"{found['samples']} samples; delete it, or name another"
        )
    answers = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=sample_count)
    return answers.astype(np.bool_)


def _write(file: Path, accepted: _Answers) -> None:
    bits = np.packbits(accepted).tobytes()
    head = {
        "format": _FORMAT,
        "samples": len(accepted),
        "accepted": int(accepted.sum()),
        "sha256": hashlib.sha256(bits).hexdigest(),
    }
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        new.write_bytes(json.dumps(head).encode() + b"\n" + bits)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
