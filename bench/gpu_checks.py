# SPDX-License-Identifier: Apache-2.0
"""The checks of gpu_programs.py: programs train on a device with penstock bit-for-bit as with
torch's loader.

A row has the case and the way of loading, and some of: whether the losses are torch's, operators
that moved to the workers, the bytes to the device over torch's, steps a second, a note.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from gpu_measures import CUTS, Options, Row, make_loader, moved_by, prepare_device
from torch.nn import functional as F

# ---- The table of styles: losses and moved operations


def styles(options: Options) -> Iterator[Row]:
    from device_styles import STYLES

    names = [style.name for style in STYLES]
    if options.is_quick:
        for name in names[3:5]:
            yield from style_rows(name, options.device, ("swapped", "followed", "maximal"))
        return
    ways = ("swapped", "followed", *CUTS)
    count = max(1, len(os.sched_getaffinity(0)) // 4)  # each has separate workers
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawn, prepare_device, (options.device,)) as processes:
        found = [processes.submit(style_rows, name, options.device, ways) for name in names]
        for rows in found:
            yield from rows.result()


def style_rows(name: str, device: str, ways: tuple[str, ...]) -> list[Row]:
    from device_styles import STYLES, run

    style = next(style for style in STYLES if style.name == name)
    if style.package and importlib.util.find_spec(style.package) is None:
        return [{"case": name, "note": f"left out: {style.package} is not installed"}]
    expected, again = run(name, "torch", device), run(name, "torch", device)
    if expected.losses != again.losses:
        return [{"case": name, "note": "left out: torch's own losses differ from run to run"}]
    rows = []
    for way in ways:
        ours = run(name, way, device)
        is_equal = (ours.losses, ours.parameters) == (expected.losses, expected.parameters)
        row = {"case": name, "way": way, "equal": is_equal, "moved": sorted(ours.moved[0])}
        if expected.bytes_in:  # the simulated GPU counts them
            row["bytes_over_torchs"] = round(ours.bytes_in / expected.bytes_in, 2)
        rows.append(row | ({"note": ours.refused[0]} if ours.refused[0] else {}))
    return rows


# ---- Small trainings whose losses are compared


class Trained(NamedTuple):
    losses: list[float]
    moved: list[str]
    refused: str | None = None


def train(
    way: str,
    options: Options,
    compiled: dict[str, Any] | None = None,
    has_autocast: bool = False,
    **of_loader: Any,
) -> Trained:
    """A network on images that it prepares itself on the device."""
    from device_styles import Convolutions, Images, prepared_image

    torch._dynamo.reset()
    torch.manual_seed(11)
    model = Convolutions(prepared_image).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    of_loader = {"batch_size": 4, "shuffle": True, "num_workers": 2, **of_loader}
    loader = make_loader(Images(), way, options, **of_loader)
    called: Any = model if compiled is None else torch.compile(model, **compiled)
    if way in CUTS:
        import penstock

        called = penstock.offload(called, loader, cut=way)  # type: ignore[arg-type]
    torch.manual_seed(12)
    losses = []
    for _ in range(2):
        for batch in loader:
            images, labels = (x.to(options.device, non_blocking=True) for x in batch)
            optimizer.zero_grad()
            with torch.autocast(options.device, torch.bfloat16, enabled=has_autocast):
                loss = F.cross_entropy(called(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    plan = getattr(loader, "plan", None)
    return Trained(losses, moved_by(loader), plan.refused if plan else None)


def compared(
    case: str, ways: tuple[str, ...], train_by: Callable[[str], Trained], first: str = "torch"
) -> Iterator[Row]:
    """A row for each way, whose losses have to equal the losses of the first way."""
    expected = train_by(first)
    if train_by(first).losses != expected.losses:
        yield {"case": case, "note": "left out: torch's own losses differ from run to run"}
        return
    for way in ways:
        try:
            ours = train_by(way)
        except Exception as error:
            yield {"case": case, "way": way, "equal": False, "note": repr(error)[:300]}
            continue
        row = {"case": case, "way": way, "equal": ours.losses == expected.losses}
        row["moved"] = ours.moved
        yield row | ({"note": ours.refused} if ours.refused else {})


def compiled(options: Options) -> Iterator[Row]:
    """torch.compile with autocast and with CUDA graphs, and a step that the program captured."""
    kinds: dict[str, dict[str, Any]] = {"inductor": {}, "CUDA graphs": {"mode": "reduce-overhead"}}
    if options.device != "cuda":  # there is no Inductor for it, or it needs a compiler of the host
        kinds = {"aot_eager": {"backend": "aot_eager"}}
    ways = ("followed", "maximal") if options.is_quick else ("followed", *CUTS)
    for (kind, arguments), has_autocast in itertools.product(kinds.items(), (False, True)):
        case = f"torch.compile, {kind}{', autocast' if has_autocast else ''}"

        def train_by(way: str, a: Any = arguments, h: bool = has_autocast) -> Trained:
            return train(way, options, a, h)

        yield from compared(case, ways, train_by)
    case = "step in a CUDA graph" if options.device == "cuda" else "step with static buffers"
    yield from compared(case, ("swapped", "followed"), lambda way: train_captured(way, options))


def train_captured(way: str, options: Options) -> Trained:
    """A step that is captured once and replayed on buffers, to which each batch is copied."""
    from device_styles import Convolutions, Images, prepared_image

    torch.manual_seed(11)
    model = Convolutions(prepared_image).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = make_loader(Images(), way, options, batch_size=4, shuffle=True, num_workers=2)
    torch.manual_seed(12)
    images = torch.zeros(4, 3, 20, 20, dtype=torch.uint8, device=options.device)
    labels = torch.zeros(4, dtype=torch.long, device=options.device)
    loss = torch.zeros((), device=options.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        found = F.cross_entropy(model(images), labels)
        found.backward()
        optimizer.step()
        loss.copy_(found.detach())

    replay = _captured(step) if options.device == "cuda" else step
    losses = []
    for _ in range(2):
        for batch in loader:
            images.copy_(batch[0], non_blocking=True)
            labels.copy_(batch[1], non_blocking=True)
            replay()
            losses.append(loss.item())
    return Trained(losses, [])


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


# ---- Frameworks


def frameworks(options: Options) -> Iterator[Row]:
    on = "" if options.device == "cuda" else ", on the CPU"  # they know no simulated device
    for name, train_by in (("lightning", train_by_lightning), ("accelerate", train_by_accelerate)):
        if importlib.util.find_spec(name) is None:
            yield {"case": name, "note": f"left out: {name} is not installed"}
            continue

        def train_way(way: str, by: Callable[..., Trained] = train_by) -> Trained:
            return by(way, options)

        ways = ("followed", "maximal") if options.is_quick else ("swapped", "followed", *CUTS)
        yield from compared(name + on, ways, train_way)


def train_by_lightning(way: str, options: Options) -> Trained:
    import lightning
    from device_styles import Convolutions, Images, prepared_image

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Convolutions(prepared_image)
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, labels = batch
            loss = F.cross_entropy(self.network(images), labels)
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    torch._dynamo.reset()
    torch.manual_seed(11)
    module = Module()
    loader = make_loader(Images(), way, options, batch_size=4, shuffle=True, num_workers=2)
    if way in CUTS:
        import penstock

        penstock.offload(module.network, loader, cut=way)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        accelerator="gpu" if options.device == "cuda" else "cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(12)
    trainer.fit(module, loader)
    return Trained([loss.item() for loss in module.losses], moved_by(loader))


def train_by_accelerate(way: str, options: Options) -> Trained:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from device_styles import Convolutions, Images, prepared_image

    import penstock

    torch._dynamo.reset()
    if way != "torch":
        penstock.install()  # accelerate rebuilds the loader with torch's class
    try:
        torch.manual_seed(11)
        accelerator = Accelerator(cpu=options.device != "cuda")
        model = Convolutions(prepared_image)
        loader = torch.utils.data.DataLoader(Images(), batch_size=4, shuffle=True, num_workers=2)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), loader
        )
        base = loader.base_dataloader
        if way == "followed":
            base.device = "auto"
        if way in CUTS:
            penstock.offload(model, base, cut=way)  # type: ignore[arg-type]
        torch.manual_seed(12)
        losses = []
        for _ in range(2):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                losses.append(loss.item())
        return Trained(losses, moved_by(base))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if way != "torch":
            penstock.uninstall()


# ---- A pool, and several loaders


def pool(options: Options) -> Iterator[Row]:
    """Workers of a pool on this machine. The stream is the seeding="batch" stream."""
    from penstock.pool.local_pool import LocalPool

    local = LocalPool.start(2 if options.is_quick else 4, None)

    def train_by(way: str) -> Trained:
        if way == "without workers":
            return train("swapped", options, num_workers=0, seeding="batch")
        return train(way, options, num_workers=0, pool=local.endpoint, seeding="batch", timeout=60)

    try:
        ways = ("swapped", "maximal") if options.is_quick else ("swapped", "followed", *CUTS)
        yield from compared("pool on loopback", ways, train_by, "without workers")
    finally:
        local.end()


def loaders(options: Options) -> Iterator[Row]:
    ways = ("followed", "maximal") if options.is_quick else ("swapped", "followed", *CUTS)
    yield from compared(
        "one model, training and validation", ways, lambda way: train_and_validate(way, options)
    )
    yield from compared("two models, a loader each", ways, lambda way: train_two(way, options))


def train_and_validate(way: str, options: Options) -> Trained:
    from device_styles import Convolutions, Images, prepared_image

    torch._dynamo.reset()
    torch.manual_seed(11)
    model = Convolutions(prepared_image).to(options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = make_loader(Images(), way, options, batch_size=4, shuffle=True, num_workers=2)
    validation = make_loader(Images(), way, options, batch_size=8, num_workers=1)
    if way in CUTS:
        import penstock

        penstock.offload(model, training, validation, cut=way)  # type: ignore[arg-type]
    torch.manual_seed(12)
    losses = []
    for _ in range(2):
        model.train()
        for batch in training:
            images, labels = (x.to(options.device, non_blocking=True) for x in batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            for batch in validation:
                images, labels = (x.to(options.device) for x in batch)
                losses.append(F.cross_entropy(model(images), labels).item())
    return Trained(losses, moved_by(training))


def train_two(way: str, options: Options) -> Trained:
    from device_styles import Convolutions, Embedded, Images, Rows, buckets, prepared_image

    torch._dynamo.reset()
    torch.manual_seed(11)
    sides = []
    for network, dataset in ((Convolutions(prepared_image), Images()), (Embedded(buckets), Rows())):
        model = network.to(options.device)
        loader = make_loader(dataset, way, options, batch_size=4, shuffle=True, num_workers=1)
        if way in CUTS:
            import penstock

            penstock.offload(model, loader, cut=way)  # type: ignore[arg-type]
        sides.append((model, torch.optim.SGD(model.parameters(), lr=0.05), loader))
    torch.manual_seed(12)
    losses = []
    for _ in range(2):
        for batches in zip(*(loader for _, _, loader in sides), strict=True):
            for (model, optimizer, _), batch in zip(sides, batches, strict=True):
                inputs, labels = (x.to(options.device, non_blocking=True) for x in batch)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return Trained(losses, sorted({name for side in sides for name in moved_by(side[2])}))
