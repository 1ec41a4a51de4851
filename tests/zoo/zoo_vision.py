# SPDX-License-Identifier: Apache-2.0
"""Models and transforms of torchvision and timm, small and with random weights.

Packages are imported where a model is made: collecting the tests should not wait for them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from cut_models import Case, NormalizedResNet, first_argument, images
from torch import nn


class AugmentsInForward(NormalizedResNet):
    """torchvision's transforms (v2) as modules of the model: random crops, flips and colours."""

    def __init__(self) -> None:
        from torchvision.transforms import v2

        super().__init__()
        self.augment = nn.Sequential(
            v2.RandomResizedCrop(16, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.2, 0.2),
        )
        self.normalize = nn.Sequential(
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = self.augment(x)
        return self.head(F.relu(self.norm1(self.stem(self.normalize(x)))).mean((2, 3)))


class UsesItsPreset(NormalizedResNet):
    """The preprocessing that torchvision ships with its weights, in front of the network."""

    def __init__(self) -> None:
        from torchvision.transforms._presets import ImageClassification

        super().__init__()
        self.preset = ImageClassification(crop_size=16, resize_size=18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm1(self.stem(self.preset(x)))).mean((2, 3)))


class TorchvisionNet(nn.Module):
    """MobileNetV3's blocks after a normalisation in floating point."""

    def __init__(self) -> None:
        from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3

        super().__init__()
        block = InvertedResidualConfig(8, 3, 16, 8, True, "HS", 2, 1, 1.0)
        self.net = MobileNetV3([block], last_channel=16, num_classes=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.float().div(127.5).sub(1.0))


class Timm(nn.Module):
    """A model of timm after the mean and deviation of its data config."""

    def __init__(self, net: nn.Module) -> None:
        import timm.data

        super().__init__()
        config = timm.data.resolve_model_data_config(net)
        self.net = net
        self.register_buffer("mean", torch.tensor(config["mean"]).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(config["std"]).view(3, 1, 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x.float() / 255, size=(32, 32), mode="bicubic")
        return self.net((x - self.mean) / self.std)


class Detects(nn.Module):
    """A detection model takes lists of images of many sizes and resizes them inside forward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> Any:
        scaled = [image.float() / 255 for image in images]
        if self.training:
            return self.net(scaled, targets)
        return {str(k): found["scores"] for k, found in enumerate(self.net(scaled))}


def timm_vit() -> nn.Module:
    import timm

    return Timm(
        timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=32,
            depth=2,
            num_heads=2,
            num_classes=4,
            drop_path_rate=0.1,
        )
    )


def timm_resnet() -> nn.Module:
    import timm

    return Timm(
        timm.create_model(
            "resnet10t", channels=(8, 8, 16, 16), stem_width=8, num_classes=4, drop_rate=0.1
        )
    )


def backbone() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4, padding=1), nn.ReLU())
    net.out_channels = 8  # type: ignore[assignment]
    return net


def faster_rcnn() -> nn.Module:
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.rpn import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    return Detects(
        FasterRCNN(
            backbone(),
            num_classes=3,
            min_size=(32, 40),
            max_size=48,
            rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
            box_roi_pool=MultiScaleRoIAlign(["0"], output_size=2, sampling_ratio=1),
            rpn_pre_nms_top_n_train=20,
            rpn_post_nms_top_n_train=8,
        )
    )


def retina_net() -> nn.Module:
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return Detects(
        RetinaNet(
            backbone(),
            num_classes=3,
            min_size=32,
            max_size=48,
            anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
            topk_candidates=20,
        )
    )


def scenes(k: int) -> dict[str, Any]:
    """Two images of different sizes, each with two boxes."""
    g = torch.Generator().manual_seed(k)
    pictures, targets = [], []
    for height, width in ((28, 36), (40, 30)):
        pictures.append(torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=g))
        corner = torch.rand(2, 2, generator=g) * 10
        size = 6 + torch.rand(2, 2, generator=g) * 10
        targets.append(
            {
                "boxes": torch.cat([corner, corner + size], 1),
                "labels": torch.randint(1, 3, (2,), generator=g),
            }
        )
    return {"images": pictures, "targets": targets}


def detection_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    parts = model(batch["images"], batch["targets"])
    return sum((part.sum() for part in parts.values()), torch.zeros(()))


VISION = [
    Case(
        "v2_augment",
        AugmentsInForward,
        images,
        first_argument,
        True,
        "torchvision v2",
        "many graphs; the drawn parameters become Python numbers",
    ),
    Case(
        "v2_preset",
        UsesItsPreset,
        images,
        first_argument,
        True,
        "torchvision preset",
        "several graphs",
    ),
    Case(
        "mobilenet",
        TorchvisionNet,
        images,
        first_argument,
        True,
        "torchvision model",
        "the normalisation moves",
    ),
    Case(
        "faster_rcnn",
        faster_rcnn,
        scenes,
        detection_loss,
        True,
        "torchvision detection",
        "many graphs",
    ),
    Case(
        "retina_net",
        retina_net,
        scenes,
        detection_loss,
        True,
        "torchvision detection",
        "many graphs",
    ),
    Case(
        "timm_vit",
        timm_vit,
        images,
        first_argument,
        True,
        "timm transformer",
        "resize and normalisation move",
    ),
    Case(
        "timm_resnet",
        timm_resnet,
        images,
        first_argument,
        True,
        "timm convolutions",
        "resize and normalisation move",
    ),
]
