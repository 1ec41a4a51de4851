# SPDX-License-Identifier: Apache-2.0
"""A rank of torchtitan's trainer on a CPU, for tests.

    titan_trainer.py FOLDER '["--module", "titan_config", "--config", "debug_model", ...]'

Runs torchtitan's program with these arguments in FOLDER. Where there is no accelerator, torchtitan
takes CUDA for its device; here it is told to take the CPU, which has no statistics of memory.
"""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType, SimpleNamespace

import torch


def cpu_module() -> ModuleType:
    """torch.cpu, with what torchtitan asks a device for its log."""
    module = ModuleType("cpu")
    vars(module).update({k: v for k, v in vars(torch.cpu).items() if not k.startswith("_")})
    vars(module).update(
        current_device=lambda: 0,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    return module


def main() -> None:
    os.chdir(sys.argv[1])
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    sys.argv[1:] = json.loads(sys.argv[2])
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", cpu_module()
    from torchtitan.train import main as train  # the modules that it imports copy these names

    train()


if __name__ == "__main__":
    main()
