"""The error tree: the drawing is complete; every class has a docstring, an exit code and an HTTP status."""

from __future__ import annotations

import ast
import errno
import inspect
import re
from pathlib import Path

import pytest

import mingc.errors
from mingc.errors import ConfigError, MingcError, RankError, RequestError, ServeError, unexpected

PACKAGE = Path(mingc.errors.__file__).parent
CLASSES = [
    value for value in vars(mingc.errors).values() if inspect.isclass(value) and issubclass(value, MingcError)
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_in_the_drawing_and_has_a_docstring(kind: type[MingcError]) -> None:
    assert mingc.errors.__doc__ is not None
    assert kind.__name__ in mingc.errors.__doc__
    assert kind.__doc__
    assert kind.exit_code == (2 if issubclass(kind, ConfigError) else 4 if kind is RankError else 1)


def test_serving_errors_have_the_status_in_the_drawing() -> None:
    assert mingc.errors.__doc__ is not None
    drawn = dict(re.findall(r"── (\w+) .*\((\d{3})", mingc.errors.__doc__))
    assert drawn["RankError"] == "503", "the request is valid: a client or proxy tries another server"
    found = {kind.__name__: str(kind("x").status) for kind in CLASSES if issubclass(kind, ServeError)}
    assert {name: found[name] for name in found if name != "ServeError"} == drawn


def test_an_error_shows_message_where_and_fix() -> None:
    error = MingcError("512 tokens cannot hold 8192", where="rank 0", fix="pass more")
    assert str(error) == "512 tokens cannot hold 8192\nwhere: rank 0\nfix: pass more"
    assert error.to_json() == {
        "type": "MingcError",
        "message": "512 tokens cannot hold 8192",
        "where": "rank 0",
        "fix": "pass more",
    }
    assert str(MingcError("short")) == "short"


@pytest.mark.parametrize(
    "kind", [kind for kind in CLASSES if issubclass(kind, ServeError)], ids=lambda k: k.__name__
)
def test_serving_errors_have_an_http_status(kind: type[ServeError]) -> None:
    assert 400 <= kind("x").status < 600
    assert kind("x", status=404).status == 404
    assert (400 <= kind("x").status < 500) == issubclass(kind, RequestError)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), "Permission denied: /a/b"),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/a"),
            "this is a bug of mingc: FileNotFoundError: ",
        ),
        (KeyError("x"), "this is a bug of mingc: KeyError: 'x'"),
    ],
)
def test_faults_of_the_environment_are_not_called_bugs(error: Exception, says: str) -> None:
    described = unexpected(error, ["demo", "--force"])
    assert described.message.startswith(says) and described.where == "mingc demo --force" and described.fix
    assert described.__cause__ is error and described.exit_code == 1


def test_nothing_raises_a_bare_exception() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Raise)
                and isinstance(node.exc, ast.Call)
                and isinstance(node.exc.func, ast.Name)
            ):
                assert node.exc.func.id not in ("Exception", "BaseException", "RuntimeError"), (
                    f"{path}:{node.lineno}"
                )
