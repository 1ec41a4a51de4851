# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/kubernetes, and their pods, containers and commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from kubernetes_schemas import Manifest, pod_templates

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = ("pool.yaml", "keda.yaml", "ray-cluster.yaml")


def manifests(file: str) -> list[Manifest]:
    return list(yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8")))


def manifest(file: str, kind: str, name: str) -> Manifest:
    found = [m for m in manifests(file) if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1
    return found[0]


def every_pod() -> dict[str, Manifest]:
    """Return the pods that the manifests request, by name."""
    return {
        name: template
        for file in FILES
        for found in manifests(file)
        for name, template in pod_templates(found).items()
    }


def containers(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def command_of(container: Manifest) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


def penstock_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of penstock in a command, with or without a program that starts it."""
    return list(command[command.index("penstock") + 1 :]) if "penstock" in command else None


def services(file: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests(file) if m["kind"] == "Service"}


def key_items(template: Manifest) -> list[str]:
    """Return the files of the pod's keys; empty for a pod without keys."""
    for volume in template["spec"].get("volumes", ()):
        if volume["name"] == "secret":
            assert volume["secret"]["secretName"] == "penstock-keys"
            items = volume["secret"]["items"]
            assert all(item["key"] == item["path"] for item in items)
            return [item["path"] for item in items]
    return []
