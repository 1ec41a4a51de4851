# SPDX-License-Identifier: Apache-2.0
"""The folder of keys that `penstock up` makes for its workers, from the operator's."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from test_engine_journal import files_of

from penstock import _pool
from penstock.engines.worker_keys import WorkerKeys
from penstock.errors import PenstockError

ROLES = ("controller", "operator", "trainer", "worker")
PUBLIC = {f"{role}.public" for role in ROLES}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    _pool.make_key_folder(str(folder))
    return folder


@pytest.fixture
def copied(keys: Path, tmp_path: Path) -> WorkerKeys:
    return WorkerKeys(keys, tmp_path / "state" / "worker-keys")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_worker_key_folder_has_own_secret_and_public_keys(keys: Path, copied: WorkerKeys) -> None:
    assert names(copied.folder) == PUBLIC | {"worker.secret"}
    assert mode(copied.folder) == 0o700
    for path in copied.folder.iterdir():
        assert (mode(path), path.read_bytes()) == (0o600, (keys / path.name).read_bytes())
    copied.remove()
    assert not copied.folder.exists()


def test_user_keys_follow_the_operators_folder(
    keys: Path, copied: WorkerKeys, tmp_path: Path
) -> None:
    _pool.make_user_keys(str(keys), "ann", str(tmp_path / "keys of ann"))
    copied.catch_up()
    assert names(copied.folder) == PUBLIC | {"worker.secret", "ann.user.public"}
    (keys / "ann.user.public").unlink()
    copied.catch_up()
    assert names(copied.folder) == PUBLIC | {"worker.secret"}


def test_changed_key_is_copied_again(keys: Path, copied: WorkerKeys, tmp_path: Path) -> None:
    _pool.make_key_folder(str(tmp_path / "others"))
    for name in ("worker.public", "worker.secret"):
        (tmp_path / "others" / name).replace(keys / name)
        copied.catch_up()
        assert (copied.folder / name).read_bytes() == (keys / name).read_bytes()


def test_interrupted_copy_of_rotated_keys_stays_usable(keys: Path, copied: WorkerKeys) -> None:
    """The former keys are first, and the secret last: it always belongs to an existing key."""
    before = (copied.folder / "worker.secret").read_bytes()
    _pool.rotate_keys(str(keys))
    for name in ("worker.public", "worker.secret"):
        path = keys / name
        kept = path.read_bytes()
        path.unlink()
        path.symlink_to(keys / "operator.public")  # which is not followed
        copied.catch_up()
        assert copied.trouble.endswith(f": {path}")
        assert {f"{role}.former.public" for role in ROLES} <= names(copied.folder)
        assert (copied.folder / "worker.secret").read_bytes() == before
        path.unlink()
        path.write_bytes(kept)
        path.chmod(0o600)
    copied.catch_up()
    assert copied.trouble == ""
    for path in copied.folder.iterdir():
        assert path.read_bytes() == (keys / path.name).read_bytes()
    assert (copied.folder / "worker.secret").read_bytes() != before
    _pool.finish_rotation(str(keys))
    copied.catch_up()
    assert names(copied.folder) == PUBLIC | {"worker.secret"}


def test_leftovers_of_earlier_run_are_removed(keys: Path, tmp_path: Path) -> None:
    folder = tmp_path / "worker-keys"
    folder.mkdir(mode=0o755)
    for name in (".worker.secret.new", "bob.user.public"):
        (folder / name).write_text("half a")
    assert names(WorkerKeys(keys, folder).folder) == PUBLIC | {"worker.secret"}
    assert mode(folder) == 0o700


def test_missing_secret_keeps_the_copy_and_is_reported(keys: Path, copied: WorkerKeys) -> None:
    secret = keys / "worker.secret"
    kept = secret.read_bytes()
    secret.unlink()
    copied.catch_up()
    why = "the workers' keys cannot be copied (No such file or directory)"
    assert copied.trouble == f"{why}: {secret}"
    assert "worker.secret" in names(copied.folder)
    secret.write_bytes(kept)
    copied.catch_up()
    assert copied.trouble == ""


def test_copied_key_keeps_its_file_mode(keys: Path, tmp_path: Path) -> None:
    """A worker rejects it in either folder."""
    (keys / "worker.secret").chmod(0o644)
    copied = WorkerKeys(keys, tmp_path / "worker-keys")
    assert mode(copied.folder / "worker.secret") == 0o644
    (keys / "worker.secret").chmod(0o600)
    copied.catch_up()
    assert mode(copied.folder / "worker.secret") == 0o600


def test_symbolic_link_is_not_followed(keys: Path, copied: WorkerKeys) -> None:
    (keys / "eve.user.public").symlink_to(keys / "operator.secret")
    copied.catch_up()
    assert copied.trouble.endswith(f": {keys}/eve.user.public")
    assert names(copied.folder) == PUBLIC | {"worker.secret"}


def test_keys_are_copied_once_the_disk_has_room(keys: Path, tmp_path: Path) -> None:
    with files_of(5):
        copied = WorkerKeys(keys, tmp_path / "worker-keys")
        assert copied.trouble.startswith("the workers' keys cannot be copied (File too large)")
    copied.catch_up()
    assert copied.trouble == ""
    assert names(copied.folder) == PUBLIC | {"worker.secret"}


def test_folder_without_worker_secret_is_rejected(keys: Path, tmp_path: Path) -> None:
    (keys / "worker.secret").unlink()
    with pytest.raises(PenstockError, match=r"has no worker\.secret, which workers need.*-keys"):
        WorkerKeys(keys, tmp_path / "worker-keys")
