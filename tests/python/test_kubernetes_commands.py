# SPDX-License-Identifier: Apache-2.0
"""The commands in the manifests for Kubernetes and in their texts: penstock's parser accepts them,
and their addresses and numbers match the manifests. None of them is started."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from collections.abc import Iterator

import pytest
from parsed_commands import Parse, parsing

# Not installed on machines with a GPU (.make/gpu_packages.txt).
files = pytest.importorskip("kubernetes_files", reason="needs kubernetes-validate")

FILES = files.FILES
PAGE = files.ROOT / "docs" / "how-to" / "kubernetes.md"


def commands_in_pods() -> Iterator[list[str]]:
    for template in files.every_pod().values():
        for container in files.containers(template):
            yield files.command_of(container)
            for name, probe in container.items():
                if name.endswith("Probe"):
                    yield probe["exec"]["command"]


def commands_in_texts() -> Iterator[list[str]]:
    """Lines of the manifests' comments and of the page that call penstock, directly or with
    kubectl."""
    for path in (*(files.FOLDER / file for file in FILES), PAGE):
        lines = path.read_text(encoding="utf-8").replace("\\\n#", "").replace("\\\n", "")
        for line in lines.splitlines():
            if found := re.match(r"(?:#  |\$) +(?:kubectl exec .* -- +)?(penstock .*)", line):
                yield shlex.split(found[1].partition(" && ")[0])


COMMANDS: list[list[str]] = []
for command in [*commands_in_pods(), *commands_in_texts()]:
    arguments = files.penstock_arguments(command)
    if arguments is not None and arguments not in COMMANDS:
        COMMANDS.append(arguments)


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    return parsing(monkeypatch)


def options_of(parse: Parse, pod: str) -> Namespace:
    (container,) = files.every_pod()[pod]["spec"]["containers"]
    arguments = files.penstock_arguments(files.command_of(container))
    assert arguments is not None
    return parse(arguments)


@pytest.mark.parametrize("arguments", COMMANDS, ids=shlex.join)
def test_penstock_accepts_the_command(arguments: list[str], parse: Parse) -> None:
    parse(arguments)


def test_every_deployed_command_was_found() -> None:
    assert {arguments[0] for arguments in COMMANDS} >= {
        *("controller", "worker", "up", "down", "status", "keys")
    }


def test_mistyped_option_is_rejected(parse: Parse) -> None:
    (arguments,) = [arguments for arguments in COMMANDS if arguments[0] == "up"]
    with pytest.raises(AssertionError, match="is refused"):
        parse([*arguments, "--memry", "100"])


@pytest.mark.parametrize("arguments", COMMANDS, ids=shlex.join)
def test_addresses_match_the_services(arguments: list[str], parse: Parse) -> None:
    known = {
        (name, port["port"])
        for file in FILES
        for name, service in files.services(file).items()
        for port in service["spec"]["ports"]
    }
    known |= {("0.0.0.0", 7000), ("127.0.0.1", 7000)}  # within the controller's pod
    options = vars(parse(arguments))
    for name in ("bind", "controller"):
        if address := options.get(name):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            assert (host, int(port)) in known


def test_scaler_target_matches_the_worker_pods(parse: Parse) -> None:
    scaler = files.manifest("keda.yaml", "ScaledObject", "penstock-worker")["spec"]
    target = scaler["scaleTargetRef"]
    workers = files.manifest("pool.yaml", target["kind"], target["name"])
    assert target["apiVersion"] == workers["apiVersion"]
    assert "replicas" not in workers["spec"]
    assert scaler["minReplicaCount"] <= scaler["maxReplicaCount"]
    (trigger,) = scaler["triggers"]
    processes = options_of(parse, "penstock-worker").processes
    assert trigger["metricType"] == "AverageValue"
    assert int(trigger["metadata"]["targetValue"]) == processes
    (container,) = workers["spec"]["template"]["spec"]["containers"]
    assert int(container["resources"]["requests"]["cpu"]) == processes


def test_worker_pod_ends_after_its_workers(parse: Parse) -> None:
    pod = files.every_pod()["penstock-worker"]["spec"]
    assert options_of(parse, "penstock-worker").grace < pod["terminationGracePeriodSeconds"]


def test_ray_cluster_has_room_for_all_workers_of_penstock_up(parse: Parse) -> None:
    cluster = files.manifest("ray-cluster.yaml", "RayCluster", "penstock-ray")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    options = options_of(parse, "penstock-up")
    ((resource, count),) = options.resource
    # Quoted JSON text, whose quotes the shell of Ray's start removes.
    places = json.loads(json.loads(group["rayStartParams"]["resources"]))[resource] / count
    (container,) = group["template"]["spec"]["containers"]
    cpus = int(container["resources"]["requests"]["cpu"])
    assert places * options.cpus == int(group["rayStartParams"]["num-cpus"]) == cpus
    assert options.min <= options.max == places * group["maxReplicas"]
