"""Keys and signatures compared with the format's own description and with the library that computes Ed25519."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from mingc.bundles import minisign
from mingc.bundles.signatures import generate_keys
from mingc.errors import ConfigError, SignatureError

SEED, KEY_ID = bytes(range(32)), bytes.fromhex("0102030405060708")
PRIVATE = Ed25519PrivateKey.from_private_bytes(SEED)
PUBLIC = PRIVATE.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
KEY = minisign.PublicKey(KEY_ID, PRIVATE.public_key())
CONTENT = b"content of bundle.json"


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _signature(content: bytes = CONTENT, comment: str = "release 1", algorithm: bytes = b"ED") -> list[str]:
    """The lines of a signature file, made here as minisign's page describes them."""
    made = PRIVATE.sign(hashlib.blake2b(content).digest())
    return [
        "untrusted comment: anything",
        _text(algorithm + KEY_ID + made),
        f"trusted comment: {comment}",
        _text(PRIVATE.sign(made + comment.encode())),
        "",
    ]


def _secret(check: bytes | None = None, algorithm: bytes = b"Ed", kdf: bytes = b"\0\0") -> str:
    if check is None:
        check = hashlib.blake2b(b"Ed" + KEY_ID + SEED + PUBLIC, digest_size=32).digest()
    numbers = bytes(32) + bytes(8) + bytes(8)
    return (
        f"untrusted comment: k\n{_text(algorithm + kdf + b'B2' + numbers + KEY_ID + SEED + PUBLIC + check)}\n"
    )


def test_a_signature_of_the_described_format_is_accepted_and_its_comment_returned() -> None:
    assert minisign.check(CONTENT, "\n".join(_signature()).encode(), KEY, "x") == "release 1"
    assert minisign.check(CONTENT, "\n".join(_signature(comment="版本 1")).encode(), KEY, "x") == "版本 1"


def test_signing_writes_the_described_format(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(_secret())
    key = minisign.read_secret_key(tmp_path / "key")
    lines = minisign.sign(CONTENT, key, "release 1").decode().split("\n")
    assert lines[0].startswith("untrusted comment: ") and lines[1:] == _signature()[1:]


@pytest.mark.parametrize(
    ("line", "value", "says"),
    [
        (0, "comment: anything", "minisign's format"),
        (1, _signature(algorithm=b"Ed")[1], "minisign's format"),
        (1, _signature()[1][:-4], "minisign's format"),
        (1, "no base64", "minisign's format"),
        (1, _signature(b"other")[1], "does not fit the content"),
        (2, "trusted comment: release 2", "does not fit its trusted comment"),
        (2, "comment: release 1", "minisign's format"),
        (3, _signature(comment="release 2")[3], "does not fit its trusted comment"),
        (3, "", "minisign's format"),
        (4, "more", "minisign's format"),
    ],
)
def test_every_changed_line_of_a_signature_is_refused(line: int, value: str, says: str) -> None:
    lines = _signature()
    lines[line] = value
    with pytest.raises(SignatureError, match=says) as raised:
        minisign.check(CONTENT, "\n".join(lines).encode(), KEY, "where")
    assert raised.value.where == "where"


def test_both_key_ids_are_named_when_another_key_signed() -> None:
    other = minisign.PublicKey(bytes(8), KEY.key)
    with pytest.raises(SignatureError, match=r"signed with the key 0807060504030201, the given one is 0{16}"):
        minisign.check(CONTENT, "\n".join(_signature()).encode(), other, "x")
    with pytest.raises(SignatureError, match="minisign's format"):
        minisign.check(CONTENT, b"\xff", KEY, "x")


def test_a_public_key_is_read_from_a_file_and_as_text(tmp_path: Path) -> None:
    text = _text(b"Ed" + KEY_ID + PUBLIC)
    (tmp_path / "k.pub").write_text(f"untrusted comment: minisign public key 0807060504030201\n{text}\n")
    for given in (text, f" {text}\n", str(tmp_path / "k.pub")):
        key = minisign.read_public_key(given)
        assert key.key_id == "0807060504030201"
        assert key.key.public_bytes(Encoding.Raw, PublicFormat.Raw) == PUBLIC
    for wrong in ("", _text(b"Ec" + KEY_ID + PUBLIC), _text(b"Ed" + KEY_ID + PUBLIC + b"1"), "ключ"):
        with pytest.raises(ConfigError, match="not a minisign public key"):
            minisign.read_public_key(wrong)


def test_a_secret_key_is_compared_with_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(_secret())
    assert minisign.read_secret_key(path).id_bytes == KEY_ID
    path.write_text(_secret(check=bytes(32)))  # as `minisign -G -W` writes it
    assert minisign.read_secret_key(path).key.sign(b"x") == PRIVATE.sign(b"x")
    for content, says in (
        (_secret(check=b"1" * 32), "the secret key is damaged"),
        (_secret(algorithm=b"Xx"), "another kind"),
        (_secret(kdf=b"Xx"), "another kind"),
        ("one line", "not a minisign secret key"),
        (f"comment\n{_text(b'short')}\n", "not a minisign secret key"),
        ("ключ", "cannot be read"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=says):
            minisign.read_secret_key(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        minisign.read_secret_key(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "public"), [("team.key", "team.pub"), ("team", "team.pub"), ("a.b", "a.b.pub")]
)
def test_new_keys_fit_each_other_and_lie_side_by_side(name: str, public: str, tmp_path: Path) -> None:
    made = generate_keys(tmp_path / "keys" / name)
    assert made.public_key == tmp_path / "keys" / public
    assert (made.public_key.stat().st_mode & 0o777, made.secret_key.stat().st_mode & 0o777) == (0o644, 0o600)
    secret, key = minisign.read_secret_key(made.secret_key), minisign.read_public_key(str(made.public_key))
    assert made.key_id == key.key_id and secret.id_bytes == key.id_bytes
    assert minisign.check(b"x", minisign.sign(b"x", secret, "c"), key, "x") == "c"
    assert generate_keys(tmp_path / "other").key_id != made.key_id
