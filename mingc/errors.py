"""The error tree of mingc. Every error says what is wrong, where, and how to fix it.

MingcError                 exit code 1
├── ConfigError            an invalid option or recipe; exit code 2
├── CheckpointError        a tensor or file is missing, misshaped, or of another model
├── ExportError            the build failed
│   ├── CaptureError       torch.export refused a stage
│   ├── CompileError       a backend refused a captured graph
│   └── ParityError        a compiled engine differs too much from the reference
├── ArtifactError          an artifact on disk
│   ├── ManifestError      the manifest cannot be read
│   ├── IntegrityError     a file is missing or changed
│   ├── SignatureError     a signature is missing, or not made over these files by this key
│   └── IncompatibleError  the artifact was built for something else
├── BenchError             a server cannot be measured
└── ServeError             a running server; each has an HTTP status
    ├── RequestError       a fault of the client (400 by default)
    ├── CapacityError      no capacity at present (503)
    └── WorkerError        a worker died or an engine failed (500)
        ├── EngineSizeError  an input is larger than every engine (500 unless the caller blames the request)
        └── RankError      a thinker rank ended or hangs (503); ends the server with exit code 4
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

# Faults of the environment, not of the program: no space, no permission, too many files, a closed pipe.
_ENVIRONMENT_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EPIPE, errno.EIO, errno.EMFILE}
)


def printable(text: str) -> str:
    """Escape every unprintable character of `text` except line breaks.

    These are control characters, which terminals interpret, text-direction marks, and unusual separators.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


class MingcError(Exception):
    """Base of every error a user may see.

    Args:
        message: what is wrong, with the value shown.
        where: stage, tensor, rank, file or option it was found at.
        fix: what the user can do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"where: {self.where}")
        if self.fix:
            lines.append(f"fix: {self.fix}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, str | None]:
        """The error as the object that `--json` prints under the key `error`."""
        return {"type": type(self).__name__, "message": self.message, "where": self.where, "fix": self.fix}


class ConfigError(MingcError):
    """An invalid option or recipe."""

    exit_code = 2


class CheckpointError(MingcError):
    """A checkpoint file or tensor that is missing, misshaped, or of another model."""


class ExportError(MingcError):
    """The build of an artifact failed."""


class CaptureError(ExportError):
    """`torch.export` could not trace a graph with the dims of its spec."""


class CompileError(ExportError):
    """A backend could not compile a captured graph."""


class ParityError(ExportError):
    """A compiled engine differs from its reference by more than the tolerance."""


class ArtifactError(MingcError):
    """An artifact on disk cannot be used."""


class ManifestError(ArtifactError):
    """A manifest is missing, is not JSON, or is of another schema."""


class IntegrityError(ArtifactError):
    """A file of the artifact is missing or does not have the recorded size or hash."""


class SignatureError(ArtifactError):
    """A signature is missing, cannot be read, or was not made over this content by the given key."""


class IncompatibleError(ArtifactError):
    """The artifact was built for another torch, target, or world size; lists every difference."""


class BenchError(MingcError):
    """A server cannot be measured."""


class ServeError(MingcError):
    """An error response of a running server; `status` is its HTTP status, `code` OpenAI's error code."""

    status = 500
    error_type = "server_error"
    default_code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        fix: str | None = None,
        status: int | None = None,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, where=where, fix=fix)
        if status is not None:
            self.status = status
        self.param = param
        self.code = code or self.default_code
        self.headers: dict[str, str] = {}  # of the response


class RequestError(ServeError):
    """The request is invalid; the client can correct it."""

    status = 400
    error_type = "invalid_request_error"
    default_code = "invalid_value"


class CapacityError(ServeError):
    """No capacity at the moment; the client may try again."""

    status = 503
    error_type = "overloaded_error"


class WorkerError(ServeError):
    """A worker died or an engine failed while the request was running."""


class EngineSizeError(WorkerError):
    """An input is larger than the largest bucket that engines were compiled for."""


class RankError(WorkerError):
    """A thinker rank ended or hangs. No further step can run, so the process ends with this exit code."""

    exit_code = 4
    status = 503  # the request is valid: another server may answer it


def described(error: BaseException) -> str:
    """The kind of an error of a library and what it says, which may be nothing."""
    return f"{type(error).__name__}: {error}".strip(": \n")


def unexpected(error: Exception, words: Sequence[str]) -> MingcError:
    """Describe an unforeseen error of the command `mingc WORDS`: a fault of the environment, or else a bug."""
    where = " ".join(["mingc", *words])
    if isinstance(error, OSError) and error.errno in _ENVIRONMENT_ERRORS:
        described = MingcError(
            f"{error.strerror}{'' if error.filename is None else f': {error.filename}'}",
            where=where,
            fix="free some space there, allow it to be written, or choose another place",
        )
    else:
        described = MingcError(
            f"this is a bug of mingc: {type(error).__name__}: {error}",
            where=where,
            fix="run again with --debug and report the traceback",
        )
    described.__cause__ = error
    return described
