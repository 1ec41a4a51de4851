# SPDX-License-Identifier: Apache-2.0
"""Validates Kubernetes manifests by schemas that know every field.

Kubernetes' kinds are checked against its published schemas, which the package kubernetes-validate
contains. A RayCluster is KubeRay's kind; the part of it that the manifests use is described here,
and its pods are checked as Kubernetes pods. A cluster would drop unknown fields, so here an unknown
field is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import kubernetes_validate

RAY_API = "ray.io/v1"
Manifest = dict[str, Any]


def manifest_faults(manifest: Manifest, kubernetes: str) -> list[str]:
    """Return sentences with the location of each error; at most one per pod. ``kubernetes`` is a
    version."""
    if manifest.get("apiVersion") != RAY_API:
        return list(_faults_of_kubernetes_kind(manifest, kubernetes))
    return [
        *schema_faults(manifest, RAY_CLUSTER),
        *(
            fault
            for name, template in pod_templates(manifest).items()
            for fault in _faults_of_kubernetes_kind(_pod_template(name, template), kubernetes)
        ),
    ]


def schema_faults(manifest: Manifest, schema: Mapping[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def pod_templates(manifest: Manifest) -> dict[str, Manifest]:
    """Return the pods that a manifest requests, by name; empty for a kind without pods."""
    name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
    if manifest["kind"] in ("Deployment", "Job"):
        return {name: spec["template"]}
    if manifest["kind"] == "RayCluster":
        groups = {group.get("groupName", ""): group for group in spec.get("workerGroupSpecs", ())}
        groups["head"] = spec.get("headGroupSpec", {})
        return {
            f"{name}-{part}": group["template"]
            for part, group in groups.items()
            if "template" in group
        }
    return {}


def strict_schema_of(definition: Manifest) -> Manifest:
    """Return the schema in a CustomResourceDefinition of RayCluster, with unknown fields as
    errors."""
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    strict = _strict(versions[RAY_API.rpartition("/")[2]]["schema"]["openAPIV3Schema"])
    assert isinstance(strict, dict)
    return strict


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(part) for name, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        strict.setdefault("additionalProperties", False)
    return strict


def _faults_of_kubernetes_kind(manifest: Manifest, kubernetes: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(manifest, kubernetes, strict=True)
    except kubernetes_validate.ValidationError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        yield f"{manifest['kind']} {manifest['metadata']['name']}: {place}: {error.message}"


def _pod_template(name: str, template: Manifest) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": {"name": name},
        "template": template,
    }


def _fields(fields: Mapping[str, Any], *required: str) -> Manifest:
    return {
        "type": "object",
        "properties": dict(fields),
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string"}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_COUNT = {"type": "integer", "minimum": 0}
_TEMPLATE = {"type": "object"}  # checked as a PodTemplate

# Only the fields that the manifests use, with their types in KubeRay 1.7.0. When a manifest uses
# another field, it is added here as in the operator's definition.
RAY_CLUSTER = _fields(
    {
        "apiVersion": {"const": RAY_API},
        "kind": {"const": "RayCluster"},
        "metadata": _fields({"name": _TEXT, "labels": _TEXTS}, "name"),
        "spec": _fields(
            {
                "rayVersion": _TEXT,
                "enableInTreeAutoscaling": {"type": "boolean"},
                "authOptions": _fields({"mode": {"enum": ["disabled", "token"]}}),
                "autoscalerOptions": _fields({"idleTimeoutSeconds": _COUNT}),
                "headGroupSpec": _fields(
                    {"rayStartParams": _TEXTS, "template": _TEMPLATE}, "template"
                ),
                "workerGroupSpecs": {
                    "type": "array",
                    "items": _fields(
                        {
                            "groupName": _TEXT,
                            "replicas": _COUNT,
                            "minReplicas": _COUNT,
                            "maxReplicas": _COUNT,
                            "rayStartParams": _TEXTS,
                            "template": _TEMPLATE,
                        },
                        *("groupName", "minReplicas", "maxReplicas", "template"),
                    ),
                },
            },
            "headGroupSpec",
        ),
    },
    *("apiVersion", "kind", "metadata", "spec"),
)
