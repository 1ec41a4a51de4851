# SPDX-License-Identifier: Apache-2.0
"""Batches of other classes than dicts, lists and tuples, taken apart into these for the transfer.

An object becomes the name of its class, a context of plain values, and children, which may contain
tensors. Both sides have the class: the worker's part calls `flatten`, the trainer's part `make`.
With workers that it does not trust, a trainer makes only objects of registered classes, of torch's
registered pytrees, and of the classes and libraries that are listed here.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch

from penstock import _C
from penstock.errors import MissingTorchNameError, UnsupportedError
from penstock.stream.tensor_types import (
    check_jagged,
    check_tensor,
    flatten_jagged,
    flatten_tensor,
    make_jagged,
    make_tensor,
)

Flat = tuple[Iterable[Any], Any]  # children, context
Flatten = Callable[[Any], Flat]
Unflatten = Callable[[list[Any], Any], Any]
Check = Callable[[list[Any], Any], list[Any]]

# Objects of the families in these packages are made even for workers that are not trusted.
_LIBRARIES = frozenset(("collections", "transformers"))
_EQUAL_HASHES_MAX = 64  # in one set, since equal ones are compared with each other
# Of a class that is made at run time, and has the module of its metaclass.
_TRUE_NAMES = {"abc:DataBatch": "torch_geometric.data.batch:DataBatch"}


class BatchType(NamedTuple):
    """How objects of a class are taken apart and made again."""

    flatten: Flatten
    unflatten: Unflatten
    check: Check | None = None  # the children for unflatten, of a worker that is not trusted


class RegisteredType(NamedTuple):
    """A class that the program has registered; it travels with a job to the workers of a pool."""

    cls: type
    flatten: Flatten
    unflatten: Unflatten


class FoundType(NamedTuple):
    """The type of a class, and whether trainers that do not trust this process know it."""

    name: str
    kind: BatchType
    is_for_all: bool


_registered: dict[str, RegisteredType] = {}
_found: dict[type, FoundType | None] = {}  # by class


def register_batch_type(
    cls: type, flatten: Flatten | None = None, unflatten: Unflatten | None = None
) -> None:
    """Send batches with objects of a class as tensors and plain values, without pickling them.

    Workers of a pool do not send objects of classes that the trainer has not registered, except
    those of libraries that penstock knows. Local workers pickle only objects that penstock cannot
    take apart by itself. Call it before the loader starts its workers.

    Args:
        cls (type): The class; objects of its subclasses are not included.
        flatten (Callable[[Any], tuple[Iterable[Any], Any]] | None): Returns the children of an
            object, which may contain tensors, and a context of plain values, as for torch's
            pytrees. Default: None, for dataclasses, attrs classes and subclasses of dict and
            UserDict, whose fields or items are the content.
        unflatten (Callable[[list[Any], Any], Any] | None): Returns an object of these children and
            this context. Default: None, with ``flatten``.

    Raises:
        TypeError: If ``cls`` is no class, has no content that penstock can find by itself, or only
            one of ``flatten`` and ``unflatten`` is given.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass
        ... class Pair:
        ...     image: torch.Tensor
        ...     label: int
        >>> penstock.register_batch_type(Pair)
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class, got {cls!r}")
    if (flatten is None) != (unflatten is None):
        raise TypeError("flatten and unflatten must be passed together, or neither of them")
    if flatten is None or unflatten is None:
        family = _family_of(cls)
        if family is None:
            raise TypeError(
                f"{cls.__name__} must be a dataclass, an attrs class or a subclass of dict or "
                "UserDict without __reduce__; pass flatten and unflatten"
            )
        flatten, unflatten = family
    _registered[_name_of(cls)] = RegisteredType(cls, flatten, unflatten)
    _found.clear()


def registered_types() -> tuple[RegisteredType, ...]:
    """Return the classes that this process has registered."""
    return tuple(_registered.values())


def install(types: Iterable[RegisteredType]) -> None:
    """Register the classes of a job in a worker."""
    for one in types:
        _registered[_name_of(one.cls)] = one
    _found.clear()


def flatten(value: Any, is_trusted: bool) -> tuple[str, tuple[Any, ...]] | None:
    """Return the name of the object's class, its context and its children; None for an object that
    cannot be taken apart, or that a trainer which does not trust this process would not make."""
    cls = type(value)
    if cls not in _found:
        _found[cls] = _find(cls)
    found = _found[cls]
    if found is None or not (is_trusted or found.is_for_all):
        return None
    try:
        children, context = found.kind.flatten(value)
    except _Unfit:
        return None
    return found.name, (context, *children)


def make(name: str, values: tuple[Any, ...], is_trusted: bool) -> Any:
    """Return the object of a name, a context and children that `flatten` has returned.

    Raises:
        UnsupportedError: This process has no such class, may not make objects of it for a worker
            that it does not trust, or the content does not fit the class.
    """
    context, *children = values
    kind = _kind_to_make(name, is_trusted)
    if kind is None:
        raise UnsupportedError(
            f"a batch contains an object of the class '{name}', which this process has not "
            "registered; call penstock.register_batch_type() in the trainer's program"
        )
    try:
        if kind.check is not None and not is_trusted:
            children = kind.check(children, context)
        return kind.unflatten(children, context)
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"the content of an object of the class '{name}' does not fit it: {error}"
        ) from error


def _kind_to_make(name: str, is_trusted: bool) -> BatchType | None:
    registered = _registered.get(name)
    if registered is not None:
        return BatchType(registered.flatten, registered.unflatten)
    module, _, qualname = name.partition(":")
    if name in _LISTED:
        # No worker makes this process import a package.
        is_imported = module.partition(".")[0] in sys.modules
        return _LISTED[name] if is_trusted or is_imported else None
    cls = _class_of(module, qualname, imports=is_trusted)
    if cls is None:
        return None
    node = _node_of(cls)
    if node is not None or not (is_trusted or module.partition(".")[0] in _LIBRARIES):
        return node
    return _bound_family(cls)


class _Unfit(Exception):
    """This object, unlike others of its class, must be pickled."""


def _name_of(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    return _TRUE_NAMES.get(name, name)


def _class_of(module: str, qualname: str, imports: bool) -> type | None:
    if imports and module not in sys.modules:
        try:
            import_module(module)
        except ImportError:
            return None
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # Through dictionaries, so that no attribute lookup of the module's own runs.
        found = vars(found).get(part) if isinstance(found, (type, type(sys))) else None
    return found if isinstance(found, type) else None


def _find(cls: type) -> FoundType | None:
    name = _name_of(cls)
    registered = _registered.get(name)
    if registered is not None and registered.cls is cls:
        return FoundType(name, BatchType(registered.flatten, registered.unflatten), True)
    module, _, qualname = name.partition(":")
    if _class_of(module, qualname, imports=False) is not cls:
        return None  # the trainer would not find it by its name
    kind = _LISTED.get(name) or _node_of(cls)
    if kind is not None:
        return FoundType(name, kind, True)
    kind = _bound_family(cls)
    is_for_all = module.partition(".")[0] in _LIBRARIES
    return None if kind is None else FoundType(name, kind, is_for_all)


def _node_of(cls: type) -> BatchType | None:
    """Return the functions of torch's pytree registry for a class."""
    try:
        from penstock.compat.batch_types import registered_nodes
    except MissingTorchNameError:
        return None
    node = registered_nodes().get(cls)
    return None if node is None else BatchType(_PlainFlatten(node.flatten_fn), node.unflatten_fn)


@dataclass(frozen=True)
class _PlainFlatten:
    """Takes an object apart unless its context has code, which only a pickle can contain. Then the
    object is refused, with the name of its class, and not a part of it."""

    flatten: Flatten

    def __call__(self, value: Any) -> Flat:
        children, context = self.flatten(value)
        if _has_code(context):
            raise _Unfit
        return children, context


def _has_code(context: Any) -> bool:
    if isinstance(context, dict):
        return any(map(_has_code, context.values()))
    if isinstance(context, (list, tuple)):
        return any(map(_has_code, context))
    return callable(context)


# ---- Families: classes whose content follows from their bases.


def _bound_family(cls: type) -> BatchType | None:
    family = _family_of(cls)
    return None if family is None else BatchType(*family)


def _family_of(cls: type) -> tuple[Flatten, Unflatten] | None:
    if issubclass(cls, enum.Enum):
        return _member_name, _MemberOf(cls)
    if any(hasattr(base, "__del__") for base in cls.__mro__):
        return None  # it would run when the object is dropped, with content that a worker chooses
    own = {name for base in cls.__mro__ for name in vars(base) if base.__module__ != "builtins"}
    if own & {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"}:
        return None
    has_state = _has_state(cls)
    if issubclass(cls, collections.UserDict) and (
        not has_state or {"__getstate__", "__setstate__"} <= own
    ):
        return _state_of, _Remaking(cls, _set_state)
    if has_state:
        return None
    if issubclass(cls, dict):
        return _items_of, _Remaking(cls, _set_items)
    if dataclasses.is_dataclass(cls):
        names = tuple(field.name for field in dataclasses.fields(cls))
        return _FieldsOf(names), _Remaking(cls, _set_fields)
    attrs = getattr(cls, "__attrs_attrs__", None)
    if attrs is not None:
        return _FieldsOf(tuple(one.name for one in attrs)), _Remaking(cls, _set_fields)
    return None


_GENERATED = ("/dataclasses.py", "/attr/_make.py")  # whose states are the fields


def _has_state(cls: type) -> bool:
    """Return whether a class has written what its pickles contain."""
    for name in ("__getstate__", "__setstate__"):
        code = getattr(getattr(cls, name, None), "__code__", None)
        if code is not None and not code.co_filename.endswith(_GENERATED):
            return True
    return False


@dataclass(frozen=True)
class _FieldsOf:
    """Takes the fields of a class, and the attributes that are none."""

    names: tuple[str, ...]

    def __call__(self, value: Any) -> Flat:
        fields = {name: getattr(value, name) for name in self.names if hasattr(value, name)}
        return [fields | dict(getattr(value, "__dict__", {}))], None


@dataclass(frozen=True)
class _Remaking:
    """Makes an object of a class without its constructor, and then sets its content."""

    cls: Any
    set_content: Callable[[Any, list[Any]], None]

    def __call__(self, children: list[Any], context: Any) -> Any:
        made = self.cls.__new__(self.cls)
        self.set_content(made, children)
        return made


def _set_fields(made: Any, children: list[Any]) -> None:
    (fields,) = children
    cls = type(made)
    declared = getattr(cls, "__dataclass_fields__", None) or [
        one.name for one in cls.__attrs_attrs__
    ]
    for name, value in fields.items():
        if name not in declared and hasattr(cls, name):
            raise ValueError(f"{name} is no field of the class")  # but perhaps a property
        object.__setattr__(made, name, value)  # also of a frozen class


def _member_name(value: Any) -> Flat:
    if type(value.name) is not str or type(value).__members__.get(value.name) is not value:
        raise _Unfit  # a combination of flags
    return (), value.name


@dataclass(frozen=True)
class _MemberOf:
    """Returns a member of an enumeration."""

    cls: Any

    def __call__(self, children: list[Any], context: Any) -> Any:
        return self.cls.__members__[context]


def _state_of(value: Any) -> Flat:
    state = value.__getstate__() if hasattr(value, "__getstate__") else value.__dict__
    if type(state) is not dict:
        raise _Unfit
    return [state], None


def _set_state(made: Any, children: list[Any]) -> None:
    (state,) = children
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        made.__dict__.update(state)


def _items_of(value: Any) -> Flat:
    return [dict(value.items()), dict(getattr(value, "__dict__", {}))], None


def _set_items(made: Any, children: list[Any]) -> None:
    items, attributes = children
    dict.update(made, items)
    if attributes:
        made.__dict__.update(attributes)


# ---- Classes of libraries.


def _ordered_items(value: Any) -> Flat:
    if value.__dict__:
        raise _Unfit
    return [dict(value.items())], None


_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}


def _default_items(value: Any) -> Flat:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise _Unfit
    return [dict(value.items())], name


def _default_dict(children: list[Any], context: Any) -> Any:
    return collections.defaultdict(None if context is None else _FACTORIES[context], children[0])


def _plain_attribute(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


_BOX_ATTRIBUTES = ("format", "canvas_size", "clamping_mode")


def _tv_tensor(value: Any) -> Flat:
    more = {name: _plain_attribute(one) for name, one in value.__dict__.items()}
    return [value.as_subclass(torch.Tensor)], more


def _make_tv_tensor(cls_name: str) -> Unflatten:
    def unflatten(children: list[Any], context: Any) -> Any:
        from torchvision import tv_tensors  # type: ignore[import-untyped]

        cls = getattr(tv_tensors, cls_name)
        made = children[0].as_subclass(cls)
        for name, value in context.items():
            if name not in _BOX_ATTRIBUTES:
                raise ValueError(f"{name} is no attribute of it")
            if name == "format":
                value = tv_tensors.BoundingBoxFormat(value)
            setattr(made, name, tuple(value) if isinstance(value, list) else value)
        return made

    return unflatten


def _tensordict(value: Any) -> Flat:
    names = value.names if any(name is not None for name in value.names) else None
    items = {key: value.get(key) for key in value.keys()}
    if value.device is not None and value.device.type != "cpu":
        raise _Unfit
    is_on_cpu = value.device is not None
    return [items], [list(value.batch_size), names, is_on_cpu, value.is_locked]


def _make_tensordict(children: list[Any], context: Any) -> Any:
    from tensordict import TensorDict  # type: ignore[import-not-found,unused-ignore]

    batch_size, names, is_on_cpu, is_locked = context
    device = "cpu" if is_on_cpu else None
    made = TensorDict(children[0], batch_size=batch_size, names=names, device=device)
    return made.lock_() if is_locked else made


def _fit(flat: Callable[[Any], Flat | None]) -> Flatten:
    def flatten(value: Any) -> Flat:
        parts = flat(value)
        if parts is None:
            raise _Unfit
        return parts

    return flatten


_OF_STORE = ("_store", "_mapping", "_parent", "_key")


def _graph(value: Any) -> Flat:
    """Take apart a graph, or a batch of graphs, of PyTorch Geometric."""
    store = value._store
    return [dict(store._mapping), _without(value, "_store"), _without(store, *_OF_STORE)], None


def _without(value: Any, *names: str) -> dict[str, Any]:
    """Return the attributes of an object, except these and the classes that its constructor
    sets."""
    return {
        name: one
        for name, one in vars(value).items()
        if name not in names and not isinstance(one, type)
    }


def _make_graph(children: list[Any], context: Any) -> Any:
    from torch_geometric.data import Data  # type: ignore[import-untyped]

    return _filled_graph(Data(), *children)


def _make_graph_batch(children: list[Any], context: Any) -> Any:
    from torch_geometric.data import Batch, Data

    return _filled_graph(Batch(_base_cls=Data), *children)


def _filled_graph(made: Any, items: Any, of_graph: Any, of_store: Any) -> Any:
    store = made._store
    store._mapping.update(items)
    for whole, attributes in ((made, of_graph), (store, of_store)):
        vars(whole).update({key: attributes[key] for key in attributes if key not in _OF_STORE})
    return made


_KNOWN: dict[str, BatchType] = {
    "torch:Tensor": BatchType(_fit(flatten_tensor), make_tensor, check_tensor),
    "torch.nested._internal.nested_tensor:NestedTensor": BatchType(
        _fit(flatten_jagged), make_jagged, check_jagged
    ),
    "collections:OrderedDict": BatchType(
        _ordered_items, lambda children, _: collections.OrderedDict(children[0])
    ),
    "collections:defaultdict": BatchType(_default_items, _default_dict),
    **{
        f"torchvision.tv_tensors._{module}:{name}": BatchType(_tv_tensor, _make_tv_tensor(name))
        for module, name in (
            ("image", "Image"),
            ("video", "Video"),
            ("mask", "Mask"),
            ("bounding_boxes", "BoundingBoxes"),
            ("keypoints", "KeyPoints"),
        )
    },
    "tensordict._td:TensorDict": BatchType(_tensordict, _make_tensordict),
    "torch_geometric.data.data:Data": BatchType(_graph, _make_graph),
    "torch_geometric.data.batch:DataBatch": BatchType(_graph, _make_graph_batch),
}


# ---- Values of Python's library, by the names of their classes.


def _value(
    cls: type, take: Callable[[Any], Any], back: Callable[[Any], Any]
) -> tuple[str, BatchType]:
    return _name_of(cls), BatchType(
        lambda value: ((), take(value)), lambda children, context: back(context)
    )


def _spread(items: list[Any]) -> list[Any]:
    hashes = collections.Counter(map(hash, items))
    if hashes and max(hashes.values()) > _EQUAL_HASHES_MAX:
        raise ValueError("too many elements of a set have the same hash")
    return items


def _aware(value: Any) -> str:
    if value.tzinfo not in (None, datetime.timezone.utc) or value.fold:
        raise _Unfit
    return str(value.isoformat())


_VALUES: dict[str, BatchType] = dict(
    [
        _value(complex, lambda one: [one.real, one.imag], lambda parts: complex(*parts)),
        _value(set, list, lambda items: set(_spread(items))),
        _value(frozenset, list, lambda items: frozenset(_spread(items))),
        _value(bytearray, bytes, lambda data: bytearray(memoryview(data))),
        _value(range, lambda one: [one.start, one.stop, one.step], lambda parts: range(*parts)),
        _value(slice, lambda one: [one.start, one.stop, one.step], lambda parts: slice(*parts)),
        _value(decimal.Decimal, str, decimal.Decimal),
        _value(
            fractions.Fraction,
            lambda one: [one.numerator, one.denominator],
            lambda parts: fractions.Fraction(*parts),
        ),
        _value(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
        _value(datetime.datetime, _aware, datetime.datetime.fromisoformat),
        _value(datetime.time, _aware, datetime.time.fromisoformat),
        _value(
            datetime.timedelta,
            lambda one: [one.days, one.seconds, one.microseconds],
            lambda parts: datetime.timedelta(*parts),
        ),
        _value(uuid.UUID, str, uuid.UUID),
        _value(pathlib.PosixPath, str, pathlib.PosixPath),
        _value(pathlib.PurePosixPath, str, pathlib.PurePosixPath),
        _value(torch.Size, list, torch.Size),
    ]
)

_LISTED = _KNOWN | _VALUES

_C.set_batch_types(flatten, make)
