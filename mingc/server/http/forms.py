"""A request's multipart form (RFC 7578): cut into parts in memory, then decoded into a struct like a JSON body.

The whole body is in memory already and charged to the budget (`body.read_body`); files are views of it. Names, types
and ranges come from the struct: a field of the type `FormFile` is a file, whether or not its part has a file name; any
other is text. A form has no null: an empty text counts as absent.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, inspect
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mingc.errors import RequestError
from mingc.server.http.field_errors import (
    invalid,
    shorten,
    too_complex,
    validation_error,
)

FORM = "multipart/form-data"
MAX_PARTS = 64
MAX_NAME = 100  # characters
MAX_TEXT_BYTES = 64 * 1024  # of one part that is no file
_MAX_HEADERS = 8  # of one part
_MAX_HEADER_BYTES = 1024
_STEP = 1 << 17  # bytes that are parsed at once, so that other threads get Python's lock
_NAME = re.compile(
    r"([^\[\]]+)(?:\[([^\[\]]*)\])?"
)  # `include[]` is an item of a list, `a[b]` a key of an object

_Form = TypeVar("_Form", bound=msgspec.Struct)

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs about every damaged byte


class FormFile:
    """A file of a form. `data` is a view of the request's body; `filename` is what the client called it, or empty."""

    __slots__ = ("data", "filename")

    def __init__(self, data: memoryview, filename: str = "") -> None:
        self.data = data
        self.filename = filename


File = Annotated[FormFile, Meta(extra_json_schema={"type": "string", "format": "binary"})]


def decode_form(raw: memoryview, content_type: str, type_: type[_Form]) -> _Form:
    """Decode the form `raw` into a struct. May be called from several threads.

    A list takes repeated parts, named with or without `[]`. An object takes parts named `field[key]`, or one of JSON.

    Raises:
        RequestError: for a broken or too complex form; for a field that is unknown, missing, given twice, of the wrong
            type or out of range.
    """
    kinds = _kinds(type_)
    fields: dict[str, Any] = {}
    for part in _Splitter.split(raw, content_type):
        match = _NAME.fullmatch(part.name)
        name, key = (part.name, None) if match is None else match.groups()
        kind = kinds.get(name, "")
        if key and kind != "object":
            name, kind = part.name, ""
        if kind in ("file", "files"):
            value: Any = FormFile(raw[part.start : part.start + part.size], part.filename)
        elif not (value := _text(raw, part)):
            continue
        if kind in ("list", "files"):
            fields.setdefault(name, []).append(value)
            continue
        where, place = fields, name
        if key:
            where, place = fields.setdefault(name, {}), key
            if not isinstance(where, dict):
                raise invalid(part.name, f"is given beside '{name}'")
        elif kind == "object" and value[0] in "{[":
            value = _decode_json(value, name)
        if place in where:
            raise invalid(part.name, "is given twice")
        where[place] = value
    try:
        return msgspec.convert(fields, type_, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), type_) from error


@functools.cache
def _kinds(type_: type[msgspec.Struct]) -> dict[str, str]:
    """How the parts of each field are read: as a `file`, the items of a `list`, `files`, an `object`, else as text."""
    described = inspect.type_info(type_)
    assert isinstance(described, inspect.StructType)
    kinds = {}
    for field in described.fields:
        union = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
        for each in union:
            each = each.type if isinstance(each, inspect.Metadata) else each
            if _is_file(each):
                kinds[field.encode_name] = "file"
            elif isinstance(each, inspect.ListType):
                kinds[field.encode_name] = "files" if _is_file(each.item_type) else "list"
            elif isinstance(each, inspect.StructType):
                kinds[field.encode_name] = "object"
            else:
                kinds.setdefault(field.encode_name, "")
    return kinds


def _is_file(type_: inspect.Type) -> bool:
    type_ = type_.type if isinstance(type_, inspect.Metadata) else type_
    return isinstance(type_, inspect.CustomType) and type_.cls is FormFile


@dataclass(slots=True)
class _Part:
    """`size` bytes of the body from `start` on."""

    name: str
    filename: str
    start: int = 0
    size: int = 0


class _Splitter:
    """Callbacks of the parser, which finds the parts of a body."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.is_ended = False
        self.offset = 0  # of the step in the body
        self._step = b""
        self._name = self._value = b""
        self._headers: dict[bytes, bytes] = {}

    @classmethod
    def split(cls, raw: memoryview, content_type: str) -> list[_Part]:
        """The parts of a body. Raises: RequestError."""
        found = cls()
        try:
            boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
            if not boundary:
                raise _broken("its Content-Type has no boundary")
            parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": found.part_begin,
                    "on_header_field": found.header_field,
                    "on_header_value": found.header_value,
                    "on_header_end": found.header_end,
                    "on_headers_finished": found.headers_finished,
                    "on_part_data": found.part_data,
                    "on_end": found.end,
                },
                max_header_count=_MAX_HEADERS,
                max_header_size=_MAX_HEADER_BYTES,
            )
            for found.offset in range(0, len(raw), _STEP):
                found._step = bytes(raw[found.offset : found.offset + _STEP])
                parser.write(found._step)
        except (FormParserError, UnicodeError) as error:
            raise _broken(str(error)) from error
        if not found.is_ended:
            raise _broken("it ends before its closing boundary")
        return found.parts

    def part_begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise too_complex(f"has more than {MAX_PARTS} parts")
        self._headers = {}
        self._name = self._value = b""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def headers_finished(self) -> None:
        # Bytes above ASCII are UTF-8; the parser of options takes Latin-1, which keeps them.
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b"").decode("latin-1"))
        if kind != b"form-data" or b"name" not in options:
            raise _broken("a part has no 'Content-Disposition: form-data; name=...'")
        name = options[b"name"].decode()
        if len(name) > MAX_NAME:
            raise too_complex(f"has a part whose name is longer than {MAX_NAME} characters")
        coding = self._headers.get(b"content-transfer-encoding", b"binary").decode("latin-1").lower()
        if coding not in ("binary", "8bit", "7bit"):
            raise invalid(
                name, f"has the Content-Transfer-Encoding {shorten(coding)}: send bytes as they are"
            )
        self.parts.append(_Part(name, options.get(b"filename", b"").decode(errors="replace")))

    def part_data(self, data: bytes, start: int, end: int) -> None:
        part = self.parts[-1]
        if not part.size:
            # Other bytes than those of this step are its predecessor's last ones, which looked like a boundary.
            part.start = self.offset + (start if data is self._step else start - end)
        part.size += end - start

    def end(self) -> None:
        self.is_ended = True


def _text(raw: memoryview, part: _Part) -> str:
    if part.size > MAX_TEXT_BYTES:
        raise RequestError(
            f"'{part.name}' is too long; the limit is {MAX_TEXT_BYTES} bytes.",
            param=part.name,
            code="string_too_long",
        )
    try:
        return str(raw[part.start : part.start + part.size], "utf-8")
    except UnicodeDecodeError as error:
        raise invalid(part.name, "is not UTF-8 text") from error


def _decode_json(text: str, name: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(
            f"'{name}' is not valid JSON: {error}.", param=name, code="invalid_json"
        ) from error


def _broken(why: str) -> RequestError:
    return RequestError(f"The request body is not a valid form: {why}.", code="invalid_form")
