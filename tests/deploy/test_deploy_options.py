"""Arguments of a Serve application: strings and typed values, wrong ones, and what is derived from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mingc.deploy.fetch import fetched_artifact
from mingc.deploy.options import DeployOptions, parse_arguments
from mingc.deploy.ray import build_application
from mingc.errors import ArtifactError, ConfigError


def test_strings_and_typed_values_mean_the_same() -> None:
    typed = {
        "artifact": "/a", "tp": 2, "speech": False, "target_ongoing_requests": 8.5, "max_replicas": 3,
        "max_total_tokens": None, "allow_media_hosts": ["a.org", "b.org"], "media_timeout_s": 3.0,
        "max_waiting": 7, "parse_special_tokens": True,
    }  # fmt: skip
    strings = {
        "artifact": "/a", "tp": "2", "speech": "false", "target_ongoing_requests": "8.5", "max_replicas": "3",
        "max_total_tokens": "none", "allow_media_hosts": "a.org,b.org", "media_timeout_s": "3",
        "max_waiting": "7", "parse_special_tokens": "true",
    }  # fmt: skip
    options = parse_arguments(strings)
    assert options == parse_arguments(typed)
    assert (options.tp, options.speech, options.engines.max_waiting) == (2, False, 7)
    assert options.http.allow_media_hosts == ("a.org", "b.org")


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"artifact": None}, "artifact is missing"),
        ({"tpp": "2"}, "tpp is no option"),
        ({"port": "80"}, r"port belongs to Serve's proxy"),
        ({"tp": "two"}, "tp='two': not of type int"),
        ({"tp": 2.5}, "tp=2.5: not a whole number"),
        ({"tp": True}, "tp=True: not a number"),
        ({"speech": "maybe"}, "speech='maybe': not true or false"),
        ({"allow_media_hosts": 3}, "allow_media_hosts=3: not a list"),
        ({"min_replicas": "2"}, "min_replicas 2 and max_replicas 1"),
        ({"speech_min_replicas": "0"}, "speech_min_replicas 0"),
        ({"target_ongoing_requests": "nan"}, "target_ongoing_requests is nan"),
        ({"num_gpus": "-1"}, "num_gpus is -1"),
        ({"max_queued_requests": "0"}, "max_queued_requests is 0"),
        ({"max_queued_requests": "-2"}, "max_queued_requests is -2"),
        ({"max_ongoing_requests": "300"}, "max_ongoing_requests 300 is above max_concurrent_requests 256"),
        ({"fetch": "cp {artifact} /x"}, "fetch has no {output}; fetch needs cache"),
        ({"speech": "no", "speech_artifact": "/s"}, "speech is off, but speech_artifact is given"),
        ({"step_timeout_s": "0"}, "--step-timeout is 0"),
        ({"max_body_bytes": "0"}, "--max-body-bytes is 0"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], says: str) -> None:
    arguments = {"artifact": "/a", **wrong}
    with pytest.raises(ConfigError, match=says):
        parse_arguments({name: value for name, value in arguments.items() if name != "artifact" or value})


def deployments(**arguments: Any) -> dict[str, Any]:
    application = build_application(DeployOptions(**{"artifact": "/not/here", **arguments}))
    ingress = application._bound_deployment
    found = {"mingc": ingress}
    for argument in ingress.init_args[1:]:
        found["mingc-speech"] = argument._bound_deployment
    return {name: each._deployment_config for name, each in found.items()} | {
        f"{name} actor": each.ray_actor_options for name, each in found.items()
    }


def test_defaults_of_the_deployment() -> None:
    found = deployments(tp=4)
    config, actor = found["mingc"], found["mingc actor"]
    assert (config.max_ongoing_requests, config.graceful_shutdown_timeout_s, config.num_replicas) == (
        64,
        600,
        1,
    )
    assert config.autoscaling_config is None
    assert (actor["num_gpus"], actor["num_cpus"]) == (4.0, 1.0)
    assert "mingc-speech" not in found


def test_autoscaling_and_two_deployments() -> None:
    found = deployments(
        min_replicas=1, max_replicas=5, speech_artifact="/s", speech_num_gpus=0.25, speech_max_replicas=1,
        affinity=True,
    )  # fmt: skip
    scaling = found["mingc"].autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.get_target_ongoing_requests()) == (1, 5, 16.0)
    assert "ConsistentHashRouter" in str(found["mingc"].request_router_config.request_router_class)
    assert found["mingc-speech"].autoscaling_config is None
    assert found["mingc-speech actor"]["num_gpus"] == 0.25


def test_gpus_follow_the_manifest(eager_artifact: Path, tmp_path: Path) -> None:
    assert deployments(artifact=str(eager_artifact))["mingc actor"]["num_gpus"] == 0
    assert deployments(artifact=str(eager_artifact), num_gpus=0.5)["mingc actor"]["num_gpus"] == 0.5
    damaged = tmp_path / "artifact"
    damaged.mkdir()
    document = json.loads((eager_artifact / "manifest.json").read_text(encoding="utf-8"))
    (damaged / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ArtifactError, match="are not as exported"):
        deployments(artifact=str(damaged))


def test_an_artifact_is_fetched_once(tmp_path: Path) -> None:
    source, cache, log = tmp_path / "it's", tmp_path / "cache", tmp_path / "log"
    source.mkdir()
    (source / "file").write_text("content")
    command = f"echo x >> {log} && cp -r {{artifact}} {{output}}"
    first = fetched_artifact(str(source), command, cache)
    assert (first / "file").read_text() == "content"
    shutil.rmtree(source)
    assert fetched_artifact(str(source), command, cache) == first
    assert log.read_text() == "x\n"
    assert fetched_artifact("/somewhere", None, None) == Path("/somewhere")


def test_a_fetch_that_fails_leaves_nothing_that_counts_as_fetched(tmp_path: Path) -> None:
    command = "mkdir -p {output}; touch {output}/half; echo no such bucket: {artifact} >&2; exit 3"
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"exit code 3: no such bucket: s3://a"):
            fetched_artifact("s3://a", command, tmp_path)


def test_a_command_that_still_runs_does_not_write_into_the_next_output(tmp_path: Path) -> None:
    """That of a replica that was killed, whose lock is gone."""
    command = "echo {output} >> " + f"{tmp_path}/outputs; touch {{output}}; test {{artifact}} = never"
    for _ in range(2):
        with pytest.raises(ArtifactError, match="exit code 1"):
            fetched_artifact("a", command, tmp_path / "cache")
    first, second = (tmp_path / "outputs").read_text().split()
    assert first != second
    assert not Path(first).exists(), "what is left of the first is removed"


def test_a_path_with_the_text_of_the_output_is_quoted_once(tmp_path: Path) -> None:
    source, cache = tmp_path / "{output}", tmp_path / "a cache"
    source.write_text("content")
    assert fetched_artifact(str(source), "cp {artifact} {output}", cache).read_text() == "content"


def test_messages_of_a_command_may_be_in_any_encoding(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="exit code 3: \ufffd"):
        fetched_artifact("a", r"printf '\377' >&2; exit 3 {artifact} {output}", tmp_path)


def test_a_command_that_writes_nothing_has_failed(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="exit code 0"):
        fetched_artifact("a", "true {artifact} {output}", tmp_path)


def test_a_packed_bundle_may_be_fetched(tmp_path: Path) -> None:
    (tmp_path / "a.mingc").write_text("packed")
    fetched = fetched_artifact(str(tmp_path / "a.mingc"), "cp {artifact} {output}", tmp_path / "cache")
    assert fetched.read_text() == "packed"


def test_keys_of_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node would serve without them, and Ray's state would hold them."""
    monkeypatch.setenv("MINGC_API_KEYS", "secret")
    with pytest.raises(ConfigError, match="keys of MINGC_API_KEYS") as refused:
        build_application(DeployOptions(artifact="/a", num_gpus=0.0))
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("MINGC_API_KEYS", "")
    build_application(DeployOptions(artifact="/a", num_gpus=0.0))
