"""What `mingc doctor` says of links between GPUs."""

from mingc.doctor import peer_check


def test_links_between_devices() -> None:
    assert "one-shot" in peer_check([]).detail
    closed = peer_check(["0-1", "1-0"]).detail
    assert "one-shot" not in closed and "0-1, 1-0" in closed
