"""Clients that disconnect and servers that shut down: requests are cancelled or get an error."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_service import FakeService
from server_process import child
from server_thread import eventually, run_server

from mingc.errors import ConfigError, RankError
from mingc.server.app import create_app
from mingc.server.lifecycle import base_url, bind_socket, serve, serve_async
from mingc.server.options import ServeOptions

CHAT = "/v1/chat/completions"


def body(text: str, *, stream: bool = True) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], "stream": stream}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["endless", "wait"])
def test_a_client_that_leaves_cancels_its_request(stream: bool, text: str) -> None:
    services: list[FakeService] = []

    def make() -> FakeService:
        services.append(FakeService())
        return services[0]

    with run_server(make) as url:
        service = services[0]
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as connection:
            payload = json.dumps(body(text, stream=stream)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
            eventually(lambda: len(service.running) == 1)
        eventually(lambda: not service.running)
        assert list(service.ends.values()) == ["cancelled"]
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
        assert 'mingc_requests_cancelled_total{route="/v1/chat/completions"} 1.0' in metrics
        assert "mingc_num_requests_running 0.0" in metrics


def test_a_finished_request_is_not_counted_as_cancelled() -> None:
    with run_server(FakeService) as url, httpx.Client(base_url=url, trust_env=False) as client:
        for stream in (True, False):
            for _ in range(20):
                assert client.post(CHAT, json=body("hi", stream=stream)).status_code == 200
        assert "mingc_requests_cancelled_total{" not in client.get("/metrics").text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_sends_an_error_to_running_streams_and_ends_the_process(number: signal.Signals) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup, and so does the server")
    with (
        child(shutdown_timeout_s=0.3) as (process, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        with client.stream("POST", CHAT, json=body("endless")) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(number)
            data = [line for line in lines if line.startswith("data: ")]
        assert json.loads(data[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "in order\nending\n")
        assert "Traceback" not in err


def test_requests_that_finish_within_the_shutdown_timeout_are_answered() -> None:
    with (
        child(shutdown_timeout_s=30) as (process, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        with client.stream("POST", CHAT, json=body("hi")) as response:
            process.send_signal(signal.SIGTERM)
            assert "[DONE]" in "".join(response.iter_text())
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "in order\nending\n")


def test_two_signals_at_once_count_as_one() -> None:
    with (
        child(shutdown_timeout_s=30) as (process, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        with client.stream("POST", CHAT, json=body("hi")) as response:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            assert "[DONE]" in "".join(response.iter_text())
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "in order\nending\n")


def test_a_signal_during_interpreter_shutdown_keeps_the_exit_code() -> None:
    with child(shutdown_timeout_s=30) as (process, _):
        process.terminate()
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["in order\n", "ending\n"]
        process.terminate()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0


def test_a_failure_of_the_service_ends_the_server_with_it() -> None:
    """As when a rank of the thinker is lost: the process must not stay up and answer 503 for ever."""
    failure, stop = RankError("rank 1 ended"), asyncio.Event()

    async def main() -> None:
        service = FakeService()
        app = create_app(service, ServeOptions(port=0, shutdown_timeout_s=0.2))

        def announce(url: str) -> None:
            service.report_failure(failure)
            asyncio.get_running_loop().call_later(10.0, stop.set)  # a server that goes on ends in order

        await serve_async(app, announce=announce, stop=stop)

    with pytest.raises(RankError) as caught:
        asyncio.run(main())
    assert caught.value is failure and not stop.is_set()


def test_a_second_signal_stops_at_once() -> None:
    with (
        child(shutdown_timeout_s=600, one_request_s=0) as (process, url),
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        with pytest.raises(httpx.HTTPError), client.stream("POST", CHAT, json=body("endless")) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            eventually(lambda: refuses(url))
            process.send_signal(signal.SIGTERM)
            for _ in zip(range(1000), lines, strict=False):  # far more than come before it ends
                pass
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "cut short\nending\n")
        assert "Traceback" not in err


def refuses(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_port_in_use_is_reported_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind_socket("127.0.0.1", port)
    error = caught.value
    assert error.message == f"cannot listen at 127.0.0.1:{port}: the port is in use"
    assert error.where == f"--host 127.0.0.1 --port {port}"
    assert error.fix is not None and "--port" in error.fix
    assert error.exit_code == 2


def test_a_port_that_was_taken_while_loading() -> None:
    service = FakeService()
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with bind_socket("127.0.0.1", port) as other:  # neither listens yet, so both may bind
        other.listen()
        with pytest.raises(ConfigError, match="the port is in use"):
            serve(create_app(service, ServeOptions(port=port)), listener, announce=pytest.fail)
    assert service.shutdown_timeouts == [0.0]
    assert listener.fileno() == -1


def test_an_address_of_another_host() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1:0") as caught:
        bind_socket("192.0.2.1", 0)
    assert caught.value.fix is not None and "--host" in caught.value.fix
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        bind_socket("no.such.host.invalid", 0)


def test_port_zero_is_announced_as_the_chosen_port() -> None:
    with bind_socket("127.0.0.1", 0) as listener:
        assert base_url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert listener.getsockname()[1] != 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_of_a_server_is_a_url(host: str) -> None:
    listener: Any = SimpleNamespace(getsockname=lambda: (host, 8000, 0, 0))  # a machine may have no IPv6
    url = httpx.URL(base_url(listener))
    assert (url.scheme, url.host, url.port) == ("http", host, 8000)
