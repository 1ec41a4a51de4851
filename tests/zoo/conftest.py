# SPDX-License-Identifier: Apache-2.0
"""The settings that the zoo's packages need around every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Read by the packages when they are imported: the tests here use no network.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import pytest  # noqa: E402
import torch.distributed as dist  # noqa: E402


@pytest.fixture(autouse=True)
def destroy_leftover_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
