# SPDX-License-Identifier: Apache-2.0
"""A program that changes settings at its head and under its main guard, and prints as JSON the
samples that its loader's workers make under them. Arguments: the loader's module, the start method,
further options as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

torch.set_default_dtype(torch.float64)
torch.set_flush_denormal(True)
os.environ["SCALE_OF_HEAD"] = "3"


class Settings(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        weights = torch.rand(16, 16, generator=generator, dtype=torch.float32)
        mkldnn: Any = torch.backends.mkldnn
        return {
            "default_dtype": str(torch.tensor([1.5]).dtype),
            "denormal": torch.tensor([1e-39], dtype=torch.float32).mul(0.5),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul": torch.get_float32_matmul_precision(),
            "mkldnn": (mkldnn.enabled, mkldnn.matmul.fp32_precision, mkldnn.conv.fp32_precision),
            "product": weights @ weights,
            "threads": torch.get_num_threads(),
            "numpy": sorted(np.geterr().items()),
            "zone": time.strftime("%Z", time.localtime(0)),
            "folder": os.getcwd(),
            "of_head": os.environ.get("SCALE_OF_HEAD"),
            "of_guard": os.environ.get("SCALE_OF_GUARD"),
            "random": torch.rand(1),
        }


def main(module: str, method: str, options: str = "{}") -> None:
    loader_class: Any = importlib.import_module(module).DataLoader
    torch.set_default_dtype(torch.float16)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    np.seterr(divide="ignore", under="raise")
    os.environ["SCALE_OF_GUARD"] = "5"
    os.environ["TZ"] = "NZST-12"
    time.tzset()
    os.chdir("/")
    torch.manual_seed(3)
    loader = loader_class(
        Settings(),
        batch_size=2,
        num_workers=2,
        multiprocessing_context=method,
        timeout=120,
        **json.loads(options),
    )
    epochs = [list(loader)]
    os.environ["SCALE_OF_GUARD"] = "7"
    torch.set_float32_matmul_precision("highest")
    epochs.append(list(loader))
    print(json.dumps(epochs, default=torch.Tensor.tolist))


if __name__ == "__main__":
    main(*sys.argv[1:])
