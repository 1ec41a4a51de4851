# SPDX-License-Identifier: Apache-2.0
"""Robot demonstrations on video, as LeRobot stores them: workers decode frames with torchcodec.

A sample has the last frames of two cameras, the robot's state and its next actions. Frames leave
the workers as uint8, a quarter of the bytes of float32, and the trainer converts them. Needs
`pip install torchcodec` and FFmpeg's libraries (on Debian, `apt-get install ffmpeg`).

    python examples/video.py
    penstock run --pool-local 2 examples/video.py
    penstock run --pool-local 2 examples/video.py --measure 5
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import itertools
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from penstock import DataLoader

try:
    from torchcodec.decoders import VideoDecoder
    from torchcodec.encoders import VideoEncoder
except (ImportError, RuntimeError) as error:
    raise SystemExit(
        f"examples/video.py needs torchcodec and FFmpeg's libraries, got: "
        f"{str(error).splitlines()[0]}; run pip install torchcodec and, on Debian, "
        f"apt-get install ffmpeg"
    ) from None

CAMERAS = ("top", "wrist")
FPS, HEIGHT, WIDTH = 30, 240, 320
HISTORY = (-12, -8, -4, 0)  # frames of a sample, counted from its own
ACTIONS = 16  # of a sample, from its own frame on
KEYFRAME_INTERVAL = 2  # LeRobot's, for random access
DECODERS_MAX = 16  # open videos of a process


class Episodes(torch.utils.data.Dataset):
    """The frames of all episodes in a folder, in order."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        self.tables = [torch.load(path) for path in sorted(self.folder.glob("*.pt"))]
        self.places = [
            (episode, frame)
            for episode, table in enumerate(self.tables)
            for frame in range(len(table["state"]))
        ]
        self.decoders, self.process = collections.OrderedDict(), os.getpid()

    def __getstate__(self):
        return {**self.__dict__, "decoders": collections.OrderedDict()}

    def __len__(self):
        return len(self.places)

    def __getitem__(self, index):
        episode, frame = self.places[index]
        table = self.tables[episode]
        sample = {
            f"observation.images.{camera}": self.frames(episode, camera, frame)
            for camera in CAMERAS
        }
        last = len(table["state"]) - 1
        steps = torch.arange(frame, frame + ACTIONS)
        sample["observation.state"] = table["state"][frame]
        sample["action"] = table["action"][steps.clamp(max=last)]
        sample["action_is_pad"] = steps > last
        return sample

    def frames(self, episode, camera, frame):
        indices = [max(0, frame + step) for step in HISTORY]
        return self.decoder(episode, camera).get_frames_at(indices).data  # uint8, (T, C, H, W)

    def decoder(self, episode, camera):
        # A forked worker must not read the open files of its parent: they share a position.
        if self.process != os.getpid():
            self.decoders, self.process = collections.OrderedDict(), os.getpid()
        path = self.folder / f"{episode:03d}-{camera}.mp4"
        if path in self.decoders:
            self.decoders.move_to_end(path)
        else:
            self.decoders[path] = VideoDecoder(path, num_ffmpeg_threads=1)
            if len(self.decoders) > DECODERS_MAX:
                self.decoders.popitem(last=False)
        return self.decoders[path]


def make_episodes(folder, episodes, frames):
    """Writes synthetic episodes: a block that the actions move over a textured ground."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for episode in range(episodes):
        if (folder / f"{episode:03d}.pt").exists():
            continue
        action = torch.randn(frames, 2, generator=generator).cumsum(0) / 8
        state = action.cumsum(0)
        for camera in CAMERAS:
            coarse = torch.randint(0, 256, (3, HEIGHT // 8, WIDTH // 8), generator=generator)
            ground = coarse.to(torch.uint8).repeat_interleave(8, 1).repeat_interleave(8, 2)
            video = ground.repeat(frames, 1, 1, 1)
            for number, (x, y) in enumerate(state.tolist()):
                row, column = int(HEIGHT / 2 + 4 * y) % HEIGHT, int(WIDTH / 2 + 4 * x) % WIDTH
                video[number, :, row : row + 32, column : column + 32] = 255
            VideoEncoder(video, frame_rate=FPS).to_file(
                folder / f"{episode:03d}-{camera}.mp4", extra_options={"g": str(KEYFRAME_INTERVAL)}
            )
        torch.save({"state": state, "action": action}, folder / f"{episode:03d}.pt")


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        channels = 3 * len(CAMERAS) * len(HISTORY)
        self.vision = nn.Sequential(
            nn.Conv2d(channels, 16, 8, stride=8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.head = nn.Linear(16 * 16 + 2, 2 * ACTIONS)

    def forward(self, batch):
        images = torch.cat([batch[f"observation.images.{one}"] for one in CAMERAS], dim=1)
        features = self.vision(images.float().div(255).flatten(1, 2))
        return self.head(torch.cat([features, batch["observation.state"]], 1)).view(-1, ACTIONS, 2)


def make_loader(dataset, **options):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        dataset, batch_size=8, shuffle=True, generator=generator, seeding="batch",
        persistent_workers=bool(options.get("num_workers")), **options,
    )  # fmt: skip


def train(dataset, steps):
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    with make_loader(dataset, num_workers=2) as loader:  # and a pool's, with PENSTOCK_POOL
        for step, batch in enumerate(itertools.islice(loader, steps), 1):
            error = (policy(batch) - batch["action"]).square()
            loss = error[~batch["action_is_pad"]].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}")


def frames_of(batch):
    return [batch[f"observation.images.{camera}"] for camera in CAMERAS]


def read_epoch(loader, digest=None):
    """Returns frames per second; adds the batches to a digest."""
    start, count = time.perf_counter(), 0
    for batch in loader:
        count += sum(images.shape[0] * images.shape[1] for images in frames_of(batch))
        if digest is not None:
            for value in batch.values():
                digest.update(value.numpy().tobytes())
    return count / (time.perf_counter() - start)


def measure(dataset, rounds, address):
    """Reads epochs with each loader in turn, and prints their rates. The first epochs, which start
    the workers and open the videos, are compared and not timed."""
    ways = {
        "in the trainer": {"num_workers": 0, "pool": ""},
        "1 worker": {"num_workers": 1, "pool": ""},
        "2 workers": {"num_workers": 2, "pool": ""},
    }
    if address:
        ways["pool"] = {"num_workers": 0, "pool": address}
    rates = {way: [] for way in ways}
    digests = {}
    loaders = {way: make_loader(dataset, **options) for way, options in ways.items()}
    for way, loader in loaders.items():
        digest = hashlib.sha256()
        read_epoch(loader, digest)
        digests[way] = digest.hexdigest()
    if len({*digests.values()}) > 1:
        raise SystemExit(f"the batches differ: {digests}")
    for _ in range(rounds):
        for way, loader in loaders.items():
            rates[way].append(read_epoch(loader))
    batch = next(iter(loaders["in the trainer"]))
    raw = sum(images.nbytes for images in frames_of(batch))
    print(f"{len(ways)} loaders with bit-for-bit identical batches; {rounds} epochs with each")
    print(f"frames of a batch: {raw / 1e6:.1f} MB as uint8, {4 * raw / 1e6:.1f} MB as float32")
    for way, found in rates.items():
        middle = statistics.median(found)
        print(f"{way:15} {middle:7.0f} frames/s ({min(found):.0f} to {max(found):.0f})")
    for loader in loaders.values():
        loader.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/video"))
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--frames", type=int, default=90, help="of an episode")
    parser.add_argument("--steps", type=int, default=40, help="of the training")
    parser.add_argument(
        "--measure", type=int, metavar="ROUNDS", help="time loaders instead of training"
    )
    args = parser.parse_args()
    make_episodes(args.folder, args.episodes, args.frames)
    dataset = Episodes(args.folder)
    if args.measure:
        measure(dataset, args.measure, os.environ.get("PENSTOCK_POOL"))
    else:
        train(dataset, args.steps)


if __name__ == "__main__":
    main()
