"""Errors as clients see them: OpenAI's JSON object."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from mingc.errors import MingcError, RequestError, ServeError, WorkerError, printable
from mingc.server.logs import REQUEST_ID


class ErrorObject(Struct, forbid_unknown_fields=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, forbid_unknown_fields=True):
    """OpenAI's error."""

    error: ErrorObject


def public_error(error: Exception) -> MingcError:
    """Return the error that a client may see: an error of mingc unchanged, any other without details."""
    if isinstance(error, MingcError):
        return error
    return WorkerError(
        f"Internal server error; the server log has it as request {REQUEST_ID.get()}.", code="internal_error"
    )


def error_response(error: Exception) -> ErrorResponse:
    """Convert `public_error`: its message, and for a request's error also its fix."""
    error = public_error(error)
    message, param, code, kind = error.message, None, None, "server_error"
    if isinstance(error, ServeError):
        param, code, kind = error.param, error.code, error.error_type
    if isinstance(error, RequestError):
        message = message if error.fix is None else f"{message}: {error.fix}"
        param = param or error.where  # preprocessing sets `where` to the path of the field
    shown = param if param is None else printable(param)
    return ErrorResponse(ErrorObject(message=printable(message), type=kind, param=shown, code=code))


def encode_error(error: Exception) -> bytes:
    """The JSON of `error_response`."""
    return msgspec.json.encode(error_response(error))
