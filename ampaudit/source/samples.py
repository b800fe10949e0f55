"""Provides text, images and sound for processors: from the user's files, or built in."""

from __future__ import annotations

import importlib.util
import wave
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import describe_path, parse_json, read_bounded

__all__ = ["SampleSet", "images", "sounds", "texts"]

Array = np.ndarray[Any, Any]
_MAX_TEXT = 64_000_000  # bytes
_MAX_PIXELS = 1 << 26
_MAX_SECONDS = 60
_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_SOUNDS = (".aiff", ".flac", ".mp3", ".ogg", ".wav")
_SENTENCES = (
    "The kettle was still warm when she came back from the garden.",
    "How do I convert a list of strings into numbers without a loop?",
    "Rain is expected in the north on Tuesday, with strong winds along the coast; the ferries may stop.",
    "Our invoice 4071 of 12 March, over 1,250.00 euros, has not been paid.",
    "I would not buy this camera again: the menu is slow, and the battery lasts two hours at most.",
    "A river carries sand to the sea, and the sea carries it back to the beach.",
    "No.",
    "In the second experiment the temperature rose by 0.3 degrees, which is within the error of measurement.",
    "def area(width, height): return width * height",
    "Where the road forks, keep left, cross the old bridge, and ask for Marta at the mill.",
    "WARNING!!! The file could not be read (error 13: permission denied).",
    "Seven small boats left the harbor at dawn; by noon six of them had come home again.",
)


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Samples of one kind, in order.

    Attributes:
        items: texts, lists of chat messages, pictures, or mono sounds.
        total: their number; ``None`` if they are built in, and endless.
        name: of the file or directory.
    """

    items: Iterable[Any]
    total: int | None = None
    name: str = ""


def texts(path: Path | None) -> SampleSet:
    """Return the samples of a text file, or sentences.

    A ``.jsonl`` file has an object per line, with ``text`` or chat ``messages``. The samples of other files
    are the paragraphs that blank lines separate, or else the lines.

    Raises:
        InputError: not UTF-8 text, without samples, or a line of JSON has neither.
    """
    if path is None:
        return SampleSet(_sentences())
    try:
        text = read_bounded(path, _MAX_TEXT, InputError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{describe_path(path)}: not UTF-8 text", hint="convert it to UTF-8") from error
    lines = [line.strip() for line in text.strip().splitlines()]
    found: list[Any] = [line for line in lines if line]
    if path.suffix.lower() == ".jsonl":
        found = [_parsed(path, number, line) for number, line in enumerate(lines, 1) if line]
    elif len(found) < len(lines):
        found = [part.replace("\n", " ").strip() for part in "\n".join(lines).split("\n\n") if part.strip()]
    if not found:
        raise InputError(f"{describe_path(path)}: no text in it", hint="write one sample per line")
    return SampleSet(found, len(found), path.name)


def images(path: Path | None) -> SampleSet:
    """Return a directory's images in order of their names, or drawn ones.

    Raises:
        InputError: it holds none, or Pillow is missing; later, if one cannot be decoded.
    """
    if path is None:
        return SampleSet(_drawings())
    files = _files(path, _IMAGES, "images")
    if importlib.util.find_spec("PIL") is None:
        raise InputError("--images needs Pillow", hint="pip install pillow")
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = _MAX_PIXELS

    def decoded(file: Path) -> Any:
        with Image.open(file) as image:
            return image.convert("RGB")

    return SampleSet(_decoded(files, decoded), len(files), path.name)


def sounds(path: Path | None, rate: int) -> SampleSet:
    """Return a directory's recordings in order of their names, or tones, as mono samples of a rate.

    Raises:
        InputError: it holds none; later, if one cannot be decoded.
    """
    if path is None:
        return SampleSet(_tones(rate))
    files = _files(path, _SOUNDS, "recordings")

    def decoded(file: Path) -> Array:
        wave_, own = _read_wave(file) if file.suffix.lower() == ".wav" else _read_sound(file)
        mono = wave_.mean(axis=1)[: _MAX_SECONDS * own]
        times = np.arange(int(len(mono) * rate / own)) / rate
        resampled: Array = np.interp(times, np.arange(len(mono)) / own, mono).astype(np.float32)
        return resampled

    return SampleSet(_decoded(files, decoded), len(files), path.name)


def _files(path: Path, suffixes: tuple[str, ...], what: str) -> list[Path]:
    try:
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes and file.is_file())
    except OSError as error:
        raise InputError(f"{describe_path(path)}: {error.strerror}", hint="give a directory") from error
    if not files:
        raise InputError(f"{describe_path(path)}: no {what} in it", hint=f"they end in {', '.join(suffixes)}")
    return files


def _decoded(files: Iterable[Path], decode: Callable[[Path], Any]) -> Iterator[Any]:
    for file in files:
        try:
            yield decode(file)
        except InputError:
            raise
        except Exception as error:
            why = f"{describe_path(file)}: cannot be decoded: {error}"
            raise InputError(why, hint="convert the file, or move it elsewhere") from error


def _read_wave(file: Path) -> tuple[Array, int]:
    """Read integer PCM with the standard library, and anything else with soundfile."""
    try:
        with wave.open(str(file)) as stream:
            width, channels, rate = stream.getsampwidth(), stream.getnchannels(), stream.getframerate()
            raw = np.frombuffer(stream.readframes(min(stream.getnframes(), _MAX_SECONDS * rate)), np.uint8)
    except wave.Error:
        return _read_sound(file)
    if width == 1:
        values = raw.astype(np.float32) / 128 - 1
    else:  # little-endian, into the upper bytes of an int32
        wide = np.zeros((raw.size // width, 4), np.uint8)
        wide[:, 4 - width :] = raw[: raw.size // width * width].reshape(-1, width)
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return values.reshape(-1, channels), rate


def _read_sound(file: Path) -> tuple[Array, int]:
    if importlib.util.find_spec("soundfile") is None:
        hint = "pip install soundfile, or convert it to PCM .wav"
        raise InputError(f"{describe_path(file)}: needs the soundfile package", hint=hint)
    import soundfile

    with soundfile.SoundFile(file) as stream:
        rate = int(stream.samplerate)
        return stream.read(_MAX_SECONDS * rate, dtype="float32", always_2d=True), rate


def _parsed(path: Path, number: int, line: str) -> Any:
    where, hint = f"{describe_path(path)}:{number}", 'write {"text": "..."} or {"messages": [...]} per line'
    try:
        found = parse_json(line)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}", hint=hint) from error
    if isinstance(found, dict):
        found = found.get("messages", found.get("text"))
    chat = isinstance(found, list) and found and all(isinstance(m, dict) and "role" in m for m in found)
    if not chat and not isinstance(found, str):
        raise InputError(f"{where}: neither text nor messages", hint=hint)
    return found


def _sentences() -> Iterator[str]:
    """Yield sentences of different kinds and lengths, then pairs of them."""
    yield from _SENTENCES
    for index in count():
        second, first = divmod(index, len(_SENTENCES))
        yield f"{_SENTENCES[first]} {_SENTENCES[(first + second + 1) % len(_SENTENCES)]}"


def _drawings() -> Iterator[Array]:
    """Yield pictures of a bright disk before a colored gradient, with some noise."""
    for index in count():
        random = np.random.default_rng(index)
        y, x = np.mgrid[0:240, 0:320] / 240
        tint, middle = random.uniform(0.2, 1, 3), random.uniform(0.3, 0.8, 2)
        disk = ((x - middle[0]) ** 2 + (y - middle[1]) ** 2 < 0.04)[..., None]
        picture = np.where(disk, 0.95, (x[..., None] + y[..., None]) / 2.4 * tint)
        picture = picture + random.normal(0, 0.03, picture.shape)
        yield (picture.clip(0, 1) * 255).astype(np.uint8)


def _tones(rate: int) -> Iterator[Array]:
    """Yield two seconds of a voice-like tone: syllables of a few harmonics over faint noise."""
    for index in count():
        random, t = np.random.default_rng(index), np.arange(2 * rate) / rate
        pitch = random.uniform(100, 240) * (1 + 0.05 * np.sin(2 * np.pi * 3 * t))
        phase = 2 * np.pi * np.cumsum(pitch) / rate
        tone = sum(np.sin(k * phase) / k for k in range(1, 8))
        syllables = np.clip(np.sin(2 * np.pi * 2.5 * t + index), 0, 1)
        yield (0.15 * tone * syllables + random.normal(0, 0.003, t.shape)).astype(np.float32)
