# SPDX-License-Identifier: Apache-2.0
"""Arguments that are truthy, or count, without being a bool or an int: which ones torch accepts,
and its errors for the others.

`persistent_workers="yes"` ended in a TypeError of the native client, and `prefetch_factor=2.0` was
accepted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.utils.data
from torch.utils.data import TensorDataset

from penstock import DataLoader

ROWS = TensorDataset(torch.arange(12))


class Three:
    def __index__(self) -> int:
        return 3

    def __repr__(self) -> str:
        return "Three()"


TRUTHS: list[Any] = ["yes", [1], (False,), 1, np.bool_(True), "", [], 0, None, np.bool_(False)]
COUNTS: list[Any] = [np.int64(2), np.uint8(2), True, 2.0, "2", Three(), np.float32(2)]
CASES = [
    *(("persistent_workers", value) for value in TRUTHS),
    *(("in_order", value) for value in TRUTHS),
    *(("drop_last", value) for value in TRUTHS),
    *(("shuffle", value) for value in TRUTHS if value is not None),
    *(("num_workers", value) for value in COUNTS if value != "2"),
    *(("prefetch_factor", value) for value in COUNTS),
    *(("batch_size", value) for value in COUNTS),
    *(("timeout", value) for value in (True, np.float32(60), np.int64(60), "60")),
]


def outcome(loader_class: Any, name: str, value: Any) -> Any:
    """The batches of two epochs, or the type and text of the error."""
    torch.manual_seed(3)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 1, name: value}
    try:
        loader = loader_class(ROWS, **options)
        return [[batch[0].tolist() for batch in loader] for _ in range(2)]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.sampled(20)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value"), CASES, ids=repr)
def test_argument_types_are_accepted_as_by_torch(name: str, value: Any) -> None:
    expected = outcome(torch.utils.data.DataLoader, name, value)
    assert outcome(DataLoader, name, value) == expected


@pytest.mark.parametrize("value", ["many", "Auto", "4"])
def test_unknown_num_workers_string_is_rejected(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        DataLoader(ROWS, num_workers=value)
    assert "num_workers" in str(raised.value) and repr(value) in str(raised.value)
    assert '"auto"' in str(raised.value)
