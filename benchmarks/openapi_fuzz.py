#!/usr/bin/env python
"""Send requests that schemathesis generates from `/openapi.json` to a server, valid and invalid ones.

Fails when a status is 500 or above, or when status, content type or body differ from the document. Without URL it
starts a server over the fake service of the tests; a URL must be on this host.

    python benchmarks/openapi_fuzz.py --requests 10000
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
_ROUND = 100
_LEAST: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": [70]},
    "/v1/audio/speech": {"input": "Hello"},
    "/v1/images/generations": {"prompt": "a cat", "size": "512x512"},
    "/v1/images/edits": {"prompt": "in blue", "size": "512x512"},
    "/tokenize": {"messages": [{"role": "user", "content": "Hello"}]},
    "/detokenize": {"tokens": [70]},
}
_TIMEOUT_S = 60


@dataclass(kw_only=True)
class FuzzReport:
    """Number of requests by operation and status, and the distinct faults."""

    requests: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    statuses: dict[str, dict[int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def fuzz(
    url: str, *, num_requests: int, seconds: float, first_seed: int = 0, round_size: int = _ROUND
) -> FuzzReport:
    """Fuzz all operations in turns until `num_requests` are sent or `seconds` are over.

    A turn sends `round_size` valid and as many invalid requests to every operation with a body.
    """
    report = FuzzReport()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    with requests.Session() as session:
        session.trust_env = False
        turn, began = 0, time.monotonic()
        while report.requests < num_requests and time.monotonic() - began < seconds and not report.faults:
            for operation in operations:
                for mode in schemathesis.GenerationMode:
                    _fuzz_operation(
                        operation, mode, session, report, began + seconds, turn + first_seed, round_size
                    )
            turn += 1
    report.seconds = round(time.monotonic() - began, 1)
    return report


def _fuzz_operation(
    operation: Any,
    mode: Any,
    session: requests.Session,
    report: FuzzReport,
    deadline: float,
    turn: int,
    round_size: int,
) -> None:
    num_examples = round_size if operation.body else 5
    counts = report.statuses.setdefault(operation.label, {})
    schemas = operation.schema.raw_schema["components"]["schemas"]
    # Fields without a type are refused or ignored, and no generated name is a served one: valid requests go without. In
    # every other turn they have what cannot be left out, and no field that needs another one.
    dropped = {"model", "voice"}
    if turn % 2:
        dropped |= {
            "aspect_ratio", "audio", "audios", "best_of", "chat_template_kwargs", "echo", "extra_body",
            "guidance_scale", "height", "image_generation", "images", "max_completion_tokens", "min_tokens",
            "modalities", "negative_prompt", "num_inference_steps", "output_compression", "partial_images", "size",
            "stream_options", "thinking", "top_logprobs", "videos", "width",
        }  # fmt: skip
    for body in schemas.values():
        dropped |= {
            name for name, each in body.get("properties", {}).items() if not each.keys() - {"description"}
        }

    @seed(turn)
    @settings(
        max_examples=num_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=_cases(operation, mode))
    def send(case: Any) -> None:
        if time.monotonic() > deadline or report.faults:
            return
        if mode is schemathesis.GenerationMode.POSITIVE and isinstance(case.body, dict):
            given = {name: value for name, value in case.body.items() if name not in dropped}
            case.body = {**_LEAST.get(operation.path, {}), **given} if turn % 2 else given
        began = time.monotonic()
        response = case.call(session=session, timeout=_TIMEOUT_S)
        report.slowest_s = max(report.slowest_s, round(time.monotonic() - began, 3))
        report.requests += 1
        counts[response.status_code] = counts.get(response.status_code, 0) + 1
        try:
            case.validate_response(response, checks=CHECKS)
        except BaseExceptionGroup as group:
            report.faults.append("\n".join(str(each) for each in group.exceptions)[:4000])
        except AssertionError as error:
            report.faults.append(str(error)[:4000])

    try:
        send()
    except Exception as error:  # an operation without what the mode negates has no cases
        if type(error).__name__ not in ("Unsatisfiable", "SkipTest"):
            raise


@st.composite
def _cases(draw: st.DrawFn, operation: Any, mode: Any) -> Any:
    try:
        return draw(operation.as_strategy(generation_mode=mode))
    except ValueError as error:
        if "Binary" not in str(error):
            raise
        reject()  # schemathesis 4.32 cannot validate some of the forms with a list of files that it generates


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="address of a server on this host; default: starts a fake one")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=900.0, help="limit on the time")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url = arguments.url
        if url is None:
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
            from fake_service import FakeService
            from server_thread import run_server

            url = stack.enter_context(run_server(FakeService))
        report = fuzz(
            url, num_requests=arguments.requests, seconds=arguments.seconds, first_seed=arguments.seed
        )
    print(json.dumps(asdict(report), indent=1))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
