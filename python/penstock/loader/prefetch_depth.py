# SPDX-License-Identifier: Apache-2.0
"""How many batches a worker is asked for ahead."""

from __future__ import annotations

from penstock.loader.loader_face import LoaderFace
from penstock.stream.indices import recognise_sampler
from penstock.stream.table_rows import plain_rows

_DEEP_PREFETCH_BYTES = 1 << 20
_DEEP_PREFETCH_COUNT = 16


def prefetch_depth(loader: LoaderFace) -> int:
    """How many batches each worker is asked for ahead: ``prefetch_factor``, or more where nobody
    can see the difference.

    A small batch of a plain TensorDataset is ready sooner than the request for it has crossed two
    processes, so two of them in flight leave the workers idle. Reading ahead further is
    unobservable there: rows are read from tensors, and torch's own sampler, without a generator of
    the user's, draws at the first pull alone.
    """
    factor = loader.prefetch_factor or 1
    rows = plain_rows(loader.dataset, loader.collate_fn)
    recipe = recognise_sampler(loader._index_sampler)
    if rows is None or recipe is None or recipe.generator is not None or recipe.sample_count == 0:
        return factor
    row_bytes = sum(tensor[:1].nbytes for tensor in rows)
    batch_bytes = max(1, row_bytes * recipe.batch_size)
    return max(factor, min(_DEEP_PREFETCH_COUNT, _DEEP_PREFETCH_BYTES // batch_bytes))
