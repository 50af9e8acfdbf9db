"""Ed25519 signatures in the format of minisign (https://jedisct1.github.io/minisign/), prehashed with BLAKE2b.

Keys and signatures may be used with the program `minisign` as well. A secret key may be protected by a password;
minisign derives the key with scrypt, for which it takes 1 GiB of memory and some seconds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingc.errors import ConfigError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PASSWORD_VARIABLE = "MINGC_SIGN_PASSWORD"
_UNTRUSTED, _TRUSTED = "untrusted comment: ", "trusted comment: "
_PREHASHED, _KEY = b"ED", b"Ed"
_SECRET = struct.Struct("<2s2s2s32sQQ104s")
_MAX_SCRYPT_BYTES = (2 << 30) - 1


@dataclass(frozen=True, slots=True)
class PublicKey:
    """minisign shows `key_id` as the name of the key; it proves nothing."""

    id_bytes: bytes
    key: Ed25519PublicKey

    @property
    def key_id(self) -> str:
        return f"{int.from_bytes(self.id_bytes, 'little'):016X}"


@dataclass(frozen=True, slots=True)
class SecretKey:
    id_bytes: bytes
    key: Ed25519PrivateKey


def read_public_key(given: str) -> PublicKey:
    """Read the key from the file `given`, or from the 56 characters that minisign prints. Raises: ConfigError."""
    ed25519 = _ed25519()
    path = Path(given)
    try:
        text = path.read_text("ascii").strip() if path.is_file() else given.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_key(given, f"the key cannot be read: {error}") from error
    raw = _decode(text.splitlines()[-1] if text else "")
    if raw is None or len(raw) != 42 or raw[:2] != _KEY:
        raise _bad_key(given, f"{given or repr(given)} is not a minisign public key")
    return PublicKey(raw[2:10], ed25519.Ed25519PublicKey.from_public_bytes(raw[10:]))


def read_secret_key(path: Path) -> SecretKey:
    """Raises: ConfigError when the file is not a secret key, or its password is missing or wrong."""
    ed25519 = _ed25519()
    try:
        lines = path.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_key(str(path), f"the secret key cannot be read: {error}") from error
    raw = _decode(lines[1] if len(lines) > 1 else "")
    if raw is None or len(raw) != _SECRET.size:
        raise _bad_key(str(path), f"{path} is not a minisign secret key")
    algorithm, kdf, checksum, salt, operations, memory, content = _SECRET.unpack(raw)
    if algorithm != _KEY or kdf not in (b"Sc", b"\0\0") or checksum != b"B2":
        raise _bad_key(str(path), f"{path} is a secret key of another kind than Ed25519 with BLAKE2b")
    if kdf == b"Sc":
        mask = _scrypt(path, salt, operations, memory)
        content = bytes(a ^ b for a, b in zip(content, mask, strict=True))
    id_bytes, seed, public, check = content[:8], content[8:40], content[40:72], content[72:]
    expected = hashlib.blake2b(algorithm + id_bytes + seed + public, digest_size=32).digest()
    is_unchecked = kdf == b"\0\0" and check == bytes(32)  # minisign -W records no checksum
    if check != expected and not is_unchecked:
        raise ConfigError(
            "the password is wrong, or the secret key is damaged",
            where=str(path),
            fix=f"set {PASSWORD_VARIABLE} to the key's password",
        )
    return SecretKey(id_bytes, ed25519.Ed25519PrivateKey.from_private_bytes(seed))


def new_keys(secret: Path, public: Path) -> str:
    """Write a new pair of keys, the secret one without a password; returns the key id. Raises: ConfigError."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = _ed25519().Ed25519PrivateKey.generate()
    seed = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    id_bytes = secrets.token_bytes(8)
    check = hashlib.blake2b(_KEY + id_bytes + seed + raw, digest_size=32).digest()
    content = _SECRET.pack(_KEY, b"\0\0", b"B2", bytes(32), 0, 0, id_bytes + seed + raw + check)
    key_id = PublicKey(id_bytes, key.public_key()).key_id
    if os.path.lexists(public):  # otherwise a secret key without its public key would remain
        raise ConfigError(
            f"{public} exists", where=str(secret), fix="pass a path where no key is yet, or move it away"
        )
    try:
        for path, comment, value, mode in (
            (secret, "minisign encrypted secret key", content, 0o600),
            (public, f"minisign public key {key_id}", _KEY + id_bytes + raw, 0o644),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as stream:
                stream.write(f"{_UNTRUSTED}{comment}\n{_encode(value)}\n")
    except OSError as error:
        raise ConfigError(
            f"the keys cannot be written: {error}", where=str(secret), fix="pass a path where no key is yet"
        ) from error
    return key_id


def sign(content: bytes, key: SecretKey, comment: str) -> bytes:
    """Make the signature file of `content`. The signature covers `comment`, one line, as well."""
    signature = key.key.sign(hashlib.blake2b(content).digest())
    whole = key.key.sign(signature + comment.encode())
    lines = (
        f"{_UNTRUSTED}signature from mingc, check with minisign or mingc bundle verify-signature",
        _encode(_PREHASHED + key.id_bytes + signature),
        f"{_TRUSTED}{comment}",
        _encode(whole),
    )
    return ("\n".join(lines) + "\n").encode()


def check(content: bytes, signature: bytes, key: PublicKey, where: str) -> str:
    """Check a signature. Returns its trusted comment. Raises: SignatureError."""
    from cryptography.exceptions import InvalidSignature

    fix = "get the bundle and the public key again from where they were published"
    try:
        lines = signature.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        lines = []
    raw = _decode(lines[1]) if len(lines) == 5 and not lines[4] else None
    whole = _decode(lines[3]) if raw is not None else None
    if (
        raw is None
        or whole is None
        or (len(raw), len(whole)) != (74, 64)
        or raw[:2] != _PREHASHED
        or not (lines[0].startswith(_UNTRUSTED) and lines[2].startswith(_TRUSTED))
    ):
        raise SignatureError("the signature is not in minisign's format", where=where, fix=fix)
    id_bytes, made = raw[2:10], raw[10:]
    if id_bytes != key.id_bytes:
        other = PublicKey(id_bytes, key.key).key_id
        raise SignatureError(
            f"signed with the key {other}, the given one is {key.key_id}", where=where, fix=fix
        )
    comment = lines[2].removeprefix(_TRUSTED)
    try:
        key.key.verify(made, hashlib.blake2b(content).digest())
    except InvalidSignature:
        raise SignatureError(
            "the signature does not fit the content of bundle.json", where=where, fix=fix
        ) from None
    try:
        key.key.verify(whole, made + comment.encode())
    except InvalidSignature:
        raise SignatureError("the signature does not fit its trusted comment", where=where, fix=fix) from None
    return comment


def _scrypt(path: Path, salt: bytes, operations: int, memory: int) -> bytes:
    password = os.environ.get(PASSWORD_VARIABLE)
    if password is None:
        raise ConfigError(
            "the secret key has a password", where=str(path), fix=f"set {PASSWORD_VARIABLE} to it"
        )
    # libsodium chooses parameters like this (crypto_pwhash_scryptsalsa208sha256); r is 8.
    operations = max(operations, 32768)
    if operations < memory // 32:
        n = 1 << max(1, (operations // 32).bit_length() - 1)
        p = 1
    else:
        n = 1 << max(1, (memory // 1024).bit_length() - 1)
        p = max(1, min(operations // 4 // n, 0x3FFFFFFF) // 8)
    if 128 * 8 * n > _MAX_SCRYPT_BYTES:
        raise _bad_key(str(path), f"the key of {path} needs more than 2 GiB of memory to be opened")
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=8, p=p, maxmem=_MAX_SCRYPT_BYTES, dklen=104)


def _ed25519() -> Any:
    """Import the module of an optional library. Raises: ConfigError."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError(
            "signatures need the library cryptography, which is not installed",
            where="python environment",
            fix="pip install 'mingc[sign]'",
        ) from None
    return ed25519


def _bad_key(where: str, problem: str) -> ConfigError:
    return ConfigError(
        problem,
        where=where or "the public key",
        fix="pass a key that mingc bundle keygen or minisign -G wrote, or that minisign printed",
    )


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _decode(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True) if text.isascii() else None
    except binascii.Error:
        return None
