"""Forms with files (`multipart/form-data`), read by python-multipart and bounded: parts, headers, values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from start_llm.core.errors import BadRequest
from start_llm.core.limits import FORM_HEADER, FORM_PARTS, FORM_VALUE

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """The values of fields by name, in their order, and the bytes of files by the name of their field."""

    values: Mapping[str, list[str]] = field(default_factory=dict)
    files: Mapping[str, list[bytes]] = field(default_factory=dict)

    def value(self, name: str) -> str | None:
        """Raises BadRequest: it is there more than once."""
        found = self.values.get(name, [])
        if len(found) > 1:
            raise BadRequest(f"{name}: this field is there {len(found)} times.", param=name, code="invalid_value")
        return found[0] if found else None

    def file(self, name: str) -> bytes:
        """Raises BadRequest: it is missing, no file, or there more than once."""
        found = self.files.get(name, [])
        if len(found) == 1:
            return found[0]
        if found:
            raise BadRequest(f"{name}: send one file, not {len(found)}.", param=name, code="invalid_value")
        if name in self.values:
            raise BadRequest(
                f"{name}: this must be a file, which its part says by a filename.", param=name, code="invalid_value"
            )
        raise BadRequest(f"{name}: this field is required.", param=name, code="missing_field")


def read_form(body: bytes, content_type: str) -> Form:
    """Raises BadRequest: it is no form, or over a limit."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise BadRequest("Content-Type: multipart/form-data needs a boundary.", param="Content-Type")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks(), max_header_size=FORM_HEADER.most)
        for begin in range(0, len(body), PIECE):
            parser.write(body[begin : begin + PIECE])
        parser.finalize()
    except (FormParserError, UnicodeError) as error:
        raise BadRequest(f"The body is no form that can be read: {str(error)[:200]}.") from None
    if not reader.ended:
        raise BadRequest("The form has no end: its last boundary is missing.")
    return Form(reader.values, reader.files)


class _Reader:
    """What the parser tells, part by part."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.files: dict[str, list[bytes]] = {}
        self.ended = False
        self._parts = 0
        self._name, self._is_file = "", False
        self._field, self._value, self._data = bytearray(), bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_headers_finished": self._headed,
            "on_part_data": self._more,
            "on_part_end": self._end,
            "on_end": self._over,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > FORM_PARTS.most:
            raise BadRequest(f"The form has more than {FORM_PARTS.most} parts.", code="limit_exceeded")
        self._headers, self._data = {}, bytearray()

    def _header(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field, self._value = bytearray(), bytearray()

    def _headed(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise BadRequest("A part of the form has no name (Content-Disposition: form-data; name=...).")
        self._name, self._is_file = options[b"name"].decode("utf-8"), b"filename" in options

    def _more(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]
        if not self._is_file and len(self._data) > FORM_VALUE.most:
            raise BadRequest(
                f"{self._name[:80]}: more than {FORM_VALUE.most:,} bytes.",
                param=self._name[:80],
                code="limit_exceeded",
            )

    def _end(self) -> None:
        if self._is_file:
            self.files.setdefault(self._name, []).append(bytes(self._data))
        else:
            self.values.setdefault(self._name, []).append(self._data.decode("utf-8"))
        self._data = bytearray()

    def _over(self) -> None:
        self.ended = True
