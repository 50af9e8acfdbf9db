"""A bundle with wheels on a machine without network and compiler: install, verify, serve, answer; then in a container.

    pip wheel --wheel-dir WHEELS '.[serve,sign]'
    unshare --net sh -c 'ip link set lo up; exec python benchmarks/offline_bundle.py ARTIFACT WHEELS --json FILE'

Runs the commands of docs/operations.md in a new virtual environment with only its own programs, `sh` and `dirname` on
PATH. The script refuses to run where an address outside this machine can be reached, or where that PATH has a compiler.
`--image BASE` also builds the Containerfile with buildah on the local image BASE and asks the server that runs in the
container, as the image's user and by its entry point.

Each figure is one run.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpu_result import parse_args, write

_COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "ld", "nvcc")
_PROGRAMS = ("sh", "dirname")  # of start.sh
_TEST_NET = ("192.0.2.1", 80)  # RFC 5737: for documentation, routed nowhere
_READY_S = 300


class Trial:
    """Runs commands in one environment and notes their seconds."""

    def __init__(self, folder: Path) -> None:
        self.figures: list[dict[str, Any]] = []
        bare = folder / "programs"
        bare.mkdir()
        for name in _PROGRAMS:
            (bare / name).symlink_to(str(shutil.which(name)))
        self.venv = folder / "venv"
        path = f"{self.venv / 'bin'}:{bare}"
        found = [name for name in _COMPILERS if shutil.which(name, path=path)]
        if found:
            raise SystemExit(f"PATH has {', '.join(found)}")
        self.environment = {"PATH": path, "HOME": str(folder), "TMPDIR": str(folder)}

    def note(self, name: str, value: float, unit: str) -> None:
        self.figures.append({"name": name, "value": round(value, 3), "unit": unit})
        print(f"{name} {value:.3f} {unit}", flush=True)

    def note_load(self, when: str) -> None:
        self.note(
            f"load_average_{when}", os.getloadavg()[0], "processes that run or wait for a core, 1 minute"
        )

    def run(self, name: str, *words: object, environment: Mapping[str, str] | None = None) -> str:
        """stdout of a command that has to succeed."""
        started = time.perf_counter()
        own = self.environment if environment is None else environment
        done = subprocess.run([*map(str, words)], env=own, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        self.note(f"{name}_seconds", time.perf_counter() - started, "s")
        return done.stdout

    @contextmanager
    def serving(
        self, name: str, *words: object, environment: Mapping[str, str] | None = None
    ) -> Iterator[str]:
        """The address of a server, once it is ready."""
        started = time.perf_counter()
        own = self.environment if environment is None else environment
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [*map(str, words)], env=own, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            try:
                line = process.stdout.readline().strip()
                if not line.startswith("http://"):
                    process.wait(_READY_S)
                    errors.seek(0)
                    raise SystemExit(f"{name}: exit code {process.returncode}\n{errors.read()}")
                self.note(f"{name}_ready_seconds", time.perf_counter() - started, "s")
                yield line.replace("0.0.0.0", "127.0.0.1")
            finally:
                process.terminate()
                process.communicate(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path, help="folder of an artifact that speaks and runs here")
    parser.add_argument("wheels", type=Path, help="wheels of mingc[serve,sign] and all that it depends on")
    parser.add_argument("--image", help="local image with Python: build and run the container as well")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parse_args(parser)
    _check_offline()
    with tempfile.TemporaryDirectory(prefix="offline-bundle-") as folder:
        work = Path(folder)
        trial = Trial(work)
        trial.note_load("at_start")
        bundle, key = _build(trial, given.artifact, given.wheels, work)
        _install(trial, bundle, work)
        mingc = trial.venv / "bin" / "mingc"
        trial.run("doctor", mingc, "doctor", bundle)
        trial.run("verify_signature", mingc, "bundle", "verify-signature", bundle, "--public-key", key)
        site = work / "site"
        trial.run("unpack", mingc, "bundle", "unpack", bundle, site)
        trial.run(
            "verify_signature_of_folder", mingc, "bundle", "verify-signature", site, "--public-key", key
        )
        checked = json.loads(trial.run("verify", mingc, "verify", site, "--json"))
        trial.note("verify_checked", checked["checked"], "comparisons")
        trial.note("verify_failed", checked["failed"], "comparisons")
        signed = ("--require-signature", key, "--port", 0, "--drain-seconds", 0)
        with trial.serving("serve_folder", mingc, "serve", site, *signed) as url:
            spoken = _spoken_answer(trial, url)
        with trial.serving("serve_packed", mingc, "serve", bundle, *signed) as url:
            same = _spoken_answer(trial, url) == spoken
        trial.note("packed_answers_as_folder", float(same), "1: the same text and samples")
        starting = {**trial.environment, "MINGC": str(mingc), "MINGC_PUBLIC_KEY": str(key)}
        script = ("sh", site / "bundle" / "start.sh", "--port", 0, "--drain-seconds", 0)
        with trial.serving("start_script", *script, environment=starting) as url:
            same = _spoken_answer(trial, url) == spoken
        trial.note("start_script_answers_as_folder", float(same), "1: the same text and samples")
        if given.image:
            same = _answer_of_container(trial, given.image, site) == spoken
            trial.note("container_answers_as_folder", float(same), "1: the same text and samples")
        trial.note_load("at_end")
    if given.json is not None:
        write(given.json, "offline_bundle", trial.figures)


def _check_offline() -> None:
    with socket.socket() as probe:
        probe.settimeout(2)
        reached = probe.connect_ex(_TEST_NET)
    if reached != errno.ENETUNREACH:
        raise SystemExit("this machine has a route to a network: run under `unshare --net`")


def _build(trial: Trial, artifact: Path, wheels: Path, folder: Path) -> tuple[Path, Path]:
    """The signed bundle and the public key, made with this Python, as on the machine that builds."""
    bundle, own, words = folder / "tiny.mingc", dict(os.environ), [sys.executable, "-m", "mingc", "bundle"]
    trial.run("pack", *words, "pack", artifact, bundle, "--with-wheels", wheels, environment=own)
    trial.note("bundle_bytes", bundle.stat().st_size, "bytes, wheels included")
    trial.run("keygen", *words, "keygen", folder / "release.key", environment=own)
    trial.run("sign", *words, "sign", bundle, "--secret-key", folder / "release.key", environment=own)
    return bundle, folder / "release.pub"


def _install(trial: Trial, bundle: Path, folder: Path) -> None:
    """A new virtual environment of the bundle's own wheels, with the extras that its Containerfile names."""
    with zipfile.ZipFile(bundle) as archive:
        named = re.search(r"'(mingc\[[a-z,]+\])'", archive.read("bundle/Containerfile").decode())
        archive.extractall(
            folder / "first", [n for n in archive.namelist() if n.startswith("bundle/wheels/")]
        )
    if named is None:
        raise SystemExit("the Containerfile names no extras")
    trial.run("venv", sys.executable, "-m", "venv", trial.venv)
    wheels = folder / "first" / "bundle" / "wheels"
    pip = (trial.venv / "bin" / "pip", "install", "--no-index", "--find-links", wheels, named[1])
    trial.run("install", *pip)
    listed = json.loads(trial.run("list", trial.venv / "bin" / "pip", "list", "--format", "json"))
    trial.note("distributions", len(listed), "installed, pip and setuptools included")


def _spoken_answer(trial: Trial, url: str) -> tuple[str, bytes]:
    """Text and audio of one chat answer."""
    body = {
        "messages": [{"role": "user", "content": "Say hello."}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "max_tokens": 8,
        "seed": 7,
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    started = time.perf_counter()
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        message = json.load(answer)["choices"][0]["message"]
    text, audio = message["content"] or message["audio"]["transcript"], message["audio"]["data"]
    trial.note("answer_seconds", time.perf_counter() - started, f"s, {len(audio) * 3 // 4} bytes of WAV")
    return text, audio.encode()


def _answer_of_container(trial: Trial, base: str, site: Path) -> tuple[str, bytes]:
    """Build the Containerfile in the unpacked bundle and ask the server inside."""
    own = dict(os.environ)
    # chroot isolation keeps the network that it is started in, which _check_offline found without a route.
    build = ("buildah", "bud", "--isolation=chroot", "--pull-never", "--build-arg", f"BASE={base}")
    tag = "localhost/mingc-offline-trial"
    trial.run("image", *build, "-t", tag, "-f", site / "bundle/Containerfile", site, environment=own)
    container = trial.run("container", "buildah", "from", "--pull-never", tag, environment=own).strip()
    try:
        inspected = json.loads(trial.run("inspect", "buildah", "inspect", container, environment=own))
        entry = inspected["OCIv1"]["config"]["Entrypoint"]
        run = ("buildah", "run", "--isolation=chroot", container, "--", *entry, "--port", 0)
        with trial.serving("container", *run, "--drain-seconds", 0, environment=own) as url:
            return _spoken_answer(trial, url)
    finally:
        trial.run("remove", "buildah", "rm", container, environment=own)
        trial.run("remove_image", "buildah", "rmi", tag, environment=own)


if __name__ == "__main__":
    main()
