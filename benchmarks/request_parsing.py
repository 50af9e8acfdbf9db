"""Request parsing: requests per second on usual bodies, seconds and peak memory on the worst ones. Needs no GPU.

A new process parses each body; its peak memory is the growth of its resident set. With `--baseline DIR` the package
in that folder (a checkout of an earlier commit) parses the same bodies, in turns with this one. A body that is
refused counts as parsed: `answer` is the error's code.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from arguments import whole

ROOT = Path(__file__).resolve().parent.parent
MB = 1_000_000


def chat(content: object, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


def typical() -> bytes:
    turns = [
        {"role": "system", "content": "You are a helpful assistant. Answer in short sentences."},
        {"role": "user", "content": "What is the capital of France, and how many people live there?"},
        {"role": "assistant", "content": "Paris. About two million people live in the city itself."},
        {"role": "user", "content": [{"type": "text", "text": "你好，再说一遍。"}]},
    ]
    body = {
        "model": "ming-omni",
        "messages": turns,
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": 512,
        "seed": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "modalities": ["text", "audio"],
        "audio": {"voice": "DB30", "format": "wav"},
    }
    return json.dumps(body, ensure_ascii=False).encode()


def image(size: int) -> bytes:
    url = "data:image/jpeg;base64," + "A" * size
    return chat([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}])


def padded(head: str, item: str, tail: str, size: int, limit: int) -> bytes:
    """`item` repeated to `size` bytes, but at most `limit` times."""
    count = min(size // len(item), limit)
    return (head + item * (count - 1) + item.rstrip(",") + tail).encode()


def bodies(size: int) -> dict[str, Callable[[], bytes]]:
    """The usual and the worst bodies; `most` commas are as many as either parser accepts."""
    most = (1 << 18) - 1
    return {
        "typical chat": typical,
        "1 MB of base64": lambda: image(MB),
        "base64": lambda: image(size),
        "text of escapes": lambda: (
            b'{"messages":[{"role":"user","content":"' + b"\\u4f60" * (size // 6) + b'"}]}'
        ),
        "small arrays": lambda: padded('{"messages":[', "[],", "]}", size, size),
        "arrays, few commas": lambda: padded('{"metadata":[', "[[[[]]]],", "]}", size, most),
        "messages": lambda: padded('{"messages":[', '{"role":"user"},', "]}", size, most // 2),
        "media lists": lambda: padded(
            '{"messages":[{"role":"user","content":""}],"images":[', '"",', "]}", size, most
        ),
        "wrong type, arrays": lambda: padded('{"messages":"x","metadata":[', "[[[[]]]],", "]}", size, most),
        "wrong type, text": lambda: (
            b'{"messages":[{"role":"user","content":"' + b"x" * size + b'"}],"seed":"1"}'
        ),
        "many keys": lambda: (
            '{"messages":[{"role":"user","content":"x"}],'
            + ",".join(f'"k{i}":{i}' for i in range(most - 3))
            + "}"
        ).encode(),
        "many ignored keys": lambda: (
            '{"metadata":{' + ",".join(f'"k{i}":{i}' for i in range(most)) + "}}"
        ).encode(),
        "deep arrays": lambda: b'{"metadata":' + b"[" * size,
        "deep objects": lambda: b'{"metadata":' + b'{"a":' * (size // 5),
        "digits": lambda: b'{"messages":[],"seed":' + b"9" * size + b"}",
        "one key": lambda: b'{"messages":[{"role":"user","content":"x"}],"' + b"k" * size + b'":1}',
    }


def measure(name: str, size: int, repeats: int) -> dict[str, Any]:
    """Parse one body with the `mingc` of this process: seconds, peak memory in MB, and the answer."""
    from mingc.errors import RequestError
    from mingc.runtime.request import ServiceInfo

    info = ServiceInfo(
        model="ming-omni", sample_rate=44100, voices=("DB30",), default_voice="DB30", has_text=True,
        has_image=True, has_video=True, has_audio_input=True, has_speech=True,
    )  # fmt: skip
    parsing = _first_module("mingc.server.http.parsing", "mingc.runtime.http.parsing")
    options = _first_module("mingc.server.options", "mingc.runtime.http.options").ServeOptions()

    def parse(raw: bytes) -> object:
        return parsing.parse_chat(raw, info, options)

    raw = bodies(size)[name]()
    _reset_peak()
    before = _memory("VmRSS")
    answer = "parsed"
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        try:
            parse(raw)
        except RequestError as error:
            answer = error.code or error.message
        seconds.append(time.perf_counter() - start)
    return {
        "bytes": len(raw),
        "seconds": min(seconds),
        "per_s": round(1 / min(seconds), 1),
        "peak_mb": round((_memory("VmHWM") - before) / MB, 1),
        "answer": answer,
    }


def _first_module(*names: str) -> ModuleType:
    """The first module that this folder's package has; later names are those of earlier commits."""
    root = Path(importlib.import_module("mingc").__path__[0]).parent
    return importlib.import_module(
        next(name for name in names if (root / name.replace(".", "/")).with_suffix(".py").is_file())
    )


def _memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=whole(1, 128), default=100, help="size of the worst bodies")
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="a checkout to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = args.megabytes * MB
    if args.measure:
        repeats = {"typical chat": 3000, "1 MB of base64": 100}.get(args.measure, 1)
        print(json.dumps(measure(args.measure, size, repeats)))
        return
    packages = {"this": ROOT, **({"baseline": args.baseline.resolve()} if args.baseline else {})}
    figures = []
    for name in bodies(size):
        for label, root in packages.items():
            done = subprocess.run(
                [sys.executable, __file__, "--megabytes", str(args.megabytes), "--measure", name],
                env={**os.environ, "PYTHONPATH": str(root)},
                cwd=root,
                check=True,
                capture_output=True,
                text=True,
            )
            figure = {"name": name, "package": label, **json.loads(done.stdout)}
            figures.append(figure)
            print(
                f"{name:20} {label:9} {figure['per_s']:>10} /s {1000 * figure['seconds']:>10.3f} ms "
                f"{figure['peak_mb']:>8} MB  {figure['answer']}"
            )
    if args.json:
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        result = {
            "schema": 1,
            "benchmark": "request_parsing",
            "commit": commit,
            "command": f"python benchmarks/request_parsing.py --megabytes {args.megabytes}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "hardware": {"cpu": platform.processor() or platform.machine()},
            "versions": {"python": platform.python_version()},
            "figures": figures,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
