# SPDX-License-Identifier: Apache-2.0
"""Smoke runs of the examples: they train, and their plans are explained; the quickstart's files are
correct, and it fails when it should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Quickstart = Callable[..., int]


def run_quickstart(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "quickstart.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def texts_of(picture: Path) -> list[str]:
    root = ElementTree.parse(picture).getroot()
    return [element.text or "" for element in root.iter() if element.tag.endswith("}text")]


@pytest.fixture
def photograph_crops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return pytest.importorskip("photograph_crops")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return pytest.importorskip("report")


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Quickstart:
    """The example's `main` with these arguments, in this process."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = pytest.importorskip("quickstart")

    def call_main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / "quickstart.py"), *arguments])
        return int(example.main())

    return call_main


@pytest.mark.long
@pytest.mark.slow
def test_quickstart_losses_match_and_plot_and_json_are_written(tmp_path: Path) -> None:
    picture, figures = tmp_path / "three.svg", tmp_path / "three.json"
    done = run_quickstart(
        "--quick", "--data", str(tmp_path / "crops"), "--picture", str(picture),
        "--json", str(figures),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert "Losses equal to the bit" in done.stdout
    record = json.loads(figures.read_text())
    shown = texts_of(picture)
    assert "One training with each loader, 16 steps each: losses bit-for-bit identical." in shown
    for run in record["runs"]:
        rate = f"{run['samples_per_s']:.0f}"
        assert any(text.partition(" ")[0] == rate for text in shown), (rate, shown)
    assert record["losses_equal"] is True
    assert [run["way"] for run in record["runs"]] == ["torch", "swapped", "offload"]
    losses = [run["losses"] for run in record["runs"]]
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 16
    assert losses[0][-1] < losses[0][0]
    assert record["runs"][2]["plan"]["moved"]


@pytest.mark.long
@pytest.mark.slow
def test_quickstart_runs_with_torch_alone_and_no_workers(tmp_path: Path) -> None:
    done = run_quickstart(
        "--quick", "--ways", "torch", "--workers", "0", "--data", str(tmp_path / "crops"),
        "--picture", str(tmp_path / "one.svg"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epochs", "0"), "argument --epochs: 0 is too low; give 1 or more"),
        (("--lr", "nan"), "argument --lr: nan is out of range; give a number above 0"),
        (("--picture", "a.jpg"), "--picture a.jpg does not end in .svg"),
        (("--batch-size", "4000"), "--batch-size 4000 makes 0 steps and --warmup leaves out 10"),
    ],
)
def test_invalid_argument_is_rejected_before_any_work(
    quickstart: Quickstart,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        quickstart("--ways", "torch", "--data", str(tmp_path / "crops"), *arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_folder_with_foreign_files_is_left_unchanged(
    quickstart: Quickstart, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert quickstart("--ways", "torch", "--data", str(tmp_path)) == 2
    assert "holds 'thesis.txt', which this example did not write" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.slow
def test_missing_crop_causes_the_folder_to_be_rewritten(
    photograph_crops: ModuleType, tmp_path: Path
) -> None:
    folder, recipe = tmp_path / "crops", photograph_crops.Recipe(2, 1, side_px=32)
    assert photograph_crops.prepare(folder, recipe) is True
    before = {path: path.read_bytes() for path in folder.rglob("*.jpg")}
    assert len(before) == recipe.crop_count
    assert photograph_crops.prepare(folder, recipe) is False
    next(iter(before)).unlink()
    assert photograph_crops.prepare(folder, recipe) is True
    assert {path: path.read_bytes() for path in folder.rglob("*.jpg")} == before


def test_last_bit_difference_in_losses_is_reported_with_its_step(report: ModuleType) -> None:
    import math

    def run(way: str, *losses: float) -> object:
        run = report.Run(way, batch_size=1, warmup=0)
        for loss in losses:
            run.step(loss, wait_s=0.0, end=run.begin + 1)
        return run

    assert report.first_difference([run("torch", 1.0, 2.0), run("offload", 1.0, 2.0)]) is None
    other = run("offload", 1.0, math.nextafter(2.0, 3.0))
    difference = report.first_difference([run("torch", 1.0, 2.0), other])
    assert difference == "step 1 is 2.0 with torch and 2.0000000000000004 with offload"
    shorter = report.first_difference([run("torch", 1.0, 2.0), run("swapped", 1.0)])
    assert shorter == "2 steps with torch, 1 with swapped"


@pytest.mark.long("images-moved0", "spectrogram-moved1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("images", {"float", "truediv", "sub", "interpolate"}),
        ("spectrogram", {"float", "truediv", "stft", "abs", "square", "matmul", "log1p"}),
        ("purchases", {"bucketize", "one_hot", "float", "log1p", "std"}),
    ],
)
def test_example_trains_and_its_plan_is_explained(name: str, moved: set[str]) -> None:
    path = str(EXAMPLES / f"{name}.py")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("loss of the last batch: "), done.stderr
    command = [sys.executable, "-m", "penstock", "explain", "--cut", "maximal", "--format", "json"]
    done = subprocess.run([*command, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert moved <= {call["operator"].partition(" at ")[0] for call in plan["moved"]}


@pytest.mark.long
@pytest.mark.slow
def test_lookahead_cache_reaches_the_optimal_hit_ratio() -> None:
    command = [sys.executable, str(EXAMPLES / "embedding_cache.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"(\S.*): ([\d.]+)%, losses equal to those without a cache", done.stdout)
    ratios = {way: float(ratio) for way, ratio in found}
    assert [*ratios] == ["without look-ahead", "with look-ahead", "an oracle"]
    assert ratios["without look-ahead"] < ratios["with look-ahead"] == ratios["an oracle"]


@pytest.mark.long
@pytest.mark.slow
def test_cache_of_graph_features_has_the_misses_of_an_oracle() -> None:
    command = [sys.executable, str(EXAMPLES / "graph_features.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    reads = dict(re.findall(r"(\S.*): (\d+) reads", done.stdout))
    assert [*reads] == ["none", "the next 32 batches", "an oracle"]
    assert int(reads["none"]) > int(reads["an oracle"]) == int(reads["the next 32 batches"])


@pytest.mark.slow
def test_asynchronous_rollouts_train_on_each_prompt_once(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "async_rollouts.py")]
    command += ["--checkpoint", str(tmp_path / "job.pt")]
    said = []
    for more in (["--stop-after", "20"], ["--stop-after", "35"], []):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    assert "stopped at step 20" in said[0] and "resumed at step 20" in said[1]
    assert re.search(r"[1-9]\d* prompts are repeated", said[1])
    assert "400 prompts, each trained on 2 times" in said[2]


@pytest.fixture
def video(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torchcodec.decoders", reason="needs torchcodec", exc_type=ImportError)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return pytest.importorskip("video")


@pytest.mark.long
@pytest.mark.slow
def test_video_loaders_deliver_the_same_uint8_frames(video: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    video.make_episodes(folder, 1, 24)
    dataset = video.Episodes(folder)
    oracle = video.VideoDecoder(folder / "000-wrist.mp4")
    for index in (0, 5, 23):
        sample = dataset[index]["observation.images.wrist"]
        assert sample.dtype == torch.uint8
        frames = [oracle[max(0, index + step)] for step in video.HISTORY]
        assert torch.equal(sample, torch.stack(frames))
    # Its loaders in the trainer, with workers forked after the videos were opened, and with a pool.
    command = [sys.executable, "-m", "penstock", "run", "--pool-local", "1"]
    command += [str(EXAMPLES / "video.py"), "--folder", str(folder), "--episodes", "1"]
    command += ["--frames", "24", "--measure", "1"]
    runtime = tmp_path / "run"  # for the keys of the pool
    runtime.mkdir(mode=0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 loaders with bit-for-bit identical batches" in done.stdout


def test_video_example_names_what_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "torchcodec").mkdir()
    (tmp_path / "torchcodec" / "__init__.py").write_text("raise RuntimeError('no libavutil\\nx')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "video.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(
        "examples/video.py needs torchcodec and FFmpeg's libraries, got: no libavutil; run "
    )


def test_plot_shows_the_parts_of_a_step_in_proportion(
    monkeypatch: pytest.MonkeyPatch, report: ModuleType, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    speed_picture = pytest.importorskip("speed_picture")
    torch_run = report.Run("torch", batch_size=10, warmup=0)
    own = report.Run("swapped", batch_size=10, warmup=0)
    for run, seconds in ((torch_run, 0.2), (own, 0.1)):
        for step in range(4):
            run.step(1.0, wait_s=0.0, end=run.begin + seconds * (step + 1))
    parts = dict.fromkeys(speed_picture.PARTS, 0.0)
    own.ledger = {"steps": 4, **parts, "compute_s": 0.24, "dataset_s": 0.12, "wire_s": 0.04}
    own.ledger_text = "4 steps"
    speed_picture.draw([torch_run, own], True, tmp_path / "one.svg")
    speed_picture.draw([torch_run, own], True, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    shown = texts_of(tmp_path / "one.svg")
    assert {"50", "100   2.00x", "60.0", "30.0", "10.0"} <= set(shown), shown
    assert "waiting for the dataset" in shown and "waiting for collating" not in shown
    bars = [
        float(element.get("width", "0"))
        for element in ElementTree.parse(tmp_path / "one.svg").getroot().iter()
        if element.tag.endswith("}rect") and element.get("height") == "22.0"
    ]
    # Two speeds, then three parts with a gap of a pixel behind each, and an empty rest.
    assert bars[1] == pytest.approx(2 * bars[0], abs=0.2)
    assert [width + 1 for width in bars[2:5]] == pytest.approx(
        [0.6 * bars[1], 0.3 * bars[1], 0.1 * bars[1]], abs=0.2
    )
