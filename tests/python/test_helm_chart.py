# SPDX-License-Identifier: Apache-2.0
"""The Helm chart: by helm itself where it is installed, its rendered objects by the checks of the
manifests, and without helm its values by their schema and by the names in the templates."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from parsed_commands import parsing

# Not installed on machines with a GPU (.make/gpu_packages.txt).
yaml = pytest.importorskip("yaml")
schemas = pytest.importorskip("kubernetes_schemas", reason="needs kubernetes-validate")
files = pytest.importorskip("kubernetes_files")
Manifest = dict[str, Any]

CHART = files.ROOT / "deploy" / "helm" / "penstock"
PAGE = files.ROOT / "docs" / "how-to" / "kubernetes.md"
VALUES: Manifest = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
TEMPLATES = {path.name: path.read_text(encoding="utf-8") for path in CHART.glob("templates/*")}
KUBERNETES = ("1.30", "1.37")

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60)


def template(
    tmp_path: Path, values: Manifest, name: str = "penstock", namespace: str = "default"
) -> subprocess.CompletedProcess[str]:
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(values))
    return helm("template", name, str(CHART), "--namespace", namespace, "--values", str(given))


def rendered(tmp_path: Path, values: Manifest, **place: str) -> list[Manifest]:
    done = template(tmp_path, values, **place)
    assert (done.returncode, done.stderr) == (0, "")
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


EVERYTHING: Manifest = {
    "image": {"repository": "registry.example/other", "tag": "7", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "keysSecret": "our-keys",
    "tokenSecret": "our-token",
    "controller": {
        "arguments": ["--dashboard-name", "pool.example"],
        "nodeSelector": {"pool": "small"},
        "tolerations": [{"key": "small", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    },
    "worker": {
        "processes": 16,
        "memory": "64Gi",
        "graceSeconds": 90,
        "arguments": ["--patience", "120"],
        "env": [{"name": "HF_HOME", "value": "/data/hf"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "priorityClassName": "low",
    },
    "scaling": {
        "enabled": True,
        "minReplicas": 0,
        "maxReplicas": 64,
        "scaleDownSeconds": 600,
        "prometheus": {"serverAddress": "http://prometheus.monitoring.svc:9090"},
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
SETS = {
    "defaults": {},
    "scaling": {"scaling": {"enabled": True}},
    "monitor": {"serviceMonitor": {"enabled": True}},
    "everything": EVERYTHING,
}


@needs_helm
@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_helm_lint_finds_no_fault(values: Manifest, tmp_path: Path) -> None:
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(values))
    done = helm("lint", "--strict", str(CHART), "--values", str(given))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@needs_helm
@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_rendered_objects_satisfy_the_schemas(
    values: Manifest, kubernetes: str, tmp_path: Path
) -> None:
    objects = rendered(tmp_path, values)
    assert {one["kind"] for one in objects} >= {"Deployment", "Service"}
    for one in objects:
        assert schemas.manifest_faults(one, kubernetes) == []


def without_names_of_helm(found: Any) -> Any:
    """A copy without the labels that only a chart has, and the default pull policy."""
    ours = copy.deepcopy(found)
    if isinstance(ours, list):
        return [without_names_of_helm(one) for one in ours]
    if not isinstance(ours, dict):
        return ours
    for label in ("instance", "managed-by"):
        ours.pop(f"app.kubernetes.io/{label}", None)
    ours.pop("helm.sh/chart", None)
    if ours.get("imagePullPolicy") == "IfNotPresent":
        del ours["imagePullPolicy"]
    return {name: without_names_of_helm(one) for name, one in ours.items()}


@needs_helm
def test_chart_renders_to_the_objects_of_the_manifests(tmp_path: Path) -> None:
    def by_name(objects: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(one["kind"], one["metadata"]["name"]): one for one in objects}

    chart = by_name(without_names_of_helm(rendered(tmp_path, {"scaling": {"enabled": True}})))
    plain = by_name([*files.manifests("pool.yaml"), *files.manifests("keda.yaml")])
    assert chart == plain
    assert len(chart) == 5


@needs_helm
def test_replicas_are_set_only_without_a_scaler(tmp_path: Path) -> None:
    fixed = rendered(tmp_path, {"worker": {"replicas": 7}})
    assert named(fixed, "Deployment", "penstock-worker")["spec"]["replicas"] == 7
    assert {one["kind"] for one in fixed} == {"Deployment", "Service"}
    scaled = rendered(tmp_path, {"worker": {"replicas": 7}, "scaling": {"enabled": True}})
    assert "replicas" not in named(scaled, "Deployment", "penstock-worker")["spec"]


@needs_helm
def test_values_reach_their_objects(tmp_path: Path) -> None:
    objects = rendered(tmp_path, EVERYTHING, name="night", namespace="ml")
    worker = named(objects, "Deployment", "night-worker")["spec"]["template"]["spec"]
    (container,) = worker["containers"]
    assert container["image"] == "registry.example/other:7"
    assert container["args"] == [
        *("worker", "--controller", "tcp://night-controller:7000", "--keys", "/keys/pool"),
        *("--processes", "16", "--grace", "90", "--patience", "120"),
    ]
    assert container["resources"]["requests"] == {"cpu": "16", "memory": "64Gi"}
    assert container["env"] == EVERYTHING["worker"]["env"]
    assert EVERYTHING["worker"]["volumeMounts"][0] in container["volumeMounts"]
    assert EVERYTHING["worker"]["volumes"][0] in worker["volumes"]
    assert worker["terminationGracePeriodSeconds"] == 120
    assert worker["nodeSelector"] == {"pool": "cpu"}
    assert worker["priorityClassName"] == "low"
    assert worker["imagePullSecrets"] == [{"name": "registry"}]
    pod = named(objects, "Deployment", "night-controller")["spec"]["template"]["spec"]
    assert pod["tolerations"] == EVERYTHING["controller"]["tolerations"]
    assert pod["containers"][0]["args"][-2:] == ["--dashboard-name", "pool.example"]
    secrets = [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one]
    assert secrets == ["our-keys", "our-token"]
    scaler = named(objects, "ScaledObject", "night-worker")["spec"]
    (trigger,) = scaler["triggers"]
    assert trigger["metadata"]["threshold"] == "16"
    assert '{namespace="ml",service="night-controller"}' in trigger["metadata"]["query"]
    assert (scaler["minReplicaCount"], scaler["maxReplicaCount"]) == (0, 64)
    monitor = named(objects, "ServiceMonitor", "night-controller")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    service = named(objects, "Service", "night-controller")
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["authorization"]["credentials"] == {"name": "our-token", "key": "token"}
    labels = service["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


@needs_helm
@pytest.mark.parametrize("values", SETS.values(), ids=SETS)
def test_penstock_accepts_the_rendered_commands(
    values: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = parsing(monkeypatch)
    for one in rendered(tmp_path, values):
        for pod in schemas.pod_templates(one).values():
            (container,) = pod["spec"]["containers"]
            parse(files.penstock_arguments(files.command_of(container)))


@needs_helm
def test_releases_in_one_namespace_are_separate(tmp_path: Path) -> None:
    values = {"scaling": {"enabled": True}}
    day, night = (rendered(tmp_path, values, name=name) for name in ("day", "night"))
    names = [{(one["kind"], one["metadata"]["name"]) for one in both} for both in (day, night)]
    assert names[0].isdisjoint(names[1])
    for one in day:
        for pods in (schemas.pod_templates(other) for other in night):
            selector = one.get("spec", {}).get("selector", {})
            wanted = selector.get("matchLabels", selector)
            for pod in pods.values():
                assert not wanted or not wanted.items() <= pod["metadata"]["labels"].items()


@needs_helm
def test_query_of_the_chart_is_the_documented_query(tmp_path: Path) -> None:
    address = "http://prometheus.monitoring.svc:9090"
    values = {"scaling": {"enabled": True, "prometheus": {"serverAddress": address}}}
    scaler = named(rendered(tmp_path, values), "ScaledObject", "penstock-worker")
    (snippet,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert scaler["spec"]["triggers"] == yaml.safe_load(snippet)["triggers"]
    values["scaling"]["prometheus"] |= {  # type: ignore[operator, index]
        "selector": 'pool="a"',
        "metadata": {"authModes": "bearer"},
        "authenticationRef": {"name": "thanos"},
    }
    (trigger,) = named(rendered(tmp_path, values), "ScaledObject", "penstock-worker")["spec"][
        "triggers"
    ]
    assert 'penstock_workers_wanted{pool="a"}' in trigger["metadata"]["query"]
    assert trigger["metadata"]["authModes"] == "bearer"
    assert trigger["authenticationRef"] == {"name": "thanos"}


WRONG = [
    ({"worker": {"processes": 0}}, "processes"),
    ({"worker": {"proceses": 4}}, "proceses"),
    ({"worker": {"processes": "four"}}, "processes"),
    ({"scaling": {"enabled": "yes"}}, "enabled"),
    ({"scaling": {"prometheus": {"serverAddress": "prometheus:9090"}}}, "serverAddress"),
    ({"keysSecret": ""}, "keysSecret"),
]


@needs_helm
@pytest.mark.parametrize(("values", "told"), WRONG)
def test_helm_rejects_wrong_values(values: Manifest, told: str, tmp_path: Path) -> None:
    done = template(tmp_path, values)
    assert done.returncode != 0
    assert told in done.stderr


@needs_helm
def test_helm_rejects_limits_that_exclude_each_other(tmp_path: Path) -> None:
    done = template(tmp_path, {"scaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 8}})
    assert done.returncode != 0
    assert "scaling.minReplicas must be <= scaling.maxReplicas, which is 8, got 9" in done.stderr


def merged(values: Manifest, over: Manifest) -> Manifest:
    result = dict(values)
    for name, value in over.items():
        nested = isinstance(value, dict) and isinstance(values.get(name), dict)
        result[name] = merged(values[name], value) if nested else value
    return result


def test_schema_of_the_values_accepts_the_defaults_and_rejects_wrong_ones() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft7Validator(schema)
    for values in SETS.values():
        assert [*validator.iter_errors(merged(VALUES, values))] == []
    for values, told in WRONG:
        (error,) = validator.iter_errors(merged(VALUES, values))
        assert told in f"{error.json_path} {error.message}"


def paths(values: Manifest, above: str = "") -> set[str]:
    """The names of all values; an empty object is free for the user."""
    found = set()
    for name, value in values.items():
        path = f"{above}{name}"
        found |= paths(value, f"{path}.") if isinstance(value, dict) and value else {path}
    return found


def test_templates_use_every_value_and_no_other() -> None:
    text = "\n".join(TEMPLATES.values())
    short = {"$worker": "worker", "$scaling": "scaling"}
    used = set(re.findall(r"\.Values\.([A-Za-z.]+)", text))
    for name, path in short.items():
        used |= {f"{path}.{one}" for one in re.findall(rf"{re.escape(name)}\.([A-Za-z.]+)", text)}
    for name in re.findall(r"{{- with \.([A-Za-z]+) }}", TEMPLATES["_helpers.tpl"]):
        used |= {f"{part}.{name}" for part in ("controller", "worker")}
    known = {one for one in paths(VALUES) if not one.startswith("controller.resources.")}
    known |= {"controller.resources"}
    assert {one for one in used if one not in ("controller", "worker", "scaling")} == known


def test_chart_has_the_image_and_version_of_the_manifests() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    image = f"{VALUES['image']['repository']}:{chart['appVersion']}"
    assert {c["image"] for pod in files.every_pod().values() for c in files.containers(pod)} == {
        image
    }


def test_every_value_in_the_documents_exists() -> None:
    table = re.findall(r"^\| (`[a-zA-Z].*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name for line in table for name in re.findall(r"`([a-zA-Z.]+)`", line)}
    documented |= set(re.findall(r"--set ([a-zA-Z.]+)=", PAGE.read_text(encoding="utf-8")))
    assert documented and documented <= paths(VALUES)
