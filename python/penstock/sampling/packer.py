# SPDX-License-Identifier: Apache-2.0
"""Rows of a fixed length, packed from documents of different lengths."""

from __future__ import annotations

import base64
import json
import numbers
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from penstock import _C
from penstock.ranks.sharding import JobRank

_STATE_VERSION = 1
_POLICIES = ("best_fit", "next_fit")
_TOO_LONG = ("error", "split", "drop")
_TOKENS = "tokens"  # name of the stream of documents that are bare sequences
_MADE = ("positions", "segment_ids", "cu_seqlens", "max_seqlen")
_COUNTS = (
    *("documents", "empty_documents", "split_documents", "dropped_documents", "dropped_tokens"),
    *("rows", "row_tokens"),
)

_Part = tuple[int, int, int]  # number of the document, first token, number of tokens
_Streams = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class PackerStats:
    """Counts of one pass of a :class:`Packer` over its documents, over all ranks.

    Attributes:
        documents (int): Documents read and placed, including empty, split and dropped ones.
        empty_documents (int): Documents without tokens; they are in no row.
        split_documents (int): Documents longer than a row that were split.
        dropped_documents (int): Documents longer than a row that were left out.
        dropped_tokens (int): Tokens of the documents that were left out.
        rows (int): Rows that are complete, delivered or not.
        tokens (int): Tokens of documents in these rows.
        padding_tokens (int): Tokens of padding in these rows.
        steps (int): Batches delivered to each rank.
        padding_rows (int): Rows of padding alone that completed the last step.
        dropped_rows (int): Rows left out because they did not fill the last step.
    """

    documents: int
    empty_documents: int
    split_documents: int
    dropped_documents: int
    dropped_tokens: int
    rows: int
    tokens: int
    padding_tokens: int
    steps: int
    padding_rows: int
    dropped_rows: int

    @property
    def padding_fraction(self) -> float:
        """Share of padding in the complete rows, from 0 to 1; 0 without rows."""
        whole = self.tokens + self.padding_tokens
        return self.padding_tokens / whole if whole else 0.0


@dataclass(slots=True)
class _Held:
    """Tokens of a document that are in rows not delivered yet."""

    first: int  # index of the first token of `streams` in the document
    needed: int  # index of the first token that is in no delivered row
    length: int  # of the document
    streams: _Streams

    def part(self, stream: int, first: int, length: int) -> torch.Tensor:
        whole = self.streams[stream]
        # Most documents are in one row.
        if length == whole.shape[0]:
            return whole
        return whole.narrow(0, first - self.first, length)


@dataclass(slots=True)
class _Pass:
    """One pass over the documents."""

    native: _C.Packer
    source: Iterator[Any] | None = None  # None: over, or not opened yet
    element_count: int = 0  # pulled from the source
    document_count: int = 0  # placed
    token_count: int = 0  # of the documents placed
    pending: deque[Any] = field(default_factory=deque)  # documents of the last element
    held: dict[int, _Held] = field(default_factory=dict)  # by number of the document
    ready: deque[list[_Part]] = field(default_factory=deque)  # complete rows
    is_ended: bool = False  # all documents are placed, and the bins are closed
    step_count: int = 0
    padding_row_count: int = 0
    dropped_row_count: int = 0


class _Restored(NamedTuple):
    """A pass of a state, and the tokens that a source without a state must have given before it."""

    begun: _Pass
    token_count: int
    opens_source: bool


class Packer:
    """Pack documents of different lengths into rows of one length, for training on sequences.

    Iterate over it in the place of the loader that delivers the documents. The rows are a function
    of the documents and their order alone: they are the same for any number of workers and ranks.
    With several ranks, every rank reads all documents, and the rows are dealt out to the ranks in
    turn, so all ranks have the same number of steps, and a state resumes with any number of ranks.

    A document is placed in the open bin that has the least room for it. If it fits none, a new bin
    is opened, and the fullest one is closed first if ``open_bins`` are open. Of bins with the same
    room, the oldest is chosen. A full bin is closed, and so are all bins after the last document,
    the fullest first. Each closed bin is a row.

    Each batch is a dictionary with the packed streams and these entries. N is ``batch_size`` and L
    ``row_length``; without a ``batch_size``, tensors have the shape (L,) instead of (N, L).

    - ``"positions"``: int64 (N, L), positions in the document, from 0. They start again at 0 in
      each part of a split document and in the padding.
    - ``"segment_ids"``: int32 (N, L), number of the document in its row, from 1; 0 for padding.
    - ``"cu_seqlens"``: int32 (segments + 1,), starts of the segments in the N * L tokens of the
      batch, and N * L, for attention of variable length. The padding of a row is one segment.
    - ``"max_seqlen"``: int, tokens of the longest segment.

    Args:
        documents (Iterable): Documents, or lists of documents, such as a :class:`DataLoader` with
            ``batch_size=None`` or ``collate_fn=list``. A document is a sequence of numbers, in a
            list, an array or a tensor of one dimension; or a mapping from names of streams to such
            sequences, all of the same length.
        row_length (int): Tokens in a row, 1 or more.
        padding (float | Mapping[str, float]): Value of padding; or for documents that are mappings,
            the value for each stream to pack, by name: other entries are left out. With a number,
            the streams are the entries of the first document, or ``"tokens"`` if documents are
            sequences. Default: 0.
        policy (str): ``"best_fit"``, or ``"next_fit"``: one bin is open, and rows keep the order of
            the documents. Default: ``"best_fit"``.
        open_bins (int): Maximum number of open bins with ``"best_fit"``, 1 or more. More bins mean
            less padding, a larger state, and documents that are farther from their place in the
            order. Default: 64.
        too_long (str): Handling of a document with more than ``row_length`` tokens: ``"error"``
            raises, ``"split"`` makes full rows of its beginning and places the rest like a
            document, ``"drop"`` leaves it out. Default: ``"error"``.
        batch_size (int | None): Rows in a batch of one rank, 1 or more. Default: None, single rows.
        remainder (str): Handling of the last rows if they do not fill a step: ``"pad"`` adds rows
            of padding alone, ``"drop"`` leaves them out. Default: ``"pad"``.
        rank (int | None): Rank of this process. Default: None, the rank in the default process
            group, else the variable ``RANK``, else 0.
        world_size (int | None): Number of ranks. Default: None, from the process group, else from
            ``WORLD_SIZE``, else 1.

    Raises:
        ValueError: If an argument has an invalid value.

    Example::

        loader = penstock.DataLoader(documents, batch_size=64, collate_fn=list, num_workers=4)
        for batch in penstock.Packer(loader, 4096, too_long="split"):
            ...
    """

    def __init__(
        self,
        documents: Iterable[Any],
        row_length: int,
        *,
        padding: float | Mapping[str, float] = 0,
        policy: Literal["best_fit", "next_fit"] = "best_fit",
        open_bins: int = 64,
        too_long: Literal["error", "split", "drop"] = "error",
        batch_size: int | None = None,
        remainder: Literal["pad", "drop"] = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(documents, Iterable):
            raise ValueError(
                f"documents must be iterable, got {type(documents).__name__}; pass a DataLoader or "
                f"another iterable of documents"
            )
        self.documents = documents
        self.row_length = _checked_count("row_length", row_length)
        self.open_bins = _checked_count("open_bins", open_bins)
        self.batch_size = None if batch_size is None else _checked_count("batch_size", batch_size)
        self.policy = _checked_choice("policy", policy, _POLICIES)
        self.too_long = _checked_choice("too_long", too_long, _TOO_LONG)
        self.remainder = _checked_choice("remainder", remainder, ("pad", "drop"))
        self.rank, self.world_size = JobRank.of(rank, world_size)
        self.padding = dict(padding) if isinstance(padding, Mapping) else padding
        # The streams; None until the first document, if it determines them.
        self._names: tuple[str, ...] | None = None
        self._dtypes: tuple[torch.dtype, ...] | None = None  # None until the first token
        if isinstance(self.padding, dict):
            self._set_names(tuple(self.padding))
        elif not isinstance(padding, numbers.Real):
            raise ValueError(f"padding must be a number or a mapping, got {padding!r}")
        self._options = _C.PackerOptions(
            row_length=self.row_length,
            bins_max=self.open_bins if policy == "best_fit" else 1,
            splits=too_long == "split",
        )
        self._pass: _Pass | None = None  # the current one, or the last one if it is over
        self._is_over = True
        self._restored: _Restored | None = None

    def __repr__(self) -> str:
        parts = [f"<{type(self.documents).__name__}>", str(self.row_length)]
        if self.padding != 0:
            parts.append(f"padding={self.padding!r}")
        if self.policy != "best_fit":
            parts.append(f"policy={self.policy!r}")
        elif self.open_bins != 64:
            parts.append(f"open_bins={self.open_bins}")
        if self.too_long != "error":
            parts.append(f"too_long={self.too_long!r}")
        if self.batch_size is not None:
            parts.append(f"batch_size={self.batch_size}")
        if self.remainder != "pad":
            parts.append(f"remainder={self.remainder!r}")
        if self.world_size > 1:
            parts.append(f"rank={self.rank}, world_size={self.world_size}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Start a pass over the documents, or continue the pass of a loaded state.

        An iterator that was started before must not be used any more.

        Returns:
            Iterator[dict[str, Any]]: Batches of this rank.

        Raises:
            ValueError: From the iterator, if a document is invalid, if one is too long with
                ``too_long="error"``, or if every document was dropped; from ``iter()``, if a state
                was loaded and documents without a state differ from those before it.
        """
        restored, self._restored = self._restored, None
        if restored is None:
            current = _Pass(_C.Packer(self._options), iter(self.documents))
        else:
            current = restored.begun
            if restored.opens_source:
                current.source = iter(self.documents)
                if not _has_state(self.documents):
                    self._skip(current.source, current.element_count, restored.token_count)
        self._pass, self._is_over = current, False
        return self._steps(current)

    def stats(self) -> PackerStats:
        """Return the counts of the current pass, or of the last one if it is over.

        Returns:
            PackerStats: Counts over all ranks; all 0 before the first pass.
        """
        current = self._restored.begun if self._restored else self._pass
        return self._stats_of(current or _Pass(_C.Packer(self._options)))

    def plan(self, lengths: Sequence[int] | np.ndarray[Any, Any]) -> PackerStats:
        """Count the rows, the padding and the steps of a pass, from known lengths of documents.

        Packs without tokens, in less than a second for millions of documents. Changes nothing.

        Args:
            lengths (Sequence[int] | np.ndarray): Number of tokens of each document, in the order of
                the pass. Shape: (number of documents,).

        Returns:
            PackerStats: Counts at the end of such a pass.

        Raises:
            ValueError: If a length is negative, or too long with ``too_long="error"``.

        Example::

            steps = packer.plan(lengths).steps
        """
        found = np.ascontiguousarray(lengths, dtype=np.int64)
        if found.ndim != 1 or (found.size and found.min() < 0):
            raise ValueError("lengths must be numbers of tokens of 0 or more, in one dimension")
        if self.too_long == "error" and found.size and found.max() > self.row_length:
            self._refuse_length(int(np.argmax(found > self.row_length)), int(found.max()))
        planned = _Pass(_C.Packer(self._options))
        planned.native.add_all(found)
        planned.native.flush()
        whole, rest = divmod(planned.native.counts.rows, self._step_rows)
        planned.step_count = whole
        if rest and self.remainder == "pad":
            planned.step_count += 1
            planned.padding_row_count = self._step_rows - rest
        elif rest:
            planned.dropped_row_count = rest
        return self._stats_of(planned)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the pass, after the last batch that was delivered.

        It contains the state of ``documents``, if they have a ``state_dict()`` as loaders do, and
        the tokens of open bins and of complete rows that were not delivered: at most ``open_bins``
        rows, the rows of a step, and the documents of one list. All ranks have the same state.
        Without a ``state_dict()`` of ``documents``, their number is kept, and to resume, so many
        are read again and left out.

        Returns:
            dict[str, Any]: For ``torch.save()``: numbers, strings, lists and tensors.
        """
        source: Any = self.documents
        current = None if self._is_over else self._pass
        if self._restored is not None:
            current = self._restored.begun
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "options": self._state_options(),
            "source": source.state_dict() if _has_state(source) else None,
            "pass": None,
        }
        if current is None:
            return state
        pending = [self._streams_of(one) for one in current.pending]
        held = sorted(current.held.items())
        kept = [
            tuple(
                one.part(stream, one.needed, one.length - one.needed)
                for stream in range(len(one.streams))
            )
            for _, one in held
        ] + pending
        token_count = current.token_count + sum(_length_of(one) for one in pending)
        if self._restored is not None:
            token_count = self._restored.token_count
        state["pass"] = {
            "elements": current.element_count,
            "tokens": token_count,
            "placed_tokens": current.token_count,
            "is_ended": current.is_ended,
            "steps": current.step_count,
            "padding_rows": current.padding_row_count,
            "counts": {name: getattr(current.native.counts, name) for name in _COUNTS},
            "bins": _to_lists(current.native.bins),
            "ready": _to_lists(current.ready),
            "held": [[number, one.needed, one.length] for number, one in held],
            "pending": [_length_of(one) for one in pending],
            "streams": {
                name: torch.cat([one[at] for one in kept])
                if kept
                else torch.empty(0, dtype=self._dtypes[at])
                for at, name in enumerate(self._names or ())
                if self._dtypes is not None
            },
        }
        return state

    def state_json(self) -> str:
        """Return the state as JSON, with the tokens in base64, for a packer in C++ or Python.

        Returns:
            str: Text that ``penstock::State::from_json()`` reads, and whose ``json.loads()``
                :meth:`load_state_dict` reads.

        Raises:
            TypeError: If the state of ``documents`` has parts that JSON cannot hold.
        """
        return json.dumps(self.state_dict(), default=_tensor_to_json)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state: the next ``iter()`` continues where it was taken.

        The remaining rows are bit-for-bit equal to the rows of an uninterrupted pass. ``rank``,
        ``world_size``, ``batch_size`` and ``remainder`` may have changed since: the remaining rows
        are dealt out again.

        Args:
            state (Mapping[str, Any]): Result of :meth:`state_dict` of any rank's packer with the
                same documents, ``row_length``, ``policy``, ``open_bins``, ``too_long`` and
                ``padding``; or the ``json.loads()`` of :meth:`state_json`, or of the state of a
                packer in C++. It is also loaded into ``documents``, if they have a state.

        Raises:
            ValueError: If the state is of a packer with other options, or is not complete.
        """
        restored = self._read_state(state)
        if _has_state(self.documents):
            if state["source"] is None:
                raise ValueError(
                    "the state must contain a state of the documents, because they have a "
                    "state_dict(), got none; use the kind of documents that it was taken with"
                )
            source: Any = self.documents
            source.load_state_dict(state["source"])
        elif state["source"] is not None:
            raise ValueError(
                f"documents must have a load_state_dict(), because the state contains a state of "
                f"them, got {type(self.documents).__name__}; use the kind of documents that it was "
                f"taken with"
            )
        self._pass, self._is_over, self._restored = None, True, restored

    @property
    def _step_rows(self) -> int:
        return (self.batch_size or 1) * self.world_size

    def _steps(self, current: _Pass) -> Iterator[dict[str, Any]]:
        step_rows = self._step_rows
        while self._pass is current:
            while len(current.ready) < step_rows and not current.is_ended:
                self._read(current)
            missing = max(step_rows - len(current.ready), 0)
            if missing and (not current.ready or self.remainder == "drop"):
                current.dropped_row_count = len(current.ready)
                current.ready.clear()
                current.held.clear()
                break
            current.padding_row_count += missing
            rows = [current.ready.popleft() if current.ready else [] for _ in range(step_rows)]
            batch = self._batch(current, rows[self.rank :: self.world_size])
            for row in rows:
                self._release(current, row)
            current.step_count += 1
            yield batch
        if self._pass is not current:
            raise RuntimeError(
                "the packer has another iterator or state since this iterator was made; use the "
                "latest iter()"
            )
        self._is_over = True

    def _read(self, current: _Pass) -> None:
        """Place the next document, or close the bins if there is none."""
        if not current.pending:
            assert current.source is not None
            try:
                element = next(current.source)
            except StopIteration:
                current.source = None
                current.is_ended = True
                current.ready.extend(current.native.flush())
                self._check_rows(current)
                return
            current.element_count += 1
            current.pending.extend(_documents_of(element))
        streams = self._streams_of(current.pending[0])
        length = _length_of(streams)
        if length > self.row_length and self.too_long == "error":
            self._refuse_length(current.document_count, length)
        current.pending.popleft()
        current.token_count += length
        number = current.document_count
        current.document_count += 1
        current.ready.extend(current.native.add(length))
        if 0 < length and (length <= self.row_length or self.too_long == "split"):
            current.held[number] = _Held(0, 0, length, streams)

    def _release(self, current: _Pass, row: list[_Part]) -> None:
        """Drop the tokens of a delivered row."""
        for number, first, length in row:
            held = current.held[number]
            held.needed = first + length
            if held.needed == held.length:
                del current.held[number]
            elif held.length - held.needed <= self.row_length:
                # The rest may be in an open bin for long.
                held.streams = tuple(
                    held.part(stream, held.needed, held.length - held.needed).clone()
                    for stream in range(len(held.streams))
                )
                held.first = held.needed

    def _batch(self, current: _Pass, rows: list[list[_Part]]) -> dict[str, Any]:
        assert self._names is not None and self._dtypes is not None
        lengths: list[int] = []  # of all segments
        segment_ids: list[int] = []
        held: list[tuple[_Held, int] | None] = []  # with the first token; None: padding
        for row in rows:
            room = self.row_length
            for segment, (number, first, length) in enumerate(row, 1):
                lengths.append(length)
                segment_ids.append(segment)
                held.append((current.held[number], first))
                room -= length
            if room:
                lengths.append(room)
                segment_ids.append(0)
                held.append(None)
        shape = (self.row_length,) if self.batch_size is None else (len(rows), self.row_length)
        batch: dict[str, Any] = {}
        for stream, name in enumerate(self._names):
            pad = torch.full((self.row_length,), self._pad(name), dtype=self._dtypes[stream])
            parts = [
                pad.narrow(0, 0, length) if one is None else one[0].part(stream, one[1], length)
                for one, length in zip(held, lengths, strict=True)
            ]
            batch[name] = torch.cat(parts).view(shape)
        counts = np.array(lengths)
        ends = np.cumsum(counts)
        starts = np.repeat(ends - counts, counts)
        batch["positions"] = torch.from_numpy(np.arange(len(starts)) - starts).view(shape)
        of_tokens = np.repeat(np.array(segment_ids, dtype=np.int32), counts)
        batch["segment_ids"] = torch.from_numpy(of_tokens).view(shape)
        batch["cu_seqlens"] = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
        batch["max_seqlen"] = max(lengths)
        return batch

    def _pad(self, name: str) -> float:
        return self.padding[name] if isinstance(self.padding, dict) else self.padding

    def _set_names(self, names: tuple[str, ...]) -> None:
        if not names:
            raise ValueError("documents must have at least one stream, got an empty mapping")
        taken = [name for name in names if name in _MADE]
        if taken:
            raise ValueError(
                f"streams must not be named {', '.join(map(repr, _MADE))}, which the packer makes, "
                f"got {taken[0]!r}; rename it, or name the streams to pack in padding"
            )
        self._names = names

    def _streams_of(self, document: Any) -> _Streams:
        """Copy the streams of a document: it may be in memory that is used again."""
        if type(document) is not torch.Tensor and isinstance(document, Mapping):
            if self._names is None:
                self._set_names(tuple(document))
            assert self._names is not None
            missing = [name for name in self._names if name not in document]
            if missing:
                raise ValueError(
                    f"every document must have the streams {', '.join(map(repr, self._names))}, "
                    f"got one with {', '.join(map(repr, document)) or 'none'}"
                )
            streams = tuple(_copied(document[name], name) for name in self._names)
            lengths = [one.shape[0] for one in streams]
            if min(lengths) != max(lengths):
                shown = ", ".join(
                    f"{name!r} {length}" for name, length in zip(self._names, lengths, strict=True)
                )
                raise ValueError(
                    f"the streams of a document must have the same length, got {shown}; name the "
                    f"streams to pack in padding"
                )
        else:
            if self._names is None:
                self._names = (_TOKENS,)
            if len(self._names) != 1 or isinstance(self.padding, dict):
                raise ValueError(
                    f"every document must be a mapping with the streams "
                    f"{', '.join(map(repr, self._names))}, got {type(document).__name__}"
                )
            streams = (_copied(document, self._names[0]),)
        if _length_of(streams):
            self._check_dtypes(streams)
        return streams

    def _check_dtypes(self, streams: _Streams) -> None:
        dtypes = tuple([one.dtype for one in streams])
        if self._dtypes == dtypes:
            return
        if self._dtypes is not None:
            assert self._names is not None
            for name, known, got in zip(self._names, self._dtypes, dtypes, strict=True):
                if known != got:
                    raise ValueError(
                        f"stream {name!r} must have one dtype in all documents, got {got} after "
                        f"{known}; convert it in the dataset"
                    )
        self._dtypes = dtypes

    def _refuse_length(self, number: int, length: int) -> None:
        raise ValueError(
            f"a document must have at most row_length={self.row_length} tokens, got {length} in "
            f"document {number}; pass too_long='split' or 'drop', or raise row_length"
        )

    def _check_rows(self, current: _Pass) -> None:
        counts = current.native.counts
        if counts.rows or not counts.documents:
            return
        raise ValueError(
            f"at least one document must fit a row, got {counts.documents} documents, of which "
            f"{counts.dropped_documents} were longer than row_length={self.row_length} and "
            f"{counts.empty_documents} were empty; pass too_long='split', or raise row_length"
        )

    def _skip(self, source: Iterator[Any], element_count: int, token_count: int) -> None:
        """Leave out the elements read before a state."""
        found_count = 0
        for number in range(element_count):
            try:
                element = next(source)
            except StopIteration:
                raise ValueError(
                    f"documents must be as before the state, which has read {element_count} "
                    f"elements, got {number}; pass an iterable that starts at the beginning"
                ) from None
            for document in _documents_of(element):
                found_count += _length_of(self._streams_of(document))
        if found_count != token_count:
            raise ValueError(
                f"documents must be as before the state, which has read {token_count} tokens in "
                f"{element_count} elements, got {found_count}; pass the same documents in the same "
                f"order, or a loader with a state_dict()"
            )

    def _stats_of(self, current: _Pass) -> PackerStats:
        counts = current.native.counts
        return PackerStats(
            documents=counts.documents,
            empty_documents=counts.empty_documents,
            split_documents=counts.split_documents,
            dropped_documents=counts.dropped_documents,
            dropped_tokens=counts.dropped_tokens,
            rows=counts.rows,
            tokens=counts.row_tokens,
            padding_tokens=counts.rows * self.row_length - counts.row_tokens,
            steps=current.step_count,
            padding_rows=current.padding_row_count,
            dropped_rows=current.dropped_row_count,
        )

    def _state_options(self) -> dict[str, Any]:
        return {
            "row_length": self.row_length,
            "policy": self.policy,
            "open_bins": self.open_bins if self.policy == "best_fit" else 1,
            "too_long": self.too_long,
            "padding": self.padding,
        }

    def _read_state(self, state: Mapping[str, Any]) -> _Restored | None:
        version = state.get("version")
        if version != _STATE_VERSION or "options" not in state:
            raise ValueError(
                f"the state must be a result of Packer.state_dict() of version {_STATE_VERSION}, "
                f"got version {version!r}"
            )
        for name, value in self._state_options().items():
            if state["options"].get(name) != value:
                raise ValueError(
                    f"{name} must be the state's, {state['options'].get(name)!r}, got {value!r}; "
                    f"build the packer with the same options"
                )
        saved = state["pass"]
        if saved is None:
            return None
        try:
            return self._restored_pass(saved)
        except (AttributeError, KeyError, TypeError, IndexError, RuntimeError) as error:
            raise ValueError(
                f"the state must be a complete result of Packer.state_dict(), got one that cannot "
                f"be read ({type(error).__name__}: {error})"
            ) from error

    def _restored_pass(self, saved: Mapping[str, Any]) -> _Restored:
        counts = _C.PackerCounts()
        for name in _COUNTS:
            setattr(counts, name, saved["counts"][name])
        bins, ready = _of_lists(saved["bins"]), _of_lists(saved["ready"])
        native = _C.Packer.continuing(self._options, bins, counts)
        lengths = [length - needed for _, needed, length in saved["held"]] + saved["pending"]
        streams = {name: _tensor_of(one) for name, one in saved["streams"].items()}
        if native is None or any(len(one) != sum(lengths) for one in streams.values()):
            raise ValueError(
                "the state must have bins with room, and the tokens of its documents; load a "
                "result of Packer.state_dict()"
            )
        begun = _Pass(
            native,
            element_count=saved["elements"],
            document_count=saved["counts"]["documents"],
            token_count=saved["placed_tokens"],
            ready=deque(ready),
            is_ended=saved["is_ended"],
            step_count=saved["steps"],
            padding_row_count=saved["padding_rows"],
        )
        if streams:
            self._set_names(tuple(streams))
            self._dtypes = tuple(one.dtype for one in streams.values())
            # Copies, because a part would keep the memory of all.
            split = [
                [part.clone() for part in one.split(lengths)] if lengths else []
                for one in streams.values()
            ]
            documents = [tuple(parts) for parts in zip(*split, strict=True)]
            for (number, needed, length), one in zip(saved["held"], documents, strict=False):
                begun.held[number] = _Held(needed, needed, length, one)
            names = tuple(streams)
            for one in documents[len(saved["held"]) :]:
                is_bare = names == (_TOKENS,) and not isinstance(self.padding, dict)
                begun.pending.append(one[0] if is_bare else dict(zip(names, one, strict=True)))
        parts = [part for row in [*bins, *ready] for part in row]
        if any(sum(length for *_, length in row) > self.row_length for row in ready) or any(
            number not in begun.held
            or length < 1
            or first < begun.held[number].needed
            or first + length > begun.held[number].length
            for number, first, length in parts
        ):
            raise ValueError(
                "the state must have the tokens of all rows; load a result of Packer.state_dict()"
            )
        return _Restored(begun, saved["tokens"], opens_source=not begun.is_ended)


def _has_state(documents: Any) -> bool:
    return hasattr(documents, "state_dict") and hasattr(documents, "load_state_dict")


def _length_of(streams: _Streams) -> int:
    return streams[0].shape[0]  # len() of a tensor takes several times as long


def _to_lists(rows: Iterable[Iterable[_Part]]) -> list[list[list[int]]]:
    return [[list(part) for part in row] for row in rows]


def _of_lists(rows: Iterable[Iterable[Any]]) -> list[list[_Part]]:
    return [[(part[0], part[1], part[2]) for part in row] for row in rows]


def _tensor_to_json(value: Any) -> dict[str, str]:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"the state must have numbers, strings, lists, dictionaries and tensors, got "
            f"{type(value).__name__}; use torch.save() with state_dict()"
        )
    content = value.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "data": base64.b64encode(content).decode()}


def _tensor_of(saved: Any) -> torch.Tensor:
    """Return a stream of a state: a tensor, or its form in JSON."""
    if isinstance(saved, torch.Tensor):
        return saved
    dtype = getattr(torch, saved["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{saved['dtype']!r} is no dtype")
    content = bytearray(base64.b64decode(saved["data"], validate=True))
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _documents_of(element: Any) -> Iterable[Any]:
    """Return the documents of an element: it is one, or a list of them."""
    if isinstance(element, (list, tuple)) and element:
        return (element,) if isinstance(element[0], (numbers.Number, np.generic)) else element
    return (element,)


def _copied(values: Any, name: str) -> torch.Tensor:
    """Copy a sequence of numbers into a tensor of one dimension."""
    tensor: torch.Tensor | None
    if isinstance(values, torch.Tensor):
        tensor = values
    elif isinstance(values, np.ndarray):
        tensor = torch.tensor(values)
    elif isinstance(values, Sequence) and not isinstance(values, (str, bytes)):
        try:
            found = array("q", values)  # several times as fast as torch.tensor()
            return torch.frombuffer(found, dtype=torch.int64) if found else torch.empty(0).long()
        except TypeError:
            try:
                tensor = torch.tensor(values)
            except (TypeError, ValueError):
                tensor = None
    else:
        tensor = None
    if tensor is None or tensor.ndim != 1 or tensor.layout != torch.strided:
        got = type(values).__name__ if tensor is None else f"shape {tuple(tensor.shape)}"
        raise ValueError(
            f"stream {name!r} of a document must be a sequence of numbers in one dimension, got "
            f"{got}; give documents one by one, or in lists, as a loader does with collate_fn=list"
        )
    if tensor.device.type != "cpu":
        raise ValueError(
            f"stream {name!r} of a document must be on the CPU, got {tensor.device}; move the "
            f"packed batches instead"
        )
    if not isinstance(values, torch.Tensor):
        return tensor
    return values.detach().clone() if values.requires_grad else values.clone()


def _checked_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")
    return int(value)


def _checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return str(value)
