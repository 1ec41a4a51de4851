# SPDX-License-Identifier: Apache-2.0
"""Validates Kubernetes manifests by schemas that know every field.

Kubernetes' kinds are checked against its published schemas, which the package kubernetes-validate
contains. Kinds of KubeRay, KEDA and the Prometheus operator are described here, in the parts that
the manifests use, and the pods of a RayCluster are checked as Kubernetes pods. A cluster would drop
unknown fields, so here an unknown field is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import kubernetes_validate

RAY_API = "ray.io/v1"
KEDA_API = "keda.sh/v1alpha1"
MONITORING_API = "monitoring.coreos.com/v1"
Manifest = dict[str, Any]


def manifest_faults(manifest: Manifest, kubernetes: str) -> list[str]:
    """Return sentences with the location of each error; at most one per pod. ``kubernetes`` is a
    version."""
    api, kind = str(manifest.get("apiVersion")), manifest["kind"]
    if api in (RAY_API, KEDA_API, MONITORING_API) and kind not in CUSTOM_KINDS:
        return [f"{kind}: no kind that the manifests use"]
    if kind not in CUSTOM_KINDS:
        return list(_faults_of_kubernetes_kind(manifest, kubernetes))
    return [
        *schema_faults(manifest, CUSTOM_KINDS[kind]),
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
    """Return the schema in a CustomResourceDefinition, with unknown fields as errors."""
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    kind = CUSTOM_KINDS[definition["spec"]["names"]["kind"]]
    used = kind["properties"]["apiVersion"]["const"].rpartition("/")[2]
    strict = _strict(versions[used]["schema"]["openAPIV3Schema"])
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

_METADATA = _fields({"name": _TEXT, "labels": _TEXTS}, "name")


def _custom(api: str, kind: str, spec: Manifest) -> Manifest:
    return _fields(
        {
            "apiVersion": {"const": api},
            "kind": {"const": kind},
            "metadata": _METADATA,
            "spec": spec,
        },
        *("apiVersion", "kind", "metadata", "spec"),
    )


# Only the fields that the manifests use, with their types in KubeRay 1.7.0, KEDA 2.20 and the
# Prometheus operator. When a manifest uses another field, it is added here as in the operator's
# definition.
RAY_CLUSTER = _custom(
    RAY_API,
    "RayCluster",
    _fields(
        {
            "rayVersion": _TEXT,
            "enableInTreeAutoscaling": {"type": "boolean"},
            "authOptions": _fields({"mode": {"enum": ["disabled", "token"]}}),
            "autoscalerOptions": _fields({"idleTimeoutSeconds": _COUNT}),
            "headGroupSpec": _fields({"rayStartParams": _TEXTS, "template": _TEMPLATE}, "template"),
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
)

# The trigger's `metadata` is free text in KEDA's definition; these are the options of its scalers
# metrics-api and prometheus (2.16 to 2.20), whose values KEDA takes as text.
_TRIGGERS = [
    ("metrics-api", ("url", "format", "valueLocation", "targetValue", "authMode"), ("url",)),
    (
        "prometheus",
        ("serverAddress", "query", "threshold", "ignoreNullValues", "authModes"),
        ("serverAddress", "query", "threshold"),
    ),
]
SCALED_OBJECT = _custom(
    KEDA_API,
    "ScaledObject",
    _fields(
        {
            "scaleTargetRef": _fields({"apiVersion": _TEXT, "kind": _TEXT, "name": _TEXT}, "name"),
            "minReplicaCount": _COUNT,
            "maxReplicaCount": _COUNT,
            "pollingInterval": _COUNT,
            "cooldownPeriod": _COUNT,
            "advanced": _fields(
                {
                    "horizontalPodAutoscalerConfig": _fields(
                        {
                            "behavior": _fields(
                                {"scaleDown": _fields({"stabilizationWindowSeconds": _COUNT})}
                            )
                        }
                    )
                }
            ),
            "triggers": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": [name for name, _, _ in _TRIGGERS]}},
                    "allOf": [
                        {
                            "if": {"properties": {"type": {"const": name}}},
                            "then": _fields(
                                {
                                    "type": _TEXT,
                                    "metricType": {"enum": ["AverageValue", "Value"]},
                                    "metadata": _fields(dict.fromkeys(options, _TEXT), *required),
                                    "authenticationRef": _fields({"name": _TEXT}, "name"),
                                },
                                "metadata",
                            ),
                        }
                        for name, options, required in _TRIGGERS
                    ],
                },
            },
        },
        *("scaleTargetRef", "triggers"),
    ),
)
_SECRET_KEY = {"name": _TEXT, "key": _TEXT}
TRIGGER_AUTHENTICATION = _custom(
    KEDA_API,
    "TriggerAuthentication",
    _fields(
        {
            "secretTargetRef": {
                "type": "array",
                "items": _fields({"parameter": _TEXT, **_SECRET_KEY}, "parameter", *_SECRET_KEY),
            }
        }
    ),
)
SERVICE_MONITOR = _custom(
    MONITORING_API,
    "ServiceMonitor",
    _fields(
        {
            "selector": _fields({"matchLabels": _TEXTS}),
            "endpoints": {
                "type": "array",
                "items": _fields(
                    {
                        "port": _TEXT,
                        "path": _TEXT,
                        "interval": {"type": "string", "pattern": "^[0-9]+s$"},
                        "authorization": _fields(
                            {"type": _TEXT, "credentials": _fields(_SECRET_KEY, *_SECRET_KEY)}
                        ),
                    }
                ),
            },
        },
        *("selector", "endpoints"),
    ),
)
CUSTOM_KINDS = {
    kind["properties"]["kind"]["const"]: kind
    for kind in (RAY_CLUSTER, SCALED_OBJECT, TRIGGER_AUTHENTICATION, SERVICE_MONITOR)
}
