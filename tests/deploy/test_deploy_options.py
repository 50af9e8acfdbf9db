"""Arguments of a Serve application: strings and typed values, wrong ones, and what is derived from them."""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mingc.artifacts.artifact import open_unchecked
from mingc.deploy import ray
from mingc.deploy.fetch import fetched_artifact
from mingc.deploy.options import DeployOptions, parse_arguments
from mingc.deploy.ray import build_application
from mingc.errors import ArtifactError, ConfigError
from mingc.runtime.service.options import EngineOptions


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
        ({"tp": "two"}, "tp='two': not a whole number"),
        ({"tp": 2.5}, "tp=2.5: not a whole number"),
        ({"tp": True}, "tp=True: not a whole number"),
        ({"speech": "maybe"}, "speech='maybe': not true or false"),
        ({"allow_media_hosts": 3}, "allow_media_hosts=3: not a list"),
        ({"min_replicas": "2"}, "min_replicas 2 is above max_replicas 1"),
        ({"speech_min_replicas": "0"}, "speech_min_replicas 0: must be from 1"),
        ({"target_ongoing_requests": "nan"}, "target_ongoing_requests nan: must be a finite number"),
        ({"num_gpus": "-1"}, "num_gpus -1: must be from 0"),
        ({"max_queued_requests": "0"}, "max_queued_requests 0: must be above 0, or -1 for any number"),
        ({"max_queued_requests": "-2"}, "max_queued_requests -2: must be from -1"),
        ({"max_ongoing_requests": "300"}, "max_ongoing_requests 300 is above max_concurrent_requests 256"),
        ({"fetch": "cp {artifact} /x"}, "fetch has no {output}\nfetch needs cache"),
        ({"speech": "no", "speech_artifact": "/s"}, "speech is off, but speech_artifact is given"),
        ({"engines": "cfm=onnx"}, "engines is no option"),
        ({"target": "cpu"}, "target is no option"),
        ({"speech": "no", "talker_devices": "cuda:1"}, "speech is off, but talker_devices are given"),
        ({"talker_devices": "gpu1"}, "--talker-device gpu1: is neither"),
        ({"step_timeout_s": "0"}, "--step-timeout 0s: must be above 0s"),
        ({"max_body_bytes": "0"}, "--max-body-bytes 0B: must be from 1B"),
        ({"artifact": ""}, "artifact is empty"),
        ({"fetch": "x {output}", "cache": "/c"}, "fetch has no {artifact}"),
        ({"max_replicas": "0"}, "max_replicas 0: must be from 1"),
        ({"speech_max_replicas": "0"}, "speech_max_replicas 0: must be from 1"),
        ({"max_ongoing_requests": "0"}, "max_ongoing_requests 0: must be from 1"),
        ({"health_check_period_s": "0"}, "health_check_period_s 0s: must be above 0s"),
        ({"health_check_timeout_s": "inf"}, "health_check_timeout_s inf: must be a finite number"),
        ({"upscale_delay_s": "-1"}, "upscale_delay_s -1s: must be from 0s"),
        ({"downscale_delay_s": "nan"}, "downscale_delay_s nan: must be a finite number"),
        ({"graceful_shutdown_timeout_s": "inf"}, "graceful_shutdown_timeout_s inf: must be"),
        ({"num_cpus": "-0.5"}, "num_cpus -0.5: must be from 0"),
        ({"speech_num_gpus": "-2"}, "speech_num_gpus -2: must be from 0"),
        ({"max_surge_percent": "-1"}, "max_surge_percent -1: must be from 0 to 100"),
        ({"num_cpus": "inf", "tp": "x"}, "tp='x': not a whole number"),
        ({"tp": [2]}, r"tp=\[2\]: not a whole number"),
        ({"affinity": 2}, "affinity=2: not true or false"),
        ({"speech": "none"}, "speech='none': not true or false"),
        ({"num_gpus": "half"}, "num_gpus='half': not a number"),
        ({"steps": "x"}, "steps is no option"),
        ({"http": {}}, "http is no option"),
        ({"tp": "0"}, "tp 0: must be from 1"),
        ({"artifact": ["/a"]}, r"artifact=\['/a'\]: not a text"),
        ({"fetch": 3}, "fetch=3: not a text"),
        ({"num_gpus": "1.5"}, "num_gpus 1.5: Ray shares one GPU, or reserves whole ones"),
        ({"speech_artifact": "/s", "speech_num_gpus": "2.5"}, "speech_num_gpus 2.5: Ray shares"),
        ({"max_surge_percent": "101"}, "max_surge_percent 101: must be from 0 to 100"),
        ({"max_replicas": "3000000000"}, "max_replicas 3000000000: must be from 1 to 2147483647"),
        ({"max_queued_requests": "3000000000"}, "max_queued_requests 3000000000: must be from"),
        (
            {"speech_max_replicas": "2"},
            "speech_max_replicas is of the second deployment, which needs speech_art",
        ),
        ({"speech_num_gpus": "0"}, "speech_num_gpus is of the second deployment"),
        ({"served_model_names": {}}, "not a list"),
        ({"cache": "/c"}, "cache keeps what fetch writes, and fetch is missing"),
        *[
            ({name: "1"}, f"{name} belongs to Serve's proxy")
            for name in (
                "host",
                "max_connections",
                "header_timeout_s",
                "write_timeout_s",
                "drain_s",
                "shutdown_timeout_s",
            )
        ],
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], says: str) -> None:
    arguments = {"artifact": "/a", **wrong}
    with pytest.raises(ConfigError, match=says):
        parse_arguments({name: value for name, value in arguments.items() if value is not None})


def test_an_empty_line_of_a_config_file_is_no_path() -> None:
    """YAML reads `artifact:` as nothing; replicas would wait for the folder None."""
    with pytest.raises(ConfigError, match="artifact=None: not a text"):
        parse_arguments({"artifact": None})
    assert parse_arguments({"artifact": Path("/a")}).artifact == "/a"


def test_new_options_of_the_engines_are_arguments() -> None:
    options = parse_arguments(
        {
            **{"artifact": "/a", "prefix_cache": "false", "speech_lead": "0"},
            "talker_devices": "cuda:2,cuda:3",
        }
    ).engines
    assert (options.prefix_cache, options.speech_lead) == (False, 0)
    assert options.talker_devices == ("cuda:2", "cuda:3")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"nothing is no option\nartifact is missing\ntp='x': ") as refused:
        parse_arguments({"tp": "x", "nothing": 1})
    assert refused.value.where == "arguments of mingc.deploy.ray:app"
    with pytest.raises(ConfigError, match=r"num_cpus -1: .*\nmin_replicas 3 is above"):
        DeployOptions(artifact="/a", min_replicas=3, num_cpus=-1.0)


@pytest.mark.parametrize("name", ["tp", "num_gpus", "fetch", "cache", "speech_artifact", "max_total_tokens"])
def test_none_leaves_an_option_to_its_default(name: str) -> None:
    assert parse_arguments({"artifact": "/a", name: "none"}) == parse_arguments(
        {"artifact": "/a", name: None}
    )


def test_words_become_values_of_their_types() -> None:
    """A path stays a path, a whole number may stand where a fraction is meant, words of truth are those of YAML."""
    options = parse_arguments(
        {"artifact": "7", "cache": "/c", "fetch": "x {artifact} {output}", "num_cpus": 2, "upscale_delay_s": "0",
         "max_queued_requests": "-1", "served_model_names": "one,two", "cors_origins": ("*",)}
    )  # fmt: skip
    assert options.cache == Path("/c") and isinstance(options.cache, Path)
    assert (options.artifact, options.num_cpus, options.upscale_delay_s) == ("7", 2.0, 0.0)
    assert isinstance(options.num_cpus, float) and options.max_queued_requests == -1
    assert options.engines.served_model_names == ("one", "two") and options.http.cors_origins == ("*",)
    for word in ("True", "YES", "on", "1", 1):
        assert parse_arguments({"artifact": "/a", "affinity": word}).affinity is True
    for word in ("False", "no", "OFF", "0", 0):
        assert parse_arguments({"artifact": "/a", "speech": word}).speech is False


def test_sizes_and_durations_have_units() -> None:
    options = parse_arguments(
        {"artifact": "/a", "max_body_bytes": "256MiB", "downscale_delay_s": "5min", "step_timeout_s": "500ms"}
    )
    assert (options.http.max_body_bytes, options.downscale_delay_s) == (256 << 20, 300.0)
    assert options.engines.step_timeout_s == 0.5


def test_bounds_are_allowed_values() -> None:
    """Delays of zero, no surge, equal numbers of replicas, as many requests as the HTTP layer takes."""
    DeployOptions(
        artifact="/a", upscale_delay_s=0.0, downscale_delay_s=0.0, graceful_shutdown_timeout_s=0.0, num_cpus=0.0,
        num_gpus=0.0, speech_artifact="/s", speech_num_gpus=0.0, max_surge_percent=100, min_replicas=3, max_replicas=3,
        max_ongoing_requests=256, max_queued_requests=1, tp=1,
    )  # fmt: skip
    DeployOptions(artifact="/a", num_gpus=1.0, max_replicas=2**31 - 1)
    DeployOptions(artifact="/a", num_gpus=0.25)


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
    assert deployments(num_gpus=0.0)["mingc actor"]["num_gpus"] == 0.0, "given, though it is fetched first"


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


def test_both_deployments_get_every_setting() -> None:
    found = deployments(
        min_replicas=2, max_replicas=3, speech_min_replicas=4, speech_max_replicas=6, speech_artifact="/s",
        target_ongoing_requests=7.0, max_ongoing_requests=9, max_queued_requests=11, upscale_delay_s=13.0,
        downscale_delay_s=17.0, num_gpus=2.0, speech_num_gpus=0.5, num_cpus=3.0, health_check_period_s=19.0,
        health_check_timeout_s=23.0, graceful_shutdown_timeout_s=29.0, max_surge_percent=31,
    )  # fmt: skip
    for name, least, most, gpus in (("mingc", 2, 3, 2.0), ("mingc-speech", 4, 6, 0.5)):
        config, scaling = found[name], found[name].autoscaling_config
        assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (least, least, most)
        assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (13.0, 17.0)
        assert scaling.get_target_ongoing_requests() == 7.0
        assert (config.max_ongoing_requests, config.max_queued_requests) == (9, 11)
        assert (config.health_check_period_s, config.health_check_timeout_s) == (19.0, 23.0)
        assert (config.graceful_shutdown_timeout_s, config.max_surge_percent) == (29.0, 31)
        actor = found[f"{name} actor"]
        assert (actor["num_gpus"], actor["num_cpus"]) == (gpus, 3.0)
    fixed = deployments(min_replicas=2, max_replicas=2, speech_min_replicas=3, speech_max_replicas=3,
                        speech_artifact="/s")  # fmt: skip
    assert [(fixed[name].num_replicas, fixed[name].autoscaling_config) for name in ("mingc", "mingc-speech")] == [
        (2, None), (3, None)]  # fmt: skip


def test_affinity_is_asked_for_and_of_the_ingress_only() -> None:
    def routers(**arguments: Any) -> list[str]:
        found = deployments(speech_artifact="/s", **arguments)
        return [
            str(found[name].request_router_config.request_router_class) for name in ("mingc", "mingc-speech")
        ]

    assert not any("ConsistentHash" in each for each in routers())
    assert ["ConsistentHash" in each for each in routers(affinity=True)] == [True, False]


def test_replicas_are_bound_to_the_options() -> None:
    options = DeployOptions(artifact="/a", speech_artifact="/s", max_replicas=4)
    model = build_application(options)._bound_deployment
    assert (model.name, model.init_args[0]) == ("mingc", options)
    (speech,) = model.init_args[1:]
    assert (speech._bound_deployment.name, speech._bound_deployment.init_args) == ("mingc-speech", (options,))
    assert build_application(DeployOptions(artifact="/a"))._bound_deployment.init_args == (
        DeployOptions(artifact="/a"),
    )


def test_an_application_is_made_of_arguments() -> None:
    application = ray.app({"artifact": "/a", "max_replicas": "3", "num_gpus": "0"})
    assert application._bound_deployment._deployment_config.autoscaling_config.max_replicas == 3


def test_gpus_of_an_artifact_that_is_not_here_yet() -> None:
    """One per rank: the speech artifact has one rank, whatever the thinker has."""
    found = deployments(tp=4, speech_artifact="/s")
    assert (found["mingc actor"]["num_gpus"], found["mingc-speech actor"]["num_gpus"]) == (4.0, 1.0)
    assert deployments()["mingc actor"]["num_gpus"] == 1.0


def test_gpus_of_a_fetched_artifact_are_not_those_of_a_folder_of_that_name(eager_artifact: Path) -> None:
    fetch = {"fetch": "cp {artifact} {output}", "cache": Path("/c"), "artifact": str(eager_artifact)}
    assert deployments(**fetch)["mingc actor"]["num_gpus"] == 1.0
    assert deployments(**fetch, tp=2)["mingc actor"]["num_gpus"] == 2.0


@pytest.mark.parametrize("device, ranks, gpus", [("cuda", 4, 4.0), ("cuda", 1, 1.0), ("cpu", 2, 0.0)])
def test_gpus_are_the_ranks_of_a_cuda_artifact(
    monkeypatch: pytest.MonkeyPatch,
    eager_artifact: Path,
    tmp_path: Path,
    device: str,
    ranks: int,
    gpus: float,
) -> None:
    own = open_unchecked(eager_artifact)
    fingerprint = replace(own.manifest.fingerprint, device=device, world_size=ranks)
    artifact = replace(own, manifest=replace(own.manifest, fingerprint=fingerprint))
    monkeypatch.setattr(ray, "open_artifact", lambda root: artifact)
    packed = tmp_path / "a.mingc"
    packed.touch()
    (tmp_path / "manifest.json").touch()
    for path in (packed, tmp_path):
        assert deployments(artifact=str(path))["mingc actor"]["num_gpus"] == gpus


def test_a_replica_has_the_gpus_of_its_talkers(
    monkeypatch: pytest.MonkeyPatch, eager_artifact: Path, tmp_path: Path
) -> None:
    own = open_unchecked(eager_artifact)
    cuda = replace(own.manifest.fingerprint, device="cuda", world_size=2)
    artifact = replace(own, manifest=replace(own.manifest, fingerprint=cuda))
    monkeypatch.setattr(ray, "open_artifact", lambda root: artifact)
    (tmp_path / "manifest.json").touch()
    for path, elsewhere in ((tmp_path, 1.0), (tmp_path / "not yet there", 1.0)):
        options = parse_arguments({"artifact": str(path), "talker_devices": "cuda:3,cuda:2", "tp": 2})
        assert ray._num_gpus(str(path), options, None, tp=2) == 4.0, "cuda:0 to cuda:3"
        assert ray._num_gpus(str(path), options, None, tp=2, has_talkers=False) == 2.0
        first = parse_arguments({"artifact": str(path), "talker_devices": "cuda:0", "tp": 2})
        assert ray._num_gpus(str(path), first, None, tp=2) == 2.0, "as many as ranks at least"
        assert ray._num_gpus(str(path), options, elsewhere, tp=2) == elsewhere, "as given"
        drawing = parse_arguments({"artifact": str(path), "image_devices": "cuda:0,cuda:4", "tp": 2})
        assert ray._num_gpus(str(path), drawing, None, tp=2, has_talkers=False) == 5.0
        assert ray._num_gpus(str(path), drawing, None, tp=2, draws=False) == 2.0
    apart = deployments(
        artifact=str(tmp_path),
        speech_artifact=str(tmp_path),
        engines=EngineOptions(talker_devices=("cuda:3", "cuda:2"), image_devices=("cuda:5",)),
    )
    assert apart["mingc actor"]["num_gpus"] == 6.0, "its speech is made elsewhere, its pictures are not"
    assert apart["mingc-speech actor"]["num_gpus"] == 4.0


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


def test_another_command_or_artifact_is_fetched_again(tmp_path: Path) -> None:
    """A node must not go on with what a former command, or the same command for another artifact, has fetched."""
    cache = tmp_path / "not" / "there" / "yet"
    content = {}
    for artifact in ("a", "b"):
        for word in ("old", "new"):
            found = fetched_artifact(artifact, f"echo {word} {{artifact}} > {{output}}", cache)
            content[found] = found.read_text()
    assert list(content.values()) == ["old a\n", "new a\n", "old b\n", "new b\n"]


def test_replicas_that_start_together_fetch_once(tmp_path: Path) -> None:
    """The others wait until it is complete."""
    command = f"echo x >> {tmp_path}/log; touch {{output}}; sleep 0.3; echo {{artifact}} > {{output}}"
    begin = threading.Barrier(4)

    def fetch(_: int) -> str:
        begin.wait(20)
        return fetched_artifact("a", command, tmp_path / "cache").read_text()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fetch, range(4))) == ["a\n"] * 4
    assert (tmp_path / "log").read_text() == "x\n"


def test_what_another_artifact_is_being_fetched_into_stays(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ArtifactError):
        fetched_artifact("a", "mkdir -p {output}/half; false {artifact}", cache)
    (left,) = cache.glob("*.partial")
    fetched_artifact("b", "echo {artifact} > {output}", cache)
    assert left.is_dir()
    with pytest.raises(ArtifactError):
        fetched_artifact("a", "mkdir -p {output}/half; false {artifact}", cache)
    assert not left.exists() and len(list(cache.glob("*.partial"))) == 1, (
        "a folder of the same fetch is removed"
    )


def test_a_command_gets_no_input_of_the_replica(tmp_path: Path) -> None:
    """One that asks a question must end, not wait for ever."""
    read_end, write_end = os.pipe()
    kept = os.dup(0)
    try:
        os.dup2(read_end, 0)
        fetched = fetched_artifact("a", "timeout 5 cat > {output} && echo {artifact} >> {output}", tmp_path)
    finally:
        os.dup2(kept, 0)
        for each in (read_end, write_end, kept):
            os.close(each)
    assert fetched.read_text() == "a\n"


def test_the_end_of_a_long_message_is_shown(tmp_path: Path) -> None:
    command = "head -c 5000 /dev/zero | tr '\\0' x >&2; echo the reason >&2; exit 4 {artifact} {output}"
    with pytest.raises(
        ArtifactError, match=r"fetching s3://a failed with exit code 4: x+the reason"
    ) as failed:
        fetched_artifact("s3://a", command, tmp_path)
    assert len(str(failed.value)) < 1000
    assert failed.value.where is not None and "exit 4 s3://a /" in failed.value.where


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
