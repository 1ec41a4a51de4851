# SPDX-License-Identifier: Apache-2.0
"""Make code that imports torch's or torchdata's loader use penstock's: frameworks, and unmodified
programs. torchdata need not be installed.

A name is rebound where it is looked up: in the globals of every module. An object with another
reference to the class, such as an existing subclass, keeps it and works as before.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing.spawn
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from penstock.compat.iterators import BaseIterator
from penstock.loader import dataloader

_T_co = TypeVar("_T_co", covariant=True)
_Seeding = Literal["batch", "sample"] | None

# Torch's class, even if its name is bound to another one. While installed, this is also the name by
# which pickle finds it.
TorchDataLoader: type[Any] = dataloader.DataLoader.__mro__[1]
_TORCH_MODULE = "torch.utils.data.dataloader"
_TORCHDATA_NAME = "TorchdataLoader"  # while installed
_TORCHDATA_MODULE = "torchdata.stateful_dataloader.stateful_dataloader"
_TORCHDATA_CLASS = "StatefulDataLoader"
_spawn: Any = multiprocessing.spawn


# Arguments that choose a loader's seeding, or its default.
_CHOOSE_SEEDING = ("seeding", "ranks", "shard_by_rank")


class _StandIn(ABCMeta):
    """Makes a stand-in answer for the class whose name it has: an instance of that class counts as
    an instance of the stand-in.

    Derived from ABCMeta so that a user's class may be both a loader and an abstract class.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        original = _original(cls)
        is_theirs = original is not None and isinstance(instance, original)
        return is_theirs or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        original = _original(cls)
        is_theirs = original is not None and issubclass(subclass, original)
        return is_theirs or super().__subclasscheck__(subclass)

    def __subclasses__(cls) -> list[Any]:
        """Also return torch's class, ours, and all of their subclasses: Lightning patches the
        classes that it finds in this way."""
        found: list[Any] = type.__subclasses__(cls)
        if cls is DataLoader:
            for parent in (TorchDataLoader, dataloader.DataLoader):
                found += [kind for kind in parent.__subclasses__() if kind not in cls.__mro__]
            found += _PARENTS_WITHOUT_SUBCLASSES
        return found


class _WithoutSubclasses:
    """A class as seen by code that walks from the stand-in down through subclasses.

    It shows no subclasses: they are listed next to it, and following them from a parent of the
    stand-in would lead back to the stand-in, in an endless loop. In a set, it equals its class.
    """

    def __init__(self, kind: type) -> None:
        object.__setattr__(self, "_kind", kind)

    def __eq__(self, other: object) -> bool:
        return other is object.__getattribute__(self, "_kind") or other is self

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_kind"))

    def __getattribute__(self, name: str) -> Any:
        kind = object.__getattribute__(self, "_kind")
        return list if name == "__subclasses__" else getattr(kind, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_kind"), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "_kind"), name)


_PARENTS_WITHOUT_SUBCLASSES = (
    _WithoutSubclasses(TorchDataLoader),
    _WithoutSubclasses(dataloader.DataLoader),
)


class DataLoader(dataloader.DataLoader[_T_co], metaclass=_StandIn):
    """penstock's loader under torch's name.

    Every torch loader is an instance of it, and every loader class a subclass, as with torch's
    class. To recognise penstock's loaders, use ``penstock.DataLoader``.
    """

    # A class derived from torch's earlier may still call these by the name that is now rebound.

    @functools.wraps(dataloader.DataLoader.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own_class = _own_class(self)
        if own_class is dataloader.DataLoader and kwargs.keys().isdisjoint(_CHOOSE_SEEDING):
            kwargs["seeding"] = DataLoader._installed_seeding
        own_class.__init__(self, *args, **kwargs)

    _installed_seeding: _Seeding = None  # of install(seeding=...)

    def __iter__(self) -> BaseIterator:
        return _own_class(self).__iter__(self)  # type: ignore[no-any-return]

    def _get_iterator(self) -> BaseIterator:
        return _own_class(self)._get_iterator(self)  # type: ignore[no-any-return]

    # Lightning patches this on the class from which it starts, whether defined there or not, and
    # restores the former value. An inherited one could be one of Lightning's patches.
    __setattr__ = TorchDataLoader.__setattr__  # type: ignore[misc, assignment]


class StatefulDataLoader(DataLoader[_T_co]):
    """penstock's loader under torchdata's name. Every torchdata loader is an instance of it.

    A program that uses this name intends to take states: snapshots are kept from the start, as in
    torchdata.
    """

    _takes_states_at_once = True


def _original(stand_in: type) -> type[Any] | None:
    """Return the class that a stand-in replaces; None for a class derived from one."""
    if stand_in is DataLoader:
        return TorchDataLoader
    return torchdata_class() if stand_in is StatefulDataLoader else None


def __getattr__(name: str) -> Any:
    """Return torchdata's class for pickle while its own name leads to the stand-in."""
    if name == _TORCHDATA_NAME and (original := torchdata_class()) is not None:
        return original
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _own_class(loader: Any) -> Any:
    is_ours = issubclass(type(loader), dataloader.DataLoader)
    return dataloader.DataLoader if is_ours else TorchDataLoader


def install(*, seeding: _Seeding = None) -> None:
    """Replace ``torch.utils.data.DataLoader`` by penstock's, for all programs and frameworks.

    Also replaces torchdata's ``StatefulDataLoader`` if torchdata is installed. The names are
    rebound in torch, in torchdata and in each module that has imported them; modules imported later
    find them rebound. Processes that this one starts with spawn or forkserver install it too. Call
    it once at the start of a program, before or after the frameworks are imported; a further call
    includes the modules imported since. Classes derived from torch's or torchdata's class before
    the call keep their iterators.

    Args:
        seeding (str | None): Value of ``seeding`` for loaders made under torch's and torchdata's
            names that pass none and have no ``ranks``: frameworks that rebuild a loader, such as
            accelerate and Hugging Face's Trainer, do not pass it on. A further call without it
            resets it. Default: None, torch's random numbers.

    Raises:
        ValueError: If ``seeding`` is not ``"batch"``, ``"sample"`` or None.

    See Also:
        :func:`penstock.uninstall`, :func:`penstock.checkpoint_loader`

    Example::

        import penstock

        penstock.install()
        from torch.utils.data import DataLoader  # penstock's
    """
    if seeding not in (None, "batch", "sample"):
        raise ValueError(
            f"seeding must be 'batch', 'sample' or None, got {seeding!r}; leave it out for torch's "
            f"random numbers"
        )
    of_torchdata = torchdata_class()
    DataLoader._installed_seeding = seeding
    rebind(TorchDataLoader, DataLoader)
    # pickle looks a class up by its name, which now refers to another class.
    TorchDataLoader.__module__, TorchDataLoader.__qualname__ = __name__, "TorchDataLoader"
    if of_torchdata is not None:
        rebind(of_torchdata, StatefulDataLoader)
        of_torchdata.__module__, of_torchdata.__qualname__ = __name__, _TORCHDATA_NAME
    if not isinstance(_spawn.get_preparation_data, _PreparationData):
        _spawn.get_preparation_data = _PreparationData(_spawn.get_preparation_data)


def uninstall() -> None:
    """Undo :func:`penstock.install`. Loaders and classes made in between remain penstock's.

    Example::

        penstock.uninstall()
        from torch.utils.data import DataLoader  # torch's
    """
    DataLoader._installed_seeding = None
    rebind(DataLoader, TorchDataLoader)
    TorchDataLoader.__module__, TorchDataLoader.__qualname__ = _TORCH_MODULE, "DataLoader"
    of_torchdata = torchdata_class()
    if of_torchdata is not None:
        rebind(StatefulDataLoader, of_torchdata)
        of_torchdata.__module__ = _TORCHDATA_MODULE
        of_torchdata.__qualname__ = _TORCHDATA_CLASS
    if isinstance(_spawn.get_preparation_data, _PreparationData):
        _spawn.get_preparation_data = _spawn.get_preparation_data.original


def rebind(old: object, new: object) -> None:
    """Replace an object in the globals of every module that is not penstock's."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.partition(".")[0] != "penstock":
            namespace = vars(module)
            for key in [key for key, value in list(namespace.items()) if value is old]:
                namespace[key] = new


class _PreparationData:
    """The data that multiprocessing sends to a spawned process first, with a request to install.

    The process unpickles it first, so that the main program, which it imports next, finds the names
    rebound. Children of a fork server get it in the same way.
    """

    def __init__(self, original: Callable[[str], dict[str, Any]]) -> None:
        self.original = original

    def __call__(self, name: str) -> dict[str, Any]:
        request = _InstallRequest(DataLoader._installed_seeding)
        return {**self.original(name), "penstock": request}


class _InstallRequest:
    """Calls `install` when it is unpickled."""

    def __init__(self, seeding: _Seeding) -> None:
        self.seeding = seeding

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (functools.partial(install, seeding=self.seeding), ())


@functools.cache
def torchdata_class() -> type[Any] | None:
    """Return the class of torchdata itself; None without torchdata. The import takes 4 ms.

    The first call must be before the names of torch and torchdata are rebound: the class is derived
    from the class to which torch's name refers at that time.
    """
    try:
        found = getattr(importlib.import_module(_TORCHDATA_MODULE), _TORCHDATA_CLASS, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None
