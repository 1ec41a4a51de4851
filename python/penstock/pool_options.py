# SPDX-License-Identifier: Apache-2.0
"""The options of ``pool=``: what they may be, and which others a pool forbids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe, MapDataPipe, _DatasetKind

from penstock.automatic_count import AutomaticCount
from penstock.shard_state import is_stateful

if TYPE_CHECKING:
    from penstock.dataloader import DataLoader

POOL_VARIABLE = "PENSTOCK_POOL"
KEYS_VARIABLE = "PENSTOCK_KEYS"
# What torch's constructor is given in the place of options that are the pool's.
DEFAULT_PREFETCH_FACTOR = 2


def chosen_pool(pool: str | None) -> str | None:
    """The address of the pool that ``pool`` and the environment name; "" names none."""
    return (os.environ.get(POOL_VARIABLE) if pool is None else pool) or None


def chosen_keys(keys: str | os.PathLike[str] | None) -> str | None:
    """The folder of keys that ``keys`` and the environment name."""
    chosen = os.environ.get(KEYS_VARIABLE) if keys is None else os.fspath(keys)
    return chosen or None


def check_pool_options(loader: DataLoader[Any]) -> None:
    """Refuses what the options of a pool cannot be. Raises ValueError or TypeError."""
    _check_code_paths(loader.code_paths)
    if type(loader.trust_workers) is not bool:
        raise TypeError(
            f"trust_workers is {loader.trust_workers!r}; True or False is expected: whether "
            f"pickled objects that a pool's workers send may be unpickled here, which runs code of "
            f"theirs"
        )
    if loader.pool is None:
        return
    if not isinstance(loader.pool, str) or not loader.pool.startswith("tcp://"):
        raise ValueError(
            f"pool is {loader.pool!r}; the address of a controller is expected, as in "
            f"'tcp://host:7000'"
        )
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        raise ValueError(
            f"pool={loader.pool!r} was given and the dataset is a datapipe, which only torch's own "
            f"iterator reads; use a map-style or an iterable dataset, or leave pool out"
        )
    if isinstance(loader.num_workers, AutomaticCount):
        raise ValueError(
            "num_workers is 'auto' and there is a pool, which is what grows and shrinks then; pass "
            "how many processes of the trainer's own are to serve beside it, or leave it out"
        )
    if loader.seeding == "worker":
        raise ValueError(
            "seeding='worker' was given with a pool, whose workers come and go, so that the stream "
            "would depend on which there are; seeding='batch' is expected, which is the default "
            "with a pool"
        )
    if loader._dataset_kind == _DatasetKind.Map and is_stateful(loader.dataset):
        raise ValueError(
            f"pool={loader.pool!r} was given but {type(loader.dataset).__name__} has a "
            f"state_dict() and is read by index, so that each worker has a state of its own and "
            f"the stream depends on which there are; leave the state out of the dataset, or pool"
        )


def _check_code_paths(code_paths: Any) -> None:
    if isinstance(code_paths, (str, bytes)) or not isinstance(code_paths, Sequence):
        raise TypeError(
            f"code_paths is {code_paths!r}; a list of folders or files is expected, whose modules "
            f"travel to the pool's workers"
        )
    for path in code_paths:
        if not Path(path).exists():
            raise ValueError(
                f"code_paths names {os.fspath(path)!r}, which is not there; name folders that hold "
                f"the modules of your own that the dataset needs, or single files"
            )
