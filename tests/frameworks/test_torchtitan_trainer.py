# SPDX-License-Identifier: Apache-2.0
"""torchtitan's trainer on CPUs with the loader for torchtitan in examples/ranks: a job that is
killed after a checkpoint continues with the losses of the job that is not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import GlooRanks
from pool_processes import PoolProcesses, pool_of

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed, see test_torchtitan.py", allow_module_level=True)

pytestmark = [pytest.mark.long, pytest.mark.slow]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples" / "ranks"
SAVED, KILLED, STEPS = 3, 5, 7
STEP_TOKENS = 1024


class Training:
    """A job of torchtitan's in its own folder, with the paragraphs of our documents as text."""

    def __init__(self, folder: Path, saved: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("guides", "reference"):
            documents = sorted((ROOT / "docs").rglob("*.md"))
            chosen = [one for one in documents if ("how-to" in one.parts) == (name == "guides")]
            texts = [text for one in chosen for text in one.read_text().split("\n\n")]
            rows = [json.dumps({"text": text}) for text in texts if len(text) > 40]
            (folder / f"{name}.jsonl").write_text("\n".join(rows))
        if saved is not None:
            shutil.copytree(saved / "checkpoint", folder / "checkpoint")

    def run(self, world_size: int, *arguments: str, exit_code: int = 0) -> list[Any]:
        """The exact metrics of each step: its losses, the norm of its gradient, and the tokens."""
        folders = [str(HERE), str(EXAMPLES), *sys.path]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folders),
            "XDG_RUNTIME_DIR": str(self.folder),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder.parent / "compiled"),
        }
        given: Any = ["--module", "titan_config", "--config", "debug_model"]
        given += ["--training.steps", str(STEPS), "--checkpoint.interval", str(SAVED)]
        tokens = STEP_TOKENS // world_size
        given += ["--training.num_tokens_per_microbatch_per_dp_rank", str(tokens), *arguments]
        program = HERE / "titan_trainer.py"
        ranks = GlooRanks(program, self.folder, world_size, given, environment)
        try:
            for rank in range(world_size):
                code, text = ranks.finish(rank)
                assert code == exit_code, text
        finally:
            ranks.kill()
        rows = [ranks.lines(rank) for rank in range(world_size)]
        assert all(one == rows[0] for one in rows)
        return rows[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The metrics of the job that is not interrupted."""
    return Training(tmp_path_factory.mktemp("whole") / "job").run(2)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, whole: list[Any]) -> Path:
    """The folder of a job whose ranks die in the second step after its checkpoint."""
    job = Training(tmp_path_factory.mktemp("killed") / "job")
    seen = job.run(2, "--metrics.killed_after", str(KILLED), exit_code=-signal.SIGKILL)
    assert seen == whole[:KILLED]
    return job.folder


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    yield from pool_of(tmp_path, monkeypatch)


def test_killed_job_continues_with_the_same_losses(
    tmp_path: Path, whole: list[Any], killed: Path
) -> None:
    assert [(step, tokens) for step, *_, tokens in whole] == [
        (step, step * STEP_TOKENS) for step in range(1, STEPS + 1)
    ]
    assert Training(tmp_path / "job", killed).run(2) == whole[SAVED:]  # to the bit


def test_killed_job_continues_on_one_rank(tmp_path: Path, whole: list[Any], killed: Path) -> None:
    alone = Training(tmp_path / "job", killed).run(1)
    for of_one, of_two in zip(alone, whole[SAVED:], strict=True):
        assert of_one[0] == of_two[0]
        assert of_one[1] == pytest.approx(of_two[1], rel=1e-4)  # one rank rounds other sums
    others = [loss for _, loss, *_ in whole[SAVED - 1 : -1]]
    assert [row[1] for row in alone] != pytest.approx(others, rel=1e-3)


def test_tokenizer_is_sent_with_the_chat_template_of_its_files() -> None:
    titan_config = importlib.import_module("titan_config")
    config = titan_config.debug_model()
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    titan_loader = importlib.import_module("titan_loader")
    titan_loader.make_picklable(tokenizer)
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    expected = tokenizer.apply_chat_template(messages)
    sent = pickle.loads(pickle.dumps(tokenizer))
    assert "Why?" in expected and sent.apply_chat_template(messages) == expected
    assert sent.encode(expected) == tokenizer.encode(expected)
    tokenizer.set_chat_template("{{ messages | length }}")
    with pytest.raises(TypeError, match="tokenizer must have the chat template of its files"):
        pickle.dumps(tokenizer)


def test_pool_makes_the_batches_of_the_trainer(
    tmp_path: Path, whole: list[Any], pool: PoolProcesses
) -> None:
    pool.start_worker(processes=2)
    pooled = Training(tmp_path / "job").run(2, "--dataloader.pool", pool.endpoint)
    assert pooled == whole
