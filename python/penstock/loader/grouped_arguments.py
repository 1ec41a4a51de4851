# SPDX-License-Identifier: Apache-2.0
"""The groups of a loader's arguments: :class:`Pool`, and :class:`Ranks`.

A loader keeps one record of each kind in its ``vars()``, under the name of the argument: frameworks
that rebuild a loader from its attributes pass these on. Programs read and assign the fields as
attributes of the loader (:class:`PoolField`, :class:`RanksField`). An assigned value is checked by
``iter()``, like any other option, so that ``rank`` and ``world_size`` can change one after the
other.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from penstock.ranks.leaf_readers import check_leaves, named_leaves
from penstock.ranks.replica_group import named_ranks
from penstock.ranks.sharding import REMAINDERS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")
_Quoted = Callable[[str], str]
_Record = TypeVar("_Record", "Pool", "Ranks")
_COUNTS = ("rank", "world_size", "global_batch_size")
_ADDRESS = re.compile(r"tcp://(?:\[[^\s\[\]]+\]|[^\s\[\]:/]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, repr=False)
class Pool:
    """A pool of workers for a :class:`penstock.DataLoader`, and how the trainer uses it.

    ``pool="tcp://host:port"`` is the short form of ``pool=Pool("tcp://host:port")``.

    Args:
        address (str | None): Address of the pool's controller, ``"tcp://host:port"``. None stands
            for the pool named by the environment variable ``PENSTOCK_POOL`` or announced by
            :func:`penstock.announce_pool`, if any, and ``""`` for no pool. The other fields also
            apply to the loader's local processes with a ``replica_group``.
        keys (str | os.PathLike | None): Folder with this trainer's keys for the pool. Default:
            None, the folder in ``PENSTOCK_KEYS``, else keys shared by this user's processes on this
            machine.
        code_paths (Sequence[str | os.PathLike] | None): Folders, or single .py files, with your
            modules to send with the dataset, in addition to the modules in the program's folder and
            imported modules that belong to no installed package. None sends no modules. Default:
            ``()``, the paths in ``PENSTOCK_CODE_PATHS``, separated by ":".
        trust_workers (bool): Allow a pool's batches to contain any pickled object. If False, they
            may contain tensors, numpy arrays, numbers, text, bytes, None, and dicts, lists and
            tuples of these. Unpickling runs code chosen by the sender: a compromised worker could
            do anything that the trainer may do. Default: False.
        keep (bool): Let a pool that was started with ``penstock controller --keep`` answer a
            request with the same batch that it has made before. If False, it makes every batch
            again: for a dataset whose samples change without a change of the dataset's attributes,
            such as files that a program rewrites. Default: True.

    Raises:
        ValueError: If ``address`` is a text that is not the address of a controller.
        TypeError: If an argument has the wrong type.

    Example::

        from penstock import DataLoader, Pool

        pool = Pool("tcp://head:7000", keys="keys/ann", code_paths=["src"])
        loader = DataLoader(dataset, batch_size=64, shuffle=True, pool=pool)
    """

    address: str | None
    keys: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    code_paths: Sequence[str | os.PathLike[str]] | None = field(default=(), kw_only=True)
    trust_workers: bool = field(default=False, kw_only=True)
    keep: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.address is not None and not isinstance(self.address, str):
            raise TypeError(
                f"address must be a str or None, got {self.address!r}; pass the address of a "
                f"controller, as in 'tcp://host:7000'"
            )
        if self.address and not is_address(self.address):
            raise ValueError(
                f"address must be 'tcp://host:port', got {self.address!r}; pass the address of a "
                f"controller, as in 'tcp://host:7000'"
            )
        if not (self.keys is None or _is_path(self.keys)):
            raise TypeError(
                f"keys must be a path or None, got {self.keys!r}; pass the folder with this "
                f"trainer's keys"
            )
        if self.code_paths is not None:
            if not _is_sequence(self.code_paths) or not all(map(_is_path, self.code_paths)):
                raise TypeError(
                    f"code_paths must be a sequence of paths or None, got {self.code_paths!r}; "
                    f"pass a list of folders and .py files, or None to send no modules"
                )
            object.__setattr__(self, "code_paths", tuple(self.code_paths))
        if type(self.trust_workers) is not bool:
            raise TypeError(
                f"trust_workers must be a bool, got {self.trust_workers!r}; pass True to unpickle "
                f"objects from the pool's workers, which can run arbitrary code, or leave it out"
            )
        if type(self.keep) is not bool:
            raise TypeError(
                f"keep must be a bool, got {self.keep!r}; pass False for a dataset whose samples "
                f"change, or leave it out"
            )

    def __repr__(self) -> str:
        return shown_record(self)


@dataclass(frozen=True, slots=True, repr=False)
class Ranks:
    """The ranks of a job, which share the samples of a :class:`penstock.DataLoader`.

    ``DataLoader(..., ranks=Ranks())`` delivers to this process its part of one order that is
    independent of the number of ranks. For a map-style dataset, a step takes the next samples of
    the order, and each rank a contiguous run of them. All ranks have the same number of steps. The
    order, the random numbers and the state are the same for any number of ranks: the
    ``state_dict()`` of any rank has the position of the job, and a job of another size can resume
    from it. Of an ``IterableDataset``, rank ``s % world_size`` reads shard ``s`` of the loader's
    ``shards``; the batches are the same for any number of ranks. The state in the middle of an
    epoch is then the state of one rank, and :func:`penstock.merge_states` combines the states of
    all ranks.

    Args:
        rank (int | None): Rank of this process. Default: None, the rank in torch's default process
            group, else the variable ``RANK`` set by torchrun, else 0.
        world_size (int | None): Number of ranks; given together with ``rank``. Default: None, from
            the process group, else from ``WORLD_SIZE``, else 1.
        global_batch_size (int | None): Number of samples of a step over all ranks, instead of the
            loader's ``batch_size``; at least ``world_size``, and a multiple of it unless
            ``remainder="uneven"``. The samples of a step are then the same for any number of ranks.
            Requires a map-style dataset. Default: None.
        remainder (str | None): Handling of samples that do not fill the last step. ``"pad"``
            divides them evenly among the ranks and delivers some twice to do so. ``"drop"`` leaves
            them out. ``"uneven"`` delivers one sample more to some ranks than to others, and allows
            batches of different sizes in every step; with fewer samples than ranks it acts as
            ``"pad"``. For an ``IterableDataset``, ``"drop"`` ends the epoch on all ranks before the
            first step for which some rank has no batch, ``"uneven"`` ends it on each rank
            separately, and ``"pad"`` is not available. Default: None, which means ``"drop"`` for
            iterable datasets and with ``drop_last``, else ``"pad"``.
        replica_group (ProcessGroup | DeviceMesh | Sequence[int] | None): Ranks that receive the
            same batches, such as a model-parallel group: a process group, a device mesh of one
            dimension, or a list of ranks that includes this one. The first of them requests the
            batches, from the pool or from its ``num_workers`` processes, and sends each batch once
            to every other machine of the group. All ranks must read their loaders in the same
            order, equally often and with the same seeds. ``rank`` and ``world_size`` then count
            such groups; without them, each group reads the whole dataset in a separate order.
            Requires a map-style dataset. Models are not cut (:func:`penstock.offload`) with such a
            loader. Default: None.
        leaves (Mapping[str | int, Sequence[int] | ProcessGroup | DeviceMesh] | None): For tensors
            of the batch that only some ranks of the ``replica_group`` read, these ranks, as in
            ``{"pixels": [0, 1], "labels": [3]}``. Only they receive the bytes of these tensors; on
            the other ranks, a tensor on the meta device with the same shape, strides and dtype
            stands in for each. A name is a key of a dict, a field of a dataclass, or a position in
            a list, tuple or named tuple; names of nested containers are joined by dots, as in
            ``"image.pixels"``. The name of a container stands for all tensors in it. Tensors that
            are not named are read by all ranks. The rank that requests the batches receives all
            tensors: it is on a machine that reads all of them or, if there is none, the tensor
            named first, then second, and so on; name the largest first. ``iter()`` raises
            ``RankError`` if the ranks have different ``leaves``, and ``next()`` raises
            ``ValueError`` if the batch has no tensors of a name. Default: None.
        share (str | None): With ``"by_cache"``, a rank gets as many samples of a step as otherwise,
            first of all the ones that it owns (:meth:`penstock.DataLoader.owner_of`), for ranks
            that keep the samples that they own in memory or on a local disk. The samples of a step
            and their random numbers by sample stay the same. Requires a map-style dataset.
            Default: None, a contiguous run of the step.

    Raises:
        ValueError: If ``rank`` and ``world_size`` make no rank, or another argument has an invalid
            value.
        TypeError: If an argument has the wrong type.

    Example::

        from penstock import DataLoader, Ranks

        dist.init_process_group()
        loader = DataLoader(dataset, shuffle=True, ranks=Ranks(global_batch_size=256))
    """

    rank: int | None = None
    world_size: int | None = None
    global_batch_size: int | None = field(default=None, kw_only=True)
    remainder: Literal["pad", "drop", "uneven"] | None = field(default=None, kw_only=True)
    replica_group: Sequence[int] | ProcessGroup | DeviceMesh | None = field(
        default=None, kw_only=True
    )
    leaves: Mapping[str | int, Sequence[int] | ProcessGroup | DeviceMesh] | None = field(
        default=None, kw_only=True, hash=False
    )
    share: Literal["by_cache"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        group = named_ranks(self.replica_group)
        object.__setattr__(self, "replica_group", group)
        object.__setattr__(self, "leaves", named_leaves(self.leaves))
        check_ranks(self)
        object.__setattr__(self, "replica_group", None if group is None else tuple(sorted(group)))
        for name in _COUNTS:
            object.__setattr__(self, name, _count(name, getattr(self, name)))

    def __repr__(self) -> str:
        return shown_record(self)


def check_ranks(ranks: Ranks) -> None:
    """Raise ValueError or TypeError for values that no ranks can have."""
    rank, world_size = _count("rank", ranks.rank), _count("world_size", ranks.world_size)
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"rank and world_size must be passed together, got rank={rank} and "
            f"world_size={world_size}; pass both, or neither to use the values of this process"
        )
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be from 0 to world_size - 1, got rank={rank} and world_size={world_size}; "
            f"pass the number of this process, counted from 0"
        )
    size = _count("global_batch_size", ranks.global_batch_size)
    if size is not None and size < (world_size or 1):
        raise ValueError(
            f"global_batch_size must be {world_size or 1} or more, got {size}; pass the number of "
            f"samples of a step over all ranks"
        )
    if ranks.remainder is not None and ranks.remainder not in tuple(REMAINDERS):
        raise ValueError(
            f"remainder must be one of {', '.join(map(repr, REMAINDERS))}, got "
            f"{ranks.remainder!r}; pass one of them, or leave it out"
        )
    if ranks.share not in (None, "by_cache"):
        raise ValueError(
            f"share must be 'by_cache' or None, got {ranks.share!r}; pass 'by_cache' if the ranks "
            f"keep the samples that they own, or leave it out"
        )
    _check_group(ranks)
    check_leaves(ranks.leaves, ranks.replica_group)


def _check_group(ranks: Ranks) -> None:
    group: Any = ranks.replica_group
    if group is None:
        return
    is_of_ranks = all(type(rank) is int and rank >= 0 for rank in group)
    if not group or not is_of_ranks or len(set(group)) != len(group):
        raise ValueError(
            f"replica_group must have different ranks from 0 on, got {list(group)}; list each rank "
            f"of the group once"
        )
    for name in ("global_batch_size", "remainder"):
        value = getattr(ranks, name)
        if value is not None and ranks.rank is None:
            raise ValueError(
                f"rank and world_size are required with replica_group and {name}, got "
                f"{name}={value!r} without them; pass the index of the group and the number of "
                f"groups, as in rank=mesh.get_local_rank('dp'), world_size=mesh['dp'].size()"
            )


def is_address(pool: Any) -> bool:
    """Return whether ``pool`` could be a controller's address, which has a host and a port."""
    found = _ADDRESS.fullmatch(pool) if isinstance(pool, str) else None
    return found is not None and 0 < int(found[1]) < 1 << 16


def is_sharded(ranks: Ranks | None) -> bool:
    """Return whether the ranks share one order: not in a ``replica_group`` without a number."""
    return ranks is not None and (ranks.replica_group is None or ranks.rank is not None)


def unchecked(record: _Record, **values: object) -> _Record:
    """Return the record with other values, which the loader has checked, or ``iter()`` checks."""
    changed = object.__new__(type(record))
    for one in fields(record):
        value = values.get(one.name, getattr(record, one.name))
        object.__setattr__(changed, one.name, value)
    return changed


def pool_in_use(loader: object) -> Pool:
    """Return the record of the loader's pool, with its own values where there is no pool."""
    pool: Pool | None = vars(loader).get("pool")
    return Pool(None) if pool is None else pool


def ranks_in_use(loader: object) -> Ranks | None:
    """Return the record of the loader's ranks. None for an assigned value of another type, which
    ``iter()`` rejects."""
    ranks = vars(loader).get("ranks")
    return ranks if isinstance(ranks, Ranks) else None


class PoolField(Generic[_T]):
    """A field of a loader's :class:`Pool` as an attribute of the loader.

    The attribute ``pool`` is the address; a whole record may be assigned to it, too.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = "address" if name == "pool" else name

    @overload
    def __get__(self, loader: None, owner: type) -> PoolField[_T]: ...

    @overload
    def __get__(self, loader: object, owner: type) -> _T: ...

    def __get__(self, loader: object | None, owner: type) -> PoolField[_T] | _T:
        if loader is None:
            return self
        value: _T = getattr(pool_in_use(loader), self._name)
        return value

    def __set__(self, loader: object, value: _T | Pool) -> None:
        if isinstance(value, Pool) and self._name == "address":
            changed = unchecked(value, address=value.address or None)
        else:
            changed = unchecked(pool_in_use(loader), **{self._name: value})
        vars(loader)["pool"] = changed


class RanksField(Generic[_T]):
    """A field of a loader's :class:`Ranks` as an attribute of the loader.

    Without ranks that share an order, it is None. A value that is assigned then has no effect, and
    can be read back: subclasses in programs have attributes of these names.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self._kept_name = name, f"_kept_{name}"

    @overload
    def __get__(self, loader: None, owner: type) -> RanksField[_T]: ...

    @overload
    def __get__(self, loader: object, owner: type) -> _T: ...

    def __get__(self, loader: object | None, owner: type) -> RanksField[_T] | _T:
        if loader is None:
            return self
        ranks = ranks_in_use(loader)
        value: _T = vars(loader).get(self._kept_name)  # type: ignore[assignment]
        if ranks is not None and (is_sharded(ranks) or self._name == "replica_group"):
            value = getattr(ranks, self._name)
        return value

    def __set__(self, loader: object, value: _T) -> None:
        ranks = ranks_in_use(loader)
        if ranks is not None and is_sharded(ranks):
            vars(loader)["ranks"] = unchecked(ranks, **{self._name: value})
        elif self._name == "replica_group":
            of_group = unchecked(ranks or Ranks(), replica_group=value)
            vars(loader)["ranks"] = None if value is None else of_group
        else:
            vars(loader)[self._kept_name] = value


def shown_pool(pool: Pool, quoted: _Quoted = repr) -> str:
    """Return the argument ``pool=`` as code: the plain address if no other field is set."""
    return shown_record(pool, quoted) if set_fields(pool) else _shown_value(pool.address, quoted)


def shown_record(record: Pool | Ranks, quoted: _Quoted = repr) -> str:
    """Return the record as code, without the fields that have their default values."""
    parts = [_shown_value(record.address, quoted)] if isinstance(record, Pool) else []
    parts += [f"{name}={_shown_value(value, quoted)}" for name, value in set_fields(record)]
    return f"{type(record).__name__}({', '.join(parts)})"


def set_fields(record: Pool | Ranks) -> list[tuple[str, Any]]:
    """Return the names and values of the fields without their default values, without the
    address of a pool."""
    found = [(one, getattr(record, one.name)) for one in fields(record) if one.name != "address"]
    return [
        (one.name, value)
        for one, value in found
        if value is not one.default and not (type(value) is tuple and value == one.default)
    ]


def _shown_value(value: Any, quoted: _Quoted) -> str:
    if _is_path(value):
        return quoted(str(os.fspath(value)))
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, dict):
        parts = (f"{quoted(name)}: {_shown_value(one, quoted)}" for name, one in value.items())
        return f"{{{', '.join(parts)}}}"
    if _is_sequence(value):
        return f"[{', '.join(_shown_value(one, quoted) for one in value)}]"
    return "..."  # a process group, or a mesh


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _count(name: str, value: Any) -> int | None:
    try:
        return None if value is None else operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int or None, got {value!r}; pass a number, or leave it out"
        ) from None
