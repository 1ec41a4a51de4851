# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are sent to a pool's workers as code."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import PoolWarning
from penstock.pool import code_files
from penstock.pool.code_files import (
    NAMED_LIMITS,
    OWN_LIMITS,
    CodeLimits,
    TooMuchCodeError,
    find_code,
)
from penstock.pool.job_code import pack_code
from penstock.pool.travelling_code import CodePacker


def write_tree(root: Path, *names: str, content: str = "") -> str:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return str(root)


def found(root: str, limits: CodeLimits = NAMED_LIMITS) -> set[str]:
    return {file.name for file in find_code(root, limits).files}


def test_files_written_next_to_code_do_not_change_packed_code(tmp_path: Path) -> None:
    """Workers were requested again at every epoch: there was a checkpoint in the folder of the
    code."""
    root = write_tree(tmp_path, "dataset.py", "package/__init__.py", "package/words.txt")
    (packed,) = pack_code([root])
    write_tree(
        tmp_path,
        "model.pt",
        "train.log",
        "metrics.csv",
        "runs/1/events.out.tfevents.1",
        "checkpoints/epoch=3.ckpt",
        "package/model.pt",
        "package/train.log",
        content="x" * 1000,
    )
    assert pack_code([root]) == [packed]


def test_code_is_packed_once_per_loader(tmp_path: Path) -> None:
    """The user edited a module while training ran, which continues with the imported version."""
    root = write_tree(tmp_path / "one", "a.py")
    other = write_tree(tmp_path / "two", "b.py")
    code = CodePacker()
    packed = code.packed([root])
    assert str(tmp_path / "one") in {each.root for each in packed}
    write_tree(tmp_path / "one", "a.py", content="x = 1")
    assert code.packed([root]) is packed
    assert {root, other} <= {each.root for each in code.packed([root, other])}
    assert code.packed(None) == []


def test_modules_and_package_data_are_selected(tmp_path: Path) -> None:
    expected = {
        "single.py",
        "stub.pyi",
        "native.cpython-311-x86_64-linux-gnu.so",
        "plain/module.py",
        "plain/deeper/module.py",
        "package/__init__.py",
        "package/words.txt",
        "package/data-files/classes.json",
        "package/libs/libown.so.3",
        "src/inner/__init__.py",
        "own.egg-info/PKG-INFO",
    }
    stays = {
        "classes.json",
        "plain/classes.json",
        ".env",
        ".git/hooks/hook.py",
        "__pycache__/single.cpython-311.pyc",
        "package/__pycache__/x.pyc",
        "with-dash/module.py",
        "venv/pyvenv.cfg",
        "venv/lib/module.py",
        "conda/conda-meta/history",
        "conda/module.py",
        "node_modules/module.py",
        "notebook.ipynb",
    }
    root = write_tree(tmp_path, *expected, *stays)
    os.mkfifo(tmp_path / "pipe.py")
    os.symlink("nowhere", tmp_path / "broken.py")
    assert found(root) == found(root, OWN_LIMITS) == expected


def test_symlinks_are_followed_to_code_only(tmp_path: Path) -> None:
    """The program was rejected for a link to a folder of images in the folder of the code."""
    root = write_tree(tmp_path / "root", "a.py")
    write_tree(tmp_path / "data", "images/1.jpg", "inner/module.py")
    write_tree(tmp_path / "shared", "tools.py")
    os.symlink("a.py", tmp_path / "root" / "b.py")
    os.symlink("../data", tmp_path / "root" / "data")
    os.symlink("../shared", tmp_path / "root" / "shared")
    os.symlink(".", tmp_path / "root" / "self")
    os.symlink("..", tmp_path / "root" / "up")
    assert found(root) == {"a.py", "b.py", "shared/tools.py"}


def test_data_folder_next_to_the_program_is_not_searched(tmp_path: Path) -> None:
    root = write_tree(tmp_path, "a.py", *(f"images/n{number}.jpg" for number in range(9)))
    write_tree(tmp_path, *(f"sets/train/class{number}/1.jpg" for number in range(9)))
    write_tree(tmp_path, "src/inner/__init__.py")
    limits = replace(OWN_LIMITS, plain_entry_count=8, entry_count=30)
    assert found(root, limits) == {"a.py", "src/inner/__init__.py"}
    with pytest.raises(TooMuchCodeError, match="more than 30 files and folders to search"):
        find_code(root, replace(NAMED_LIMITS, entry_count=30))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            {"byte_count": 3 << 20},
            r"more than 3 MiB of code.*largest files: c.py of 3 MiB, a.py of",
        ),
        ({"file_count": 2}, "more than 2 code files"),
    ],
)
def test_code_over_the_limits_is_rejected(
    tmp_path: Path, limits: dict[str, int], words: str
) -> None:
    for name, mebibytes in (("a", 1), ("b", 0), ("c", 3)):
        write_tree(tmp_path, f"{name}.py", content=" " * (mebibytes << 20))
    with pytest.raises(TooMuchCodeError, match=words) as caught:
        find_code(str(tmp_path), replace(NAMED_LIMITS, **limits))
    assert "name folders that contain only code in code_paths" in str(caught.value)


def test_oversized_data_file_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_files, "_DATA_BYTES_MAX", 1 << 20)
    root = write_tree(tmp_path, "package/__init__.py", "package/small.bin")
    write_tree(tmp_path, "package/large.bin", content=" " * (2 << 20))
    words = (
        r"too large to be sent to workers: package/large\.bin of 2 MiB \(limits: modules up to 64"
    )
    with pytest.warns(PoolWarning, match=words):
        (packed,) = pack_code([root])
    assert {Path(path).name for path in packed.paths} == {"__init__.py", "small.bin"}


SECRETS = """credentials.json aws_credentials id_rsa id_ed25519.pub server.pem tls.key
trainer.secret client-secret.json hf_token token.txt api_key.txt passwords.yaml service_account.json
store.p12""".split()
NO_SECRETS = """tokens.txt tokenizer.json special_tokens_map.json added_tokens.json keys.json
keypoints.csv vocabulary.txt secretary.txt monkey.bin""".split()


def test_secret_looking_data_is_left_out_with_a_warning(tmp_path: Path) -> None:
    modules = ["__init__.py", "secrets.py", "credentials.py"]
    root = write_tree(tmp_path, *(f"package/{name}" for name in [*modules, *SECRETS, *NO_SECRETS]))
    words = r"look like secrets are not sent to workers: package/"
    with pytest.warns(PoolWarning, match=words):
        (packed,) = pack_code([root])
    assert {Path(path).name for path in packed.paths} == {*modules, *NO_SECRETS}


def test_explicitly_named_secret_is_packed(tmp_path: Path) -> None:
    root = write_tree(tmp_path, "package/__init__.py", "package/server.pem")
    named = str(tmp_path / "package/server.pem")
    (packed,) = [code for code in CodePacker().packed([root, named]) if code.root == root]
    assert named in packed.paths


def test_named_secret_outside_packages_is_rejected(tmp_path: Path) -> None:
    root = write_tree(tmp_path, "package/__init__.py", "server.pem")
    with pytest.raises(ValueError, match="code_paths must name .* files of a sent package"):
        CodePacker().packed([root, tmp_path / "server.pem"])
