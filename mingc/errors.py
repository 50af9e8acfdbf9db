"""The error tree of mingc. Every error says what is wrong, where, and how to fix it.

MingcError                 exit code 1
├── ConfigError            an option or recipe cannot be; exit code 2
├── CheckpointError        a tensor or file missing, misshaped, or of another model
├── ExportError            the build failed
│   ├── CaptureError       torch.export refused a stage
│   ├── CompileError       a backend refused a captured graph
│   └── ParityError        a compiled engine is further from the reference than allowed
├── ArtifactError            an artifact on disk
│   ├── ManifestError      the manifest cannot be read
│   ├── IntegrityError     a file is missing or changed
│   └── IncompatibleError  the artifact was built for something else
└── ServeError             a running server; each knows its HTTP status
    ├── RequestError       the client's fault (400 unless said otherwise)
    ├── CapacityError      no room now (503)
    └── WorkerError        a worker died or an engine failed (500)
        └── RankError      a rank of the thinker is gone or hangs (503), which ends the server; exit code 4
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

# What a machine refuses whatever the program: no space, no permission, no more files, a reader that has gone.
_OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EPIPE, errno.EIO, errno.EMFILE}
)


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
    """An option or recipe that cannot be."""

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
    """A compiled engine differs from its reference by more than the rule allows."""


class ArtifactError(MingcError):
    """An artifact on disk cannot be used."""


class ManifestError(ArtifactError):
    """A manifest is missing, is not JSON, or is of another schema."""


class IntegrityError(ArtifactError):
    """A file of the artifact is missing or does not have the recorded size or hash."""


class IncompatibleError(ArtifactError):
    """The artifact was built for another torch, target, or world size; lists every difference."""


class ServeError(MingcError):
    """Something a running server answers; `status` is its HTTP status, `code` OpenAI's error code."""

    status = 500
    error_type = "server_error"

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
        self.code = code


class RequestError(ServeError):
    """The request is wrong; the client can mend it."""

    status = 400
    error_type = "invalid_request_error"


class CapacityError(ServeError):
    """No room now; the client may try again."""

    status = 503
    error_type = "overloaded_error"


class WorkerError(ServeError):
    """A worker died or an engine failed while the request was running."""


class RankError(WorkerError):
    """A rank of the thinker has ended or hangs. No step can run any more, so the process ends with this code."""

    exit_code = 4
    status = 503  # nothing is wrong with a request: another server may answer it


def unexpected(error: Exception, words: Sequence[str]) -> MingcError:
    """What a user is told of an error that `mingc WORDS` did not foresee: a bug, unless the machine refused."""
    where = " ".join(["mingc", *words])
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        told = MingcError(
            f"{error.strerror}{'' if error.filename is None else f': {error.filename}'}",
            where=where,
            fix="free some space there, allow it to be written, or choose another place",
        )
    else:
        told = MingcError(
            f"this is a bug of mingc: {type(error).__name__}: {error}",
            where=where,
            fix="run again with --debug and report the traceback",
        )
    told.__cause__ = error
    return told
