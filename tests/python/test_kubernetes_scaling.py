# SPDX-License-Identifier: Apache-2.0
"""The value by which Kubernetes scales a pool's workers. A controller runs with the command of its
manifest, and the value is requested from it as KEDA does, and through Prometheus."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_processes import SECONDS_MAX, PoolProcesses, Process
from prometheus_client.parser import text_string_to_metric_families
from torch.utils.data import Dataset

from penstock import DataLoader, _pool

# Not installed on machines with a GPU (.make/gpu_packages.txt).
yaml = pytest.importorskip("yaml")
files = pytest.importorskip("kubernetes_files", reason="needs kubernetes-validate")

PAGE = files.ROOT / "docs" / "how-to" / "kubernetes.md"
TOKEN = "0123456789abcdef0123456789abcdef"
FIRST_DEMAND = 4  # workers of a job without measurements

pytestmark = pytest.mark.slow


def trigger_of_manifest() -> dict[str, Any]:
    scaler = files.manifest("keda.yaml", "ScaledObject", "penstock-worker")
    (trigger,) = scaler["spec"]["triggers"]
    return dict(trigger)


def trigger_of_page() -> dict[str, Any]:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (trigger,) = yaml.safe_load(snippet)["triggers"]
    return dict(trigger)


class Slow(Dataset[torch.Tensor]):
    """A sample takes its worker this long, asleep."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.2)
        return torch.full((4,), float(index))


class KubernetesPool:
    """A pool whose controller has the arguments of its pod, with other paths and free ports."""

    def __init__(self, pool: PoolProcesses, folder: Path) -> None:
        self.pool = pool
        self.token_file = folder / "dashboard.token"
        self.token_file.write_text(TOKEN)
        self.token_file.chmod(0o600)
        self.keys = folder / "keys"
        _pool.make_key_folder(str(self.keys))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.controller = self.start_controller()

    def start_controller(self) -> Process:
        (container,) = files.every_pod()["penstock-controller"]["spec"]["containers"]
        command = files.penstock_arguments(files.command_of(container))
        assert command is not None and command[:2] == ["controller", "--bind"]
        places = {
            "tcp://0.0.0.0:7000": self.pool.endpoint or "tcp://127.0.0.1:0",
            "/keys/pool": str(self.keys),
            "/keys/dashboard.token": str(self.token_file),
            "0.0.0.0:8080": f"127.0.0.1:{self.port}",
        }
        assert places.keys() <= {*command}
        arguments = [places.get(one, one).replace("$(NAMESPACE)", "default") for one in command]
        return self.pool.start_controller(*arguments[3:], bind=arguments[2])

    def train(self) -> None:
        """Train on a thread until stop(), first without any worker."""

        def steps() -> None:
            for _ in DataLoader(Slow(), batch_size=None, pool=self.pool.endpoint):
                if self._stop.wait(0.02):
                    return

        self._thread = threading.Thread(target=steps)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(SECONDS_MAX)
            self._thread = None

    def request(self, url: str, token: str = TOKEN) -> tuple[int, str]:
        """Return the status and the text of a URL of the Service, as KEDA requests it."""
        parts = urllib.parse.urlsplit(url)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{parts.path}",
            headers={"Host": parts.netloc, "Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wanted(self) -> int:
        """Return the sum over the jobs, from the controller's status."""
        status = json.loads(_pool.pool_status(self.pool.endpoint, str(self.keys), SECONDS_MAX))
        return sum(one["workers_wanted"] for one in status["trainers"])


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesPool]:
    pool = PoolProcesses(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", pool.environment["XDG_RUNTIME_DIR"])
    try:
        one = KubernetesPool(pool, tmp_path)
        monkeypatch.setenv("PENSTOCK_KEYS", str(one.keys))
        try:
            yield one
        finally:
            one.stop()
    finally:
        pool.close()


def when(is_so: Callable[[], Any], what: Callable[[], object] = lambda: None) -> Any:
    """Return the first true value; fail with ``what()`` after SECONDS_MAX."""
    deadline = time.monotonic() + SECONDS_MAX
    while not (found := is_so()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
    return found


def value_of(text: str, location: str) -> float:
    """Return a metric without labels, as KEDA's metrics-api reads it: only plain names are
    supported here."""
    assert re.fullmatch(r"\w+", location)
    (family,) = [one for one in text_string_to_metric_families(text) if one.name == location]
    (sample,) = family.samples
    assert sample.labels == {}
    return float(sample.value)


def test_keda_reads_the_wanted_workers_of_the_controller(kubernetes: KubernetesPool) -> None:
    trigger = trigger_of_manifest()
    options = trigger["metadata"]
    assert (options["format"], options["authMode"]) == ("prometheus", "bearer")

    def value() -> float:
        status, text = kubernetes.request(options["url"])
        return value_of(text, options["valueLocation"]) if status == 200 else math.nan

    assert when(lambda: value() == 0.0) and kubernetes.wanted() == 0
    kubernetes.train()
    # Without workers, too: minReplicaCount may be 0.
    when(lambda: value() == FIRST_DEMAND, value)
    assert math.ceil(value() / float(options["targetValue"])) == 1
    kubernetes.pool.start_worker("--keys", str(kubernetes.keys), processes=2)
    # A batch takes ten steps, so far more workers are of use than there are.
    measured = when(lambda: value() > 2 * FIRST_DEMAND and value(), value)
    when(lambda: kubernetes.wanted() == value(), kubernetes.wanted)
    assert math.ceil(measured / float(options["targetValue"])) > 2
    assert kubernetes.request(options["url"], token="x" * 32)[0] == 401
    elsewhere = options["url"].replace("default", "elsewhere")
    assert kubernetes.request(elsewhere)[0] == 421
    kubernetes.stop()
    when(lambda: value() == 0.0, value)


class Prometheus:
    """Prometheus, which reads the controller's metrics once a second with the labels of a
    ServiceMonitor's target."""

    def __init__(self, folder: Path, kubernetes: KubernetesPool) -> None:
        folder.mkdir()
        labels = {"namespace": "default", "service": "penstock-controller"}
        credentials = {"type": "Bearer", "credentials_file": str(kubernetes.token_file)}
        targets = {"targets": [f"127.0.0.1:{kubernetes.port}"], "labels": labels}
        job = {"job_name": "penstock", "scrape_interval": "1s", "scrape_timeout": "1s"}
        job |= {"authorization": credentials, "static_configs": [targets]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )

    def values(self, query: str) -> list[float]:
        """Return the values of an instant query; KEDA rejects more than one."""
        address = f"http://{self._address}/api/v1/query?query={urllib.parse.quote(query)}"
        try:
            with urllib.request.urlopen(address, timeout=SECONDS_MAX) as answer:
                found = json.load(answer)
        except urllib.error.URLError as error:
            assert not isinstance(error, urllib.error.HTTPError) or error.code == 503, error
            return []
        assert found["data"]["resultType"] == "vector"
        return [float(one["value"][1]) for one in found["data"]["result"]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(SECONDS_MAX)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_query_has_the_wanted_workers_or_no_value(
    kubernetes: KubernetesPool, tmp_path: Path
) -> None:
    options = trigger_of_page()["metadata"]
    assert options["ignoreNullValues"] == "false", "0 would end all pods"
    prometheus = Prometheus(tmp_path / "prometheus", kubernetes)
    try:

        def values() -> list[float]:
            return prometheus.values(options["query"])

        when(lambda: values() == [0.0], values)
        kubernetes.train()
        when(lambda: values() == [FIRST_DEMAND], values)
        kubernetes.pool.start_worker("--keys", str(kubernetes.keys), processes=2)
        when(lambda: values() > [2.0 * FIRST_DEMAND] and values() == [kubernetes.wanted()], values)
        # Neither a lost controller nor a new one that waits for its members wants no workers.
        seen = [values()]
        kubernetes.controller.end()
        when(lambda: values() == [], values)
        kubernetes.controller = kubernetes.start_controller()
        when(lambda: seen.append(values()) or seen[-1], lambda: seen)
        assert [0.0] not in seen
    finally:
        prometheus.close()


def test_manifest_and_page_scale_by_one_metric() -> None:
    keda, query = trigger_of_manifest()["metadata"], trigger_of_page()["metadata"]
    assert keda["valueLocation"] in query["query"]
    assert keda["targetValue"] == query["threshold"]
