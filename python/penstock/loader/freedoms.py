# SPDX-License-Identifier: Apache-2.0
"""The differences from torch's loader that a loader may have because no program can see them."""

from __future__ import annotations

from penstock.loader.loader_face import LoaderFace
from penstock.loader.options import has_pool, is_seeded_by_batch
from penstock.loader.pool_options import DEFAULT_PREFETCH_FACTOR
from penstock.seams.iterators import DatasetKind
from penstock.stream.indices import recognise_sampler
from penstock.stream.shard_state import is_stateful
from penstock.stream.table_rows import plain_rows

_DEEP_PREFETCH_BYTES = 1 << 20
_DEEP_PREFETCH_COUNT = 16


def prefetch_factor(loader: LoaderFace) -> int | None:
    """The loader's own, which torch's constructor leaves out without workers, or the default where
    a pool makes the batches of such a loader."""
    factor: int | None = loader.prefetch_factor
    return DEFAULT_PREFETCH_FACTOR if factor is None and has_pool(loader) else factor


def prefetch_depth(loader: LoaderFace) -> int:
    """How many batches each worker is asked for ahead: ``prefetch_factor``, or more where nobody
    can see the difference.

    A small batch of a plain TensorDataset is ready sooner than the request for it has crossed two
    processes, so two of them in flight leave the workers idle. Reading ahead further is
    unobservable there: rows are read from tensors, and torch's own sampler, without a generator of
    the user's, draws at the first pull alone.
    """
    factor = prefetch_factor(loader) or 1
    rows = plain_rows(loader.dataset, loader.collate_fn)
    recipe = recognise_sampler(loader._index_sampler)
    if rows is None or recipe is None or recipe.generator is not None or recipe.sample_count == 0:
        return factor
    row_bytes = sum(tensor[:1].nbytes for tensor in rows)
    batch_bytes = max(1, row_bytes * recipe.batch_size)
    return max(factor, min(_DEEP_PREFETCH_COUNT, _DEEP_PREFETCH_BYTES // batch_bytes))


def any_worker_serves(loader: LoaderFace, worker_count: int) -> bool:
    """Whether nothing in the stream says which worker made a batch. Then the worker is asked that
    will answer soonest, and the others make the batches that a dead worker owed.
    """
    return (
        is_seeded_by_batch(loader)
        and loader._dataset_kind == DatasetKind.Map
        and worker_count > 1
        and loader.worker_init_fn is None  # which is told who it is, and may fail in one alone
        and not is_stateful(loader.dataset)
        and plain_rows(loader.dataset, loader.collate_fn) is None  # no row is slow
    )


def may_begin_early(loader: LoaderFace) -> bool:
    """Whether nothing speaks against asking for the next epoch before it begins, as far as it can
    be seen here. Its worker looks at the dataset.
    """
    return bool(
        loader.persistent_workers
        and loader.overlap_epochs
        and loader.in_order
        and not is_stateful(loader.dataset)
    )
