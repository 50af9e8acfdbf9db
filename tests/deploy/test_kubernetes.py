"""The manifests of deploy/kubernetes fit the schemas of Kubernetes and Ray, and the options of this version."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from mingc.commands.serve import command as serve_command
from mingc.deploy.options import parse_arguments
from mingc.options import options_of
from mingc.server.metrics import describe_metrics
from mingc.server.options import ServeOptions

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
# Kinds of operators, which Kubernetes' own schemas do not have.
CUSTOM = {"PodMonitor", "RayService"}
VERSION = "1.30"


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(required), "additionalProperties": False,
    }  # fmt: skip


# The parts of the operators' schemas that the manifests use, by their documentation: no package has these schemas.
# Other fields are refused, so one that is misspelt is found. The manifests were validated once against the whole ones:
# prometheus-operator 0.93.0, and KubeRay's of August 2026.
_TEXT, _NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
_START = {
    "type": "object",
    "additionalProperties": _TEXT,
}  # a number without quotes is refused by the operator
_POD = {"type": "object"}  # checked as a Pod
OPERATORS = {
    "PodMonitor": _object(
        ("selector",),
        selector=_object(("matchLabels",), matchLabels={"type": "object", "additionalProperties": _TEXT}),
        podMetricsEndpoints={
            "type": "array",
            "items": _object(port=_TEXT, path=_TEXT, interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}),
        },
    ),
    "RayService": _object(
        ("rayClusterConfig",),
        serveConfigV2=_TEXT,
        rayClusterConfig=_object(
            ("headGroupSpec",),
            rayVersion=_TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=_object(("template",), rayStartParams=_START, template=_POD),
            workerGroupSpecs={
                "type": "array",
                "items": _object(
                    ("groupName", "template"), groupName=_TEXT, replicas=_NUMBER, minReplicas=_NUMBER,
                    maxReplicas=_NUMBER, rayStartParams=_START, template=_POD,
                ),
            },
        ),
    ),
}  # fmt: skip
VERSIONS = {"PodMonitor": "monitoring.coreos.com/v1", "RayService": "ray.io/v1"}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


PLAIN = {each["kind"]: each for each in documents("mingc.yaml")}
RAY = documents("rayservice.yaml")[0]


@pytest.mark.parametrize("kind", [kind for kind in PLAIN if kind not in CUSTOM])
def test_a_manifest_fits_the_schema(kind: str) -> None:
    kubernetes_validate.validate(PLAIN[kind], VERSION, strict=True)


@pytest.mark.parametrize("document", [PLAIN["PodMonitor"], RAY], ids=lambda document: str(document["kind"]))
def test_a_manifest_of_an_operator_fits_its_schema(document: Any) -> None:
    kind = document["kind"]
    assert (document.keys(), document["apiVersion"]) == (
        {"apiVersion", "kind", "metadata", "spec"}, VERSIONS[kind],
    )  # fmt: skip
    jsonschema.validate(document["spec"], OPERATORS[kind])
    for wrong in ({**document["spec"], "specc": 1}, {}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, OPERATORS[kind])


def test_the_schema_check_can_fail() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**PLAIN["Service"], "spec": {"ports": "http"}}, VERSION, strict=True)


def test_manifests_name_each_other() -> None:
    pod = PLAIN["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert PLAIN["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert PLAIN["Service"]["spec"]["selector"].items() <= labels.items()
    for kind in ("PodMonitor", "PodDisruptionBudget"):
        assert PLAIN[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = pod["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in PLAIN["Service"]["spec"]["ports"]} <= ports
    assert {end["port"] for end in PLAIN["PodMonitor"]["spec"]["podMetricsEndpoints"]} <= ports
    target = PLAIN["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", PLAIN["Deployment"]["metadata"]["name"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}


def test_the_deployment_starts_a_server_that_exists() -> None:
    (container,) = PLAIN["Deployment"]["spec"]["template"]["spec"]["containers"]
    program, command, *words = container["args"]
    assert (program, command) == ("mingc", "serve")
    given = serve_command.make_context("serve", words).params
    assert isinstance(serve_command, click.Command)
    grace = PLAIN["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    drain_s, shutdown_s = (
        options_of(ServeOptions)[name].parse(given[name]) for name in ("drain_s", "shutdown_timeout_s")
    )
    assert drain_s + shutdown_s < grace
    probe = container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < drain_s


def test_scaling_uses_metrics_that_are_exported() -> None:
    exported = {info.name for info in describe_metrics()}
    metrics = PLAIN["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert {metric["pods"]["metric"]["name"] for metric in metrics} <= exported


def test_the_pods_of_the_ray_cluster_fit_the_schema() -> None:
    cluster = RAY["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_serve_config_fits_ray_and_mingc() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(RAY["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "mingc.deploy.ray:app"
    options = parse_arguments(application.args)
    (group,) = RAY["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    resources = container["resources"]["requests"]
    assert options.num_gpus == float(resources["nvidia.com/gpu"]) == options.tp
    assert options.num_cpus < float(resources["cpu"])
    # Pods for all replicas and for those that an update starts first; the autoscaler of KubeRay is off by default.
    surge = math.ceil(options.max_surge_percent * options.max_replicas / 100)
    assert options.min_replicas < options.max_replicas and surge > 0
    assert group["maxReplicas"] == options.max_replicas + surge
    assert RAY["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is True
    assert options.graceful_shutdown_timeout_s < group["template"]["spec"]["terminationGracePeriodSeconds"]
