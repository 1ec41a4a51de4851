# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face's transformers with random weights, and recommenders on jagged tensors.

Packages are imported where a model is made: collecting the tests should not wait for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cut_models import Case, images, waves
from torch import nn
from zoo_lengths import bags

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(vocab_size=60, max_position_embeddings=32, num_labels=2, **SMALL)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=60, max_position_embeddings=32, **SMALL))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=60,
            d_model=32,
            d_kv=16,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )


class SeesImages(nn.Module):
    """A vision transformer of transformers, which gets its pixels rescaled in front of it."""

    def __init__(self) -> None:
        from transformers import ViTConfig, ViTForImageClassification

        super().__init__()
        config = ViTConfig(image_size=24, patch_size=8, num_labels=4, **SMALL)
        self.net = ViTForImageClassification(config)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.net(pixel_values=(x.float() / 255 - 0.5) / 0.5, labels=labels)


class HearsSpeech(nn.Module):
    """wav2vec 2.0, whose SpecAugment draws from NumPy's generator."""

    def __init__(self) -> None:
        from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

        super().__init__()
        config = Wav2Vec2Config(
            conv_dim=(8, 8),
            conv_stride=(4, 4),
            conv_kernel=(8, 4),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_labels=3,
            classifier_proj_size=8,
            mask_time_prob=0.3,
            mask_time_length=2,
            **SMALL,
        )
        self.net = Wav2Vec2ForSequenceClassification(config)

    def forward(self, wave: torch.Tensor, labels: torch.Tensor) -> Any:
        wave = wave.float()
        wave = (wave - wave.mean(1, keepdim=True)) / (wave.std(1, keepdim=True) + 1e-5)
        return self.net(wave, labels=labels)


class Recommends(nn.Module):
    """torchrec: keys, values and lengths become a KeyedJaggedTensor inside forward."""

    def __init__(self) -> None:
        import torchrec

        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=name, embedding_dim=4, num_embeddings=50, feature_names=[name]
            )
            for name in ("user", "item")
        ]
        self.bags = torchrec.EmbeddingBagCollection(tables)
        self.head = nn.Linear(8, 2)

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        jagged = KeyedJaggedTensor.from_lengths_sync(["user", "item"], values * 7 % 50, lengths)
        return self.head(self.bags(jagged).values())


def sentences(k: int) -> dict[str, torch.Tensor]:
    """Padded to the longest of the batch, so every batch has a different length."""
    g = torch.Generator().manual_seed(k)
    lengths = torch.randint(4, 9 + k % 3, (4, 1), generator=g)
    mask = (torch.arange(int(lengths.max())) < lengths).long()
    return {
        "input_ids": torch.randint(1, 60, mask.shape, generator=g) * mask,
        "attention_mask": mask,
        "labels": torch.randint(0, 2, (4,), generator=g),
    }


def continuations(k: int) -> dict[str, torch.Tensor]:
    """Padded to one length for all batches, which spares Dynamo a second capture."""
    g = torch.Generator().manual_seed(k)
    mask = (torch.arange(10) < torch.randint(4, 11, (4, 1), generator=g)).long()
    ids = torch.randint(1, 60, mask.shape, generator=g) * mask
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def named_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def labelled_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0], labels=batch[1]).loss
    return loss


def jagged_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["lengths"]), batch["label"][:4])


LANGUAGE = [
    Case(
        "hf_bert",
        bert,
        sentences,
        named_loss,
        True,
        "transformers encoder",
        "masks and positions move",
    ),
    Case(
        "hf_llama",
        llama,
        continuations,
        named_loss,
        True,
        "transformers decoder",
        "masks, positions and shifted labels move",
    ),
    Case(
        "hf_t5",
        t5,
        continuations,
        named_loss,
        True,
        "transformers encoder-decoder",
        "several graphs",
    ),
    Case(
        "hf_vit",
        SeesImages,
        images,
        labelled_loss,
        True,
        "transformers vision",
        "the rescaling moves",
    ),
    Case(
        "hf_wav2vec2",
        HearsSpeech,
        waves,
        labelled_loss,
        True,
        "transformers speech",
        "several graphs",
    ),
    Case(
        "torchrec",
        Recommends,
        bags,
        jagged_loss,
        True,
        "KeyedJaggedTensor",
        "several graphs; lengths become Python numbers",
        package="torchrec",
    ),
]
