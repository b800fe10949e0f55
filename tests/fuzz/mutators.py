"""Mutators of bytes, texts, JSON and folders; each takes a source of random choices and an honest input.

With the randomness of hypothesis a failing input shrinks to the few edits that matter; with a seeded
``random.Random`` the same mutators run for hours.
"""

from __future__ import annotations

import contextlib
import encodings.aliases
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from random import Random
from typing import Any

from tests.support.saved import HOSTILE

CANARY = "ampaudit_canary"  # a module that nothing may import
WORDS = (
    CANARY,
    f"{CANARY}.Class",
    f"__import__('{CANARY}')",
    f"[].__class__.__base__.__subclasses__() or __import__('{CANARY}')",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.no_such_op.default",
    "builtins.eval",
    "os.system",
    "../escaped",
    "..\\escaped",
    "/tmp/escaped",
    "/dev/zero",
    "",
    ".",
    "s0",
    "Symbol('s0', positive=True, integer=True)",
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "Add(" * 500,
    "NaN",
    "-0",
    "é" * 300,
    *HOSTILE,
)
_NUMBERS = (0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30)
_ENCODINGS = sorted({*encodings.aliases.aliases, *encodings.aliases.aliases.values()})
_EDITS = (1, 1, 1, 2, 4)  # one edit alone gets past more checks
_RAW = "@raw@"  # stands for text that json.dumps would not write
_RAW_TEXTS = ("1e999", "-1e999", "NaN", "9" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 300 + "1" + "}" * 300)
_AGAIN = "@again@"  # makes a key that is written a second time

Mutator = Callable[[Random, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Special:
    """Something other than a regular file: a ``link`` to a target, a ``directory`` or a ``fifo``."""

    kind: str
    target: str = ""


Files = dict[str, bytes | Special]
FolderMutator = Callable[[Random, Files], Files]


def one_of(*weighted: tuple[int, Mutator]) -> Mutator:
    """Apply one of several mutators; a greater weight is chosen more often."""
    choices = [mutator for weight, mutator in weighted for _ in range(weight)]

    def mutate(random: Random, data: bytes) -> bytes:
        return random.choice(choices)(random, data)

    return mutate


def as_bytes(random: Random, data: bytes) -> bytes:
    """Flip, truncate, splice, repeat, insert, swap or overwrite bytes."""
    made = bytearray(data)
    for _ in range(random.choice(_EDITS)):
        start = random.randint(0, len(made))
        end = min(len(made), start + random.choice((1, 2, 8, 64, 512)))
        other = random.randint(0, len(made))
        kind = random.randrange(8)
        if kind <= 1 and start < len(made):
            made[start] ^= 1 << random.randrange(8)
        elif kind == 2:
            del made[start:]
        elif kind == 3:
            del made[start:end]
        elif kind == 4:
            made[other:other] = made[start:end] * random.choice((1, 2, 100))
        elif kind == 5:
            made[start:start] = random.choice((b"\0", b"\xff" * 8, b"\0" * 4096, b"PK\x03\x04", b"\x80\x02"))
        elif kind == 6:
            made[start:end], made[other : other + end - start] = (
                made[other : other + end - start],
                made[start:end],
            )
        else:
            made[start:end] = random.choice((b"\0", b"\xff", b"\x7f")) * (end - start)
    return bytes(made)


def as_text(*snippets: str) -> Mutator:
    """Delete, repeat, move, indent and replace lines and words of a text; insert snippets."""

    def mutate(random: Random, data: bytes) -> bytes:
        lines = data.decode(errors="surrogateescape").split("\n")
        for _ in range(random.choice(_EDITS)):
            at, other = random.randrange(len(lines)), random.randrange(len(lines))
            kind = random.randrange(7)
            if kind == 0 and len(lines) > 1:
                del lines[at]
            elif kind == 1:
                lines[at:at] = [lines[other]] * random.choice((1, 2, 200))
            elif kind == 2:
                lines[at], lines[other] = lines[other], lines[at]
            elif kind == 3:
                lines[at] = (
                    random.choice(("  ", "\t", "    ")) * random.choice((1, 3, 60)) + lines[at].strip()
                )
            elif kind == 4:
                lines.insert(at, random.choice((*snippets, *WORDS)))
            elif words := lines[at].split(" "):
                place = random.randrange(len(words))
                words[place] = random.choice((*WORDS, "[" * 300, "9" * 5000, *lines[other].split()))
                lines[at] = " ".join(words)
        return "\n".join(lines).encode(errors="surrogatepass")

    return mutate


def as_encoded(random: Random, data: bytes) -> bytes:
    """Declare an encoding in the first line: any that Python knows, also those of no text."""
    name = random.choice((*_ENCODINGS, "undefined", "no-such"))
    line = random.choice(
        (f"# coding: {name}", f"# -*- coding: {name} -*-", f"#!/usr/bin/python\n# coding={name}")
    )
    return f"{line}\n".encode() + data


def as_json(random: Random, data: bytes) -> bytes:
    """Edit a JSON text in up to four places: keys, types, numbers, names, depth, repeated keys."""
    try:
        value = json.loads(data)
    except ValueError:
        return as_bytes(random, data)
    for _ in range(random.choice(_EDITS)):
        value = edit_json(random, value)
    text = json.dumps(value).replace(_AGAIN, "")
    if f'"{_RAW}"' in text:
        text = text.replace(f'"{_RAW}"', random.choice(_RAW_TEXTS), 1)
    return text.encode(errors="surrogatepass")


def edit_json(random: Random, value: Any) -> Any:
    """Make one edit at a random place of a value."""
    path = _path(random, value)
    if not path:
        return hostile_value(random, value, value)
    parent = value
    for part in path[:-1]:
        parent = parent[part]
    last = path[-1]
    kind = random.randrange(6)
    if kind == 0:
        del parent[last]
    elif kind == 1 and isinstance(parent, dict):
        parent[f"{last}{_AGAIN}"] = hostile_value(random, parent[last], value)
    elif kind == 1:
        parent[last:last] = [parent[last]] * random.choice((1, 2, 100))
    elif kind == 2 and isinstance(parent, dict):
        parent[random.choice((*WORDS, *_texts(random, value)))] = parent.pop(last)
    else:
        parent[last] = hostile_value(random, parent[last], value)
    return value


def hostile_value(random: Random, old: Any, document: Any) -> Any:
    """Return a value for the place of another: mostly of its type, so that more than its type is tested."""
    kind = random.randrange(10)
    if kind > 2 and isinstance(old, str) and old[:1] in ("[", "{"):  # JSON in JSON: a treespec, a context
        with contextlib.suppress(ValueError):
            return json.dumps(edit_json(random, json.loads(old))).replace(_AGAIN, "")
    if kind == 0:
        return random.choice((None, True, False, 0.5, 1e300, [], {}, [[]], _RAW))
    if kind == 1:
        return random.choice((str(old), [old], [old] * 50, {"a": old}))
    if kind == 2:
        return random.choice((*WORDS, *_NUMBERS))
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return random.choice((*_NUMBERS, old + 1, old - 1))
    if isinstance(old, float):
        return random.choice((*_NUMBERS, -old, old * 1e30, 5e-324))
    if isinstance(old, list) and old:
        return random.choice((old[:1], old[1:], old * 2, old[::-1]))
    if kind <= 6:
        return random.choice(_texts(random, document) or [""])
    return random.choice(WORDS)


def _path(random: Random, value: Any) -> list[Any]:
    """Walk down from the root at random; longer documents are entered, not listed."""
    path: list[Any] = []
    while isinstance(value, dict | list) and value and (not path or random.randrange(6)):
        part = random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        path.append(part)
        value = value[part]
    return path


def _texts(random: Random, value: Any) -> list[str]:
    """Collect a few texts of a document: a reference to one of them may make a cycle."""
    found: list[str] = []
    for _ in range(4):
        place = value
        for part in _path(random, value):
            place = place[part]
            found += [part] if isinstance(part, str) else []
        found += [place] if isinstance(place, str) else []
    return found


_CONFUSIONS: tuple[bytes | Special, ...] = (
    b"",
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1",
    b"PK\x05\x06" + b"\0" * 18,
    b"\x08\0\0\0\0\0\0\0{}      ",
    b"\x80\x02}q\0.",
    b"{}",
    b"[]",
    b"null",
    b"\xff\xfe{\0}\0",
    b"\0" * 100_000,
    Special("directory"),
    Special("link", "."),
    Special("link", "nowhere"),
    Special("link", "/dev/zero"),
    Special("link", "/etc/passwd"),
    Special("fifo"),
)


def folder(mutators: Mapping[str, Mutator]) -> FolderMutator:
    """Mutate the files of a folder by their names; now and then remove, swap or replace whole files."""

    def mutate(random: Random, files: Files) -> Files:
        made = dict(files)
        name = random.choice([n for n in made if any(fnmatch(n, pattern) for pattern in mutators)])
        kind = random.randrange(40)
        if kind == 0:
            made[name] = random.choice(_CONFUSIONS)
        elif kind == 1 and len(made) > 1:
            other = random.choice(sorted(made))
            made[name], made[other] = made[other], made[name]
        elif kind == 2 and len(made) > 1:
            del made[name]
        elif kind == 3:
            made[random.choice(("extra", ".hidden", "a/b/c", f"{CANARY}.py", "config.json"))] = b"{}"
        else:
            data = made[name]
            assert isinstance(data, bytes)
            chosen = next(mutator for pattern, mutator in mutators.items() if fnmatch(name, pattern))
            made[name] = chosen(random, data)
        return made

    return mutate
