# SPDX-License-Identifier: Apache-2.0
"""A configuration for torchtitan's trainer on a CPU: two layers of its debug model, and the loader
of examples/ranks over a packed mixture of the files of text in the working folder.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan
from titan_loader import PenstockDataLoader
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    DatasetMixConfig,
    IndexedJsonlSource,
    SingleDatasetConfig,
    WeightedDataset,
)
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.hf_datasets.text_datasets import TextProcessor
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

CONTEXT = 128
SOURCES = {"guides.jsonl": 0.7, "reference.jsonl": 0.3}


class DenseAttention(FlexAttention):
    """FlexAttention, which has no backward pass on CPUs, with its mask as a matrix."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_TNH: torch.Tensor,  # noqa: N803 - torchtitan looks for these names
        k_TNH: torch.Tensor,  # noqa: N803
        v_TNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        mask = create_mask(attention_masks.mask_mod, 1, 1, len(q_TNH), len(q_TNH), device="cpu")
        parts = [part.transpose(0, 1).unsqueeze(0) for part in (q_TNH, k_TNH, v_TNH)]
        values = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return values.squeeze(0).transpose(0, 1)


class ExactLog(MetricsProcessor):
    """Appends the exact metrics of each step to rank-R, and may have the process die."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        killed_after: int = 0  # a step

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        tokens = (extra_metrics or {})["n_tokens_seen"]
        with Path(f"rank-{os.environ['RANK']}").open("a") as file:
            row = [step, global_avg_loss, global_max_loss, grad_norm, tokens]
            file.write(json.dumps(row) + "\n")
        if step == self.config.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)


def debug_model() -> Any:
    config = llama3_debugmodel()
    config.dump_folder = "."
    config.hf_assets_path = str(Path(torchtitan.__file__).parents[1] / "tests/assets/tokenizer")
    config.debug.seed = 7
    config.metrics = ExactLog.Config(log_freq=1)
    config.validator.enable = False
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = DenseAttention.Config()
    parallelize = config.model_spec.parallelize_fn

    def parallelize_for_gloo(*given: Any, **options: Any) -> Any:
        parallel = parallelize(*given, **options)
        for module in parallel.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        return parallel

    config.model_spec.parallelize_fn = parallelize_for_gloo
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.training.max_context_length = CONTEXT
    config.checkpoint.enable = True
    parts = [
        WeightedDataset(
            dataset=SingleDatasetConfig(
                source=IndexedJsonlSource.Config(patterns=(name,)),
                processor=TextProcessor.Config(),
                post_filters=(lambda sample: sample is not None,),
            ),
            weight=weight,
        )
        for name, weight in SOURCES.items()
    ]
    mixture = DatasetMixConfig(datasets=tuple(parts))
    config.dataloader = PenstockDataLoader.Config(
        dataset=ConcatThenSplitPackingConfig(dataset=mixture)
    )
    return config
