# SPDX-License-Identifier: Apache-2.0
"""A script in the style of torchvision's references, unmodified, under penstock run."""

from __future__ import annotations

from pathlib import Path

import pytest
from program_runs import PENSTOCK_RUN, PYTHON, run_program

pytestmark = pytest.mark.slow

CLASSIFICATION = """
    import argparse, time
    import torch, torchvision
    from torch import nn
    from torchvision.transforms import v2

    def load_data(options):
        augment = v2.Compose([
            v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.2] * 3),
            v2.RandomErasing(0.5),
        ])
        data = torchvision.datasets.FakeData(20, (3, 24, 24), 4, transform=augment)
        if options.distributed:
            sampler = torch.utils.data.distributed.DistributedSampler(
                data, num_replicas=2, rank=1, seed=3
            )
        else:
            sampler = torch.utils.data.RandomSampler(data)
        return data, sampler

    def train_one_epoch(model, criterion, optimizer, loader, epoch):
        model.train()
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(epoch, loss.item().hex(), labels.tolist(), tuple(images.shape))

    def main(options):
        torch.manual_seed(options.seed)
        torch.set_num_threads(1)
        data, sampler = load_data(options)
        loader = torch.utils.data.DataLoader(
            data, batch_size=4, sampler=sampler, num_workers=options.workers,
            pin_memory=True, drop_last=True,
        )
        model = torchvision.models.squeezenet1_1(num_classes=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for epoch in range(2):
            if options.distributed:
                sampler.set_epoch(epoch)
            train_one_epoch(model, nn.CrossEntropyLoss(), optimizer, loader, epoch)
        checksum = sum(parameter.double().sum() for parameter in model.parameters())
        print("weights", checksum.item().hex())
        print("iterator", loader.stats().iterator if hasattr(loader, "stats") else "torch")

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--workers", type=int, default=0)
        parser.add_argument("--distributed", action="store_true")
        main(parser.parse_args())
"""


@pytest.mark.long("distributed", "alone")
@pytest.mark.parametrize("options", ["", "--distributed"], ids=["alone", "distributed"])
def test_training_script_prints_the_same_losses_under_penstock(
    options: str, tmp_path: Path
) -> None:
    runs = {}
    for name, command in (("torch", PYTHON), ("penstock", PENSTOCK_RUN)):
        arguments = ["--workers=2", *options.split()]
        out = run_program(command, CLASSIFICATION, tmp_path, *arguments)
        *lines, iterator = out.splitlines()
        assert iterator == f"iterator {name}"
        runs[name] = lines
    assert len(runs["torch"]) == (2 * 2 if options else 2 * 5) + 1
    assert runs["penstock"] == runs["torch"]
