# SPDX-License-Identifier: Apache-2.0
"""A pool's keys in the pods of the manifests: mounted by a Secret, copied by the init container,
and accepted by penstock."""

from __future__ import annotations

import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock import _pool
from penstock.live.dashboard_access import read_token

# Not installed on machines with a GPU (.make/gpu_packages.txt).
files = pytest.importorskip("kubernetes_files", reason="needs kubernetes-validate")
Manifest = dict[str, Any]

ROLES = ("controller", "operator", "trainer", "worker")
PODS = files.every_pod()
PODS_WITH_KEYS = [name for name, template in PODS.items() if files.key_items(template)]


class Pod:
    """Folders in place of a pod's volumes, with a Secret laid out as a kubelet does."""

    def __init__(self, folder: Path, template: Manifest) -> None:
        self._folder = folder
        self._template = template
        _pool.make_key_folder(str(folder / "made"))
        self.secret, self.keys = folder / "secret", folder / "keys"
        data = self.secret / "..2026_11_25"
        data.mkdir(parents=True)
        (self.secret / "..data").symlink_to(data.name)
        for name in files.key_items(template):
            (data / name).write_bytes((folder / "made" / name).read_bytes())
            (data / name).chmod(0o440)
            (self.secret / name).symlink_to(f"..data/{name}")
        self.keys.mkdir()
        self.keys.chmod(0o2777)
        (folder / "token").mkdir()
        (folder / "token" / "token").write_text("0123456789abcdef")

    def run_init_container(self) -> None:
        (container,) = self._template["spec"]["initContainers"]
        command = shlex.join(files.command_of(container))
        for path in ("secret", "keys", "token"):
            command = command.replace(f"/{path}/", f"{self._folder}/{path}/")
        subprocess.run(shlex.split(command), check=True, timeout=30)


@pytest.mark.parametrize("name", PODS_WITH_KEYS)
def test_init_container_copies_the_keys_with_private_modes(name: str, tmp_path: Path) -> None:
    pod = Pod(tmp_path, PODS[name])
    pod.run_init_container()
    folder = pod.keys / "pool"
    assert stat.S_IMODE(folder.stat().st_mode) & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == sorted(files.key_items(PODS[name]))
    for path in folder.iterdir():
        assert stat.S_ISREG(path.lstat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_init_container_copies_the_token_of_the_dashboard(tmp_path: Path) -> None:
    pod = Pod(tmp_path, PODS["penstock-controller"])
    pod.run_init_container()
    assert read_token(str(pod.keys / "dashboard.token")) == "0123456789abcdef"


def test_controller_accepts_the_copied_keys_but_not_the_secret(tmp_path: Path) -> None:
    pod = Pod(tmp_path, PODS["penstock-controller"])
    pod.run_init_container()
    bind = "tcp://127.0.0.1:0"
    _pool.Controller.start(bind, str(pod.keys / "pool"), "gpu-progress", {})
    with pytest.raises(ValueError, match="the keys in .* cannot be used"):
        _pool.Controller.start(bind, str(pod.secret), "gpu-progress", {})


def test_each_pod_has_only_the_secrets_of_its_role() -> None:
    secrets = {
        name: {item for item in files.key_items(template) if item.endswith(".secret")}
        for name, template in PODS.items()
    }
    assert secrets == {
        "penstock-controller": {"controller.secret", "operator.secret"},
        "penstock-worker": {"worker.secret"},
        "penstock-ray-head": {"controller.secret", "operator.secret"},
        "penstock-ray-dataworker": {"worker.secret"},
        "penstock-up": set(),
    }


@pytest.mark.parametrize("name", PODS_WITH_KEYS)
def test_each_pod_has_all_public_keys(name: str) -> None:
    assert set(files.key_items(PODS[name])) >= {f"{role}.public" for role in ROLES}
