# SPDX-License-Identifier: Apache-2.0
"""The manifests for Kubernetes: their fields by the published schemas, and the names that must
agree. No cluster is needed.

With PENSTOCK_RAYCLUSTER_CRD=FILE the RayCluster is checked against the whole definition, too;
`kubectl get crd rayclusters.ray.io -o yaml` prints an operator's definition. The same holds for
PENSTOCK_SCALEDOBJECT_CRD and scaledobjects.keda.sh, and for PENSTOCK_TRIGGERAUTHENTICATION_CRD and
triggerauthentications.keda.sh.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest

# Not installed on machines with a GPU (.make/gpu_packages.txt).
yaml = pytest.importorskip("yaml")
schemas = pytest.importorskip("kubernetes_schemas", reason="needs kubernetes-validate")
files = pytest.importorskip("kubernetes_files")
Manifest = dict[str, Any]

FILES = files.FILES
PODS = files.every_pod()
KUBERNETES = ("1.30", "1.37")  # versions whose schemas the manifests must satisfy
CUSTOM = [
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", "PENSTOCK_RAYCLUSTER_CRD"),
    ("keda.yaml", "ScaledObject", "penstock-worker", "PENSTOCK_SCALEDOBJECT_CRD"),
    (
        *("keda.yaml", "TriggerAuthentication", "penstock-dashboard"),
        "PENSTOCK_TRIGGERAUTHENTICATION_CRD",
    ),
]

EVERY_MANIFEST = [
    pytest.param(found, id=f"{file}-{found['kind']}-{found['metadata']['name']}")
    for file in FILES
    for found in files.manifests(file)
]


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("found", EVERY_MANIFEST)
def test_manifests_satisfy_the_published_schemas(found: Manifest, kubernetes: str) -> None:
    assert schemas.manifest_faults(found, kubernetes) == []


def changed(found: Manifest, path: str, value: Any) -> Manifest:
    """A copy with another value at a path; None removes the field."""
    result = copy.deepcopy(found)
    *way, last = path.split(".")
    place: Any = result
    for step in way:
        place = place[int(step) if step.isdecimal() else step]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return result


POD = "spec.template.spec"
GROUP = "spec.workerGroupSpecs.0"
TRIGGER = "spec.triggers.0"
SECRET = "spec.secretTargetRef.0"
FAULTS = [
    # Unknown fields.
    ("pool.yaml", "Service", "penstock-controller", "spec.selectors", {"a": "b"}, "'selectors'"),
    ("pool.yaml", "Deployment", "penstock-worker", f"{POD}.gracePeriod", 60, "'gracePeriod'"),
    ("pool.yaml", "Deployment", "penstock-worker", f"{POD}.containers.0.cmd", [], "'cmd'"),
    ("keda.yaml", "ScaledObject", "penstock-worker", "spec.maxReplicas", 16, "'maxReplicas'"),
    ("keda.yaml", "ScaledObject", "penstock-worker", f"{TRIGGER}.metadat", {}, "'metadat'"),
    ("ray-cluster.yaml", "Job", "penstock-up", f"{POD}.containers.0.arg", [], "'arg'"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", "spec.autoscaling", True, "'autoscaling'"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", f"{GROUP}.max", 16, "'max'"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", f"{GROUP}.template.spec.x", 1, "'x'"),
    # Values of another type, and a value outside the enumeration.
    ("pool.yaml", "Service", "penstock-controller", "spec.ports.0.port", "7000", "'7000'"),
    ("pool.yaml", "Deployment", "penstock-worker", f"{POD}.containers.0.args", [4], "4 is not"),
    ("keda.yaml", "ScaledObject", "penstock-worker", "spec.maxReplicaCount", "9", "'9'"),
    ("keda.yaml", "ScaledObject", "penstock-worker", f"{TRIGGER}.metadata.url", 4, "4 is not"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", f"{GROUP}.maxReplicas", "9", "'9'"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", f"{GROUP}.rayStartParams.x", 4, "4 is not"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", "spec.authOptions.mode", "open", "'open'"),
    # Required fields.
    ("pool.yaml", "Deployment", "penstock-worker", "spec.selector", None, "'selector'"),
    ("pool.yaml", "Deployment", "penstock-worker", f"{POD}.containers", None, "'containers'"),
    ("keda.yaml", "ScaledObject", "penstock-worker", "spec.scaleTargetRef", None, "'scaleTarget"),
    ("keda.yaml", "TriggerAuthentication", "penstock-dashboard", f"{SECRET}.key", None, "'key'"),
    ("ray-cluster.yaml", "Job", "penstock-up", "spec.template", None, "'template'"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", "spec.headGroupSpec", None, "'headGroup"),
    ("ray-cluster.yaml", "RayCluster", "penstock-ray", f"{GROUP}.groupName", None, "'groupName'"),
]


@pytest.mark.parametrize(("file", "kind", "name", "path", "value", "told"), FAULTS)
def test_wrong_field_is_reported(
    file: str, kind: str, name: str, path: str, value: Any, told: str
) -> None:
    wrong = changed(files.manifest(file, kind, name), path, value)
    faults = schemas.manifest_faults(wrong, KUBERNETES[-1])
    assert len(faults) == 1
    assert told in faults[0]


@pytest.mark.parametrize(("file", "kind", "name", "variable"), CUSTOM)
def test_manifest_satisfies_the_whole_definition(
    file: str, kind: str, name: str, variable: str
) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} names no definition")
    definition = yaml.safe_load(Path(os.environ[variable]).read_text(encoding="utf-8"))
    schema = schemas.strict_schema_of(definition)
    found = files.manifest(file, kind, name)
    assert schemas.schema_faults(found, schema) == []
    for *which, path, value, told in FAULTS:
        if which == [file, kind, name]:
            faults = schemas.schema_faults(changed(found, path, value), schema)
            assert [told in fault for fault in faults] == [True]


def labels_of(found: Manifest, template: Manifest) -> dict[str, str]:
    labels = dict(template["metadata"]["labels"])
    if found["kind"] == "RayCluster":
        labels["ray.io/cluster"] = found["metadata"]["name"]  # KubeRay's
    return labels


def selected(file: str, selector: dict[str, str]) -> list[Manifest]:
    """The pods of a file that have all of the labels."""
    return [
        template
        for found in files.manifests(file)
        for template in schemas.pod_templates(found).values()
        if selector.items() <= labels_of(found, template).items()
    ]


@pytest.mark.parametrize("file", FILES)
def test_service_ports_match_one_kind_of_pod(file: str) -> None:
    for service in files.services(file).values():
        (template,) = selected(file, service["spec"]["selector"])
        ports = {
            port["name"]: port["containerPort"]
            for container in files.containers(template)
            for port in container.get("ports", ())
        }
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


@pytest.mark.parametrize("found", EVERY_MANIFEST)
def test_deployment_selects_only_its_own_pods(found: Manifest) -> None:
    if found["kind"] == "Deployment":
        selector = found["spec"]["selector"]["matchLabels"]
        assert selected("pool.yaml", selector) == [found["spec"]["template"]]


@pytest.mark.parametrize("template", PODS.values(), ids=PODS)
def test_pod_mounts_exactly_its_volumes(template: Manifest) -> None:
    volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
    mounted = {
        mount["name"]
        for container in files.containers(template)
        for mount in container.get("volumeMounts", ())
    }
    assert mounted == volumes


def test_manifests_use_the_one_image_of_the_dockerfile() -> None:
    text = (files.ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    pods = PODS.values()
    (image,) = {container["image"] for pod in pods for container in files.containers(pod)}
    assert f"-t {image} " in text
    (uid,) = {pod["spec"]["securityContext"]["runAsUser"] for pod in pods}
    assert f"--uid {uid} " in text
    ray = files.manifest("ray-cluster.yaml", "RayCluster", "penstock-ray")["spec"]
    assert f"ARG RAY={ray['rayVersion']}\n" in text
    readme = (files.ROOT / "README.md").read_text(encoding="utf-8")
    (packages,) = re.findall(r"apt-get install ((?:.*\\\n)*.*)", readme)
    assert set(re.findall(r"[a-z][\w+.-]+", packages)) <= set(re.findall(r"[a-z][\w+.-]+", text))


def test_job_calls_the_head_of_the_cluster_with_its_token() -> None:
    name = files.manifest("ray-cluster.yaml", "RayCluster", "penstock-ray")["metadata"]["name"]
    job = files.manifest("ray-cluster.yaml", "Job", "penstock-up")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    # KubeRay's names of the head's Service and of the token's Secret.
    assert f"http://{name}-head-svc:8265" in container["command"]
    (token,) = [v["valueFrom"]["secretKeyRef"] for v in container["env"] if "valueFrom" in v]
    assert token == {"name": name, "key": "auth_token"}
