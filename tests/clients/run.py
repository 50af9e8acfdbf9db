"""Runs real clients against a server with the tiny artifact, each in an environment of its own: `make test-clients`.

A second server has a scripted model, which calls tools.

Environments are made under `build/clients` by pip and npm. `browser` and `page` need Chromium (`CHROMIUM`: its
program). Each script gets one JSON object on stdin (`client_inputs.Inputs`) and fails by its exit code.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import soundfile
from client_inputs import Inputs
from eager_export import export_eager
from mingc_command import DATA, REPOSITORY, serving
from PIL import Image
from realtime_client import speech
from scripted_model import scripted_service
from server_thread import run_server

HERE = Path(__file__).resolve().parent

CLIENTS = {
    "langchain_chat.py": ["langchain-openai"],
    "litellm_chat.py": ["litellm"],
    "llamaindex_chat.py": ["llama-index-llms-openai-like"],
    "openai_node.mjs": ["openai"],
    "ai_sdk.mjs": ["ai", "@ai-sdk/openai-compatible"],
    "browser.mjs": ["openai", "playwright-core"],
    "realtime_openai.py": ["openai[realtime]"],
    "realtime_livekit.py": ["livekit-agents", "livekit-plugins-openai"],
    "realtime_pipecat.py": ["pipecat-ai"],
    "realtime_agents.mjs": ["@openai/agents-realtime", "zod"],
    "page.mjs": ["axe-core", "playwright-core"],
}
_KEY = "key-of-the-client-tests"
_OUTSIDE = {
    name: value for name, value in os.environ.items() if name != "PYTHONPATH"
}  # a client sees no mingc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help=f"which (default: all): {', '.join(CLIENTS)}")
    parser.add_argument(
        "--artifact", type=Path, help="default: the tiny checkpoint, exported without compiling"
    )
    given = parser.parse_args()
    clients = given.clients or list(CLIENTS)
    if unknown := [name for name in clients if name not in CLIENTS]:
        sys.exit(f"no such client: {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    folder = REPOSITORY / "build" / "clients"
    folder.mkdir(parents=True, exist_ok=True)
    microphone = folder / "microphone.wav"
    _record(microphone)
    keys = folder / "keys"
    keys.write_text(f"{_KEY}\n", encoding="utf-8")
    with socket.socket() as chosen:  # of the page; the server allows its origin
        chosen.bind(("127.0.0.1", 0))
        page_port = chosen.getsockname()[1]
    options = ("--api-key-file", keys, "--cors-origin", f"http://127.0.0.1:{page_port}")
    failed = []
    with (
        tempfile.TemporaryDirectory() as voices,
        serving(given.artifact or export_eager(), *options, "--voices-dir", voices) as server,
        run_server(lambda: scripted_service()[0]) as tools_url,
    ):
        inputs = Inputs(
            url=f"{server.url}/v1",
            tools_url=f"{tools_url}/v1",
            key=_KEY,
            model="ming-omni",
            voice="DB30",
            image=_picture(),
            clip=_clip(),
            turns=_turns(),
            microphone=str(microphone),
            page_port=page_port,
        )
        for name in clients:
            command = _environment(folder, name)
            done = subprocess.run(
                command,
                input=json.dumps(asdict(inputs)),
                text=True,
                capture_output=True,
                timeout=300,
                check=False,
                env=_OUTSIDE,
            )
            print(f"{'passed' if done.returncode == 0 else 'FAILED'}  {name}", flush=True)
            if done.returncode:
                failed.append(name)
                print(done.stdout + done.stderr, file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _environment(folder: Path, name: str) -> list[str]:
    """Make the environment of a client where it is missing. Returns the command that runs its script there."""
    home = folder / Path(name).stem
    if name.endswith(".py"):
        python = home / "bin" / "python"
        if not (home / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
            subprocess.run([python, "-m", "pip", "install", "-qqq", *CLIENTS[name]], check=True, env=_OUTSIDE)
            (home / "ready").touch()
        return [str(python), str(HERE / name)]
    if not (home / "ready").exists():
        home.mkdir(exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", home, *CLIENTS[name]], check=True)
        (home / "ready").touch()
    script = home / name  # Node looks for packages beside the script
    script.write_bytes((HERE / name).read_bytes())
    return ["node", str(script)]


def _picture() -> str:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((112, 84)).convert("RGB").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _clip() -> str:
    file = io.BytesIO()
    seconds = np.arange(16000) / 16000
    soundfile.write(file, 0.3 * np.sin(2 * np.pi * 220 * seconds), 16000, format="WAV", subtype="PCM_16")
    return base64.b64encode(file.getvalue()).decode()


def _turns() -> list[str]:
    """The first two sentences of the recording of the tests, each with the silence that ends a turn."""
    turns = (speech(start_s, end_s, silence_s=1.0) for start_s, end_s in ((0.2, 2.4), (2.8, 4.8)))
    return [base64.b64encode(each).decode() for each in turns]


def _record(path: Path) -> None:
    """What Chromium's microphone hears, again and again."""
    speech, rate = soundfile.read(DATA / "speech" / "three-sentences.ogg")
    soundfile.write(path, speech, rate, subtype="PCM_16")


if __name__ == "__main__":
    main()
