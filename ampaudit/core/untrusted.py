"""Reads and validates untrusted files before any of their fields is used."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ampaudit.core.errors import AuditError
from ampaudit.core.text import escape_control

T = TypeVar("T")

MAX_DEPTH = 100  # of nested objects and lists
# a few bytes of JSON take hundreds in memory; an exported program of 20,000 ops has a third of these
MAX_CONTAINERS = 2_000_000
MAX_VALUES = 3_000_000
MAX_TABLE = 64_000_000  # bytes of a configuration or an index
MAX_MESSAGE = 300  # characters of an error about a file
_MAX_DIGITS = 20  # of a 64-bit integer, with its sign
_MAX_NAME = 80
_MAX_PATH = 130
_UNSTATED = 1 << 20  # bytes
# without O_NONBLOCK, opening a FIFO blocks until it has a writer
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path, error: type[AuditError]) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        AuditError: The file is missing, unreadable or not a regular file; of type ``error``.
    """
    try:
        handle = os.open(path, _FLAGS)
    except (OSError, ValueError) as cause:  # a path with a null character is a ValueError
        why = getattr(cause, "strerror", None) or cause
        # Windows cannot open directories
        if os.name == "nt" and isinstance(cause, PermissionError) and path.is_dir():
            why = "a directory, not a regular file"
        raise error(f"{describe_path(path)}: {why}", hint="check the path") from cause
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        what = "a directory, not a regular file" if stat.S_ISDIR(mode) else "not a regular file"
        raise error(f"{describe_path(path)}: {what}", hint="give the path of a file")
    return handle


def read_bounded(path: Path, limit: int, error: type[AuditError]) -> bytes:
    """Read a regular file of at most ``limit`` bytes.

    Raises:
        AuditError: The file cannot be read or is larger; of type ``error``.
    """
    with os.fdopen(open_regular(path, error), "rb") as stream:
        try:
            size = os.fstat(stream.fileno()).st_size
            # read() allocates the whole limit at once; files of /proc have a size of 0
            data = stream.read(min(limit, size + _UNSTATED) + 1) if size <= limit else b""
        except OSError as cause:
            raise error(f"{describe_path(path)}: {cause.strerror or cause}", hint="check the disk") from cause
    if size > limit or len(data) > limit:
        raise error(f"{describe_path(path)}: larger than the {limit:,} bytes allowed", hint="check the file")
    return data


def parse_json(text: bytes | str, *, finite: bool = True) -> Any:
    """Parse JSON, rejecting repeated names, deep nesting, and too many values.

    NaN and infinities, which some programs write, are rejected if ``finite``.

    Raises:
        ValueError: The text is invalid; the message does not quote it.
    """
    containers, values = (_count(text, signs) for signs in ("[{", ","))
    if containers > MAX_CONTAINERS or values > MAX_VALUES:
        raise ValueError(f"more than {MAX_CONTAINERS:,} objects and lists, or {MAX_VALUES:,} values")
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_reject_constant if finite else float,
            parse_float=_finite_float if finite else float,
            parse_int=_bounded_int,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ValueError("not UTF-8 text") from error
    _check_depth(value)
    if re.search(r"\\u[dD][89a-fA-F]", text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("text with half of a surrogate pair") from error
    return value


def read_json(path: Path, limit: int, error: type[AuditError], hint: str, *, finite: bool = True) -> Any:
    """Read and parse a JSON file of at most ``limit`` bytes.

    Raises:
        AuditError: The file cannot be read or is not valid JSON; of type ``error``.
    """
    try:
        return parse_json(read_bounded(path, limit, error), finite=finite)
    except ValueError as cause:
        raise error(f"{describe_path(path)}: not valid JSON: {cause}", hint=hint) from cause


def read_table(path: Path, error: type[AuditError]) -> dict[str, Any]:
    """Read a configuration: a JSON object of at most ``MAX_TABLE`` bytes.

    Raises:
        AuditError: The file cannot be read or is not a JSON object; of type ``error``.
    """
    table = read_json(path, MAX_TABLE, error, "check the file")
    if not isinstance(table, dict):
        raise error(f"{describe_path(path)}: not a JSON object", hint="check the file")
    return table


def validate(schema: TypeAdapter[T], value: Any, path: Path, error: type[AuditError], hint: str) -> T:
    """Validate parsed JSON against a pydantic schema.

    Raises:
        AuditError: The value is invalid; of type ``error``, naming the file and the first invalid field.
    """
    try:
        return schema.validate_python(value)
    except ValidationError as cause:
        fault = cause.errors(include_url=False, include_input=False)[0]
        field = describe(".".join(str(part) for part in fault["loc"]) or "the file")
        raise error(f"{describe_path(path)}: {field}: {describe(fault['msg'])}", hint=hint) from cause


def describe(name: object, limit: int = _MAX_NAME) -> str:
    """Return an untrusted name in printable form: escaped, and shortened in the middle."""
    text = str(name)
    if len(text) > 2 * limit:  # escaping megabytes would take seconds
        text = text[:limit] + text[-limit:]
    text = escape_control(text)
    if len(text) <= limit:
        return text
    half = (limit - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


def describe_path(path: Path) -> str:
    """Return an untrusted path in printable form, short enough for a message about the file."""
    return describe(path, _MAX_PATH)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise ValueError(f"the name {describe(name)!r} occurs twice")
            names.add(name)
    return table


def _count(text: bytes | str, signs: str) -> int:
    """Count some characters, including those within strings."""
    return sum(text.count(sign) if isinstance(text, str) else text.count(sign.encode()) for sign in signs)


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("an infinite number is not a JSON number")
    return number


def _bounded_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of more than {_MAX_DIGITS} digits")
    return int(digits)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {MAX_DEPTH} deep")
