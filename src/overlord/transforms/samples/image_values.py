"""What a column may hold in place of an image file: base64, a data: URL, or a path.

JSON has no bytes, so images in it are text. Bytes of an image are passed on as they are.
"""

from __future__ import annotations

import binascii
import json
import posixpath
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pyarrow as pa
from pyarrow import fs

from overlord.core.ragged import Ragged
from overlord.errors import ReaderError, SpecError, shortened
from overlord.job.specs import Source
from overlord.storage import filesystem_of
from overlord.transforms.samples.per_sample import Bools, Fault, Int64s, MediaFault, row_memory

_HEAD = 16
_SPACES = b" \t\r\n"
_TEXT = bytes(range(32, 127)) + _SPACES
_PATH_BYTES = 4096
"""No path is longer."""
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BASE64_HEADS = (b"/9j/", b"iVBORw0KGgo", b"R0lGOD", b"UklGR", b"Qk", b"SUkqA", b"TU0AK", b"AAAA")
"""How the base64 of a JPEG, PNG, GIF, WEBP, BMP, TIFF (both byte orders) and AVIF begins."""
_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.25


def is_text(data: bytes | memoryview) -> bool:
    """Whether a value is text that stands for an image, not the bytes of an image.

    Example:
        >>> is_text(b"iVBORw0KGgoAAAAN"), is_text(bytes([137]) + b"PNG"), is_text(b"coco/1.jpg")
        (True, False, True)
    """
    head = bytes(data[:_HEAD])
    if head[:6] in (b"GIF87a", b"GIF89a") or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return False
    return bool(head) and not head.translate(None, _TEXT)


@dataclass(frozen=True, slots=True)
class ImageValues:
    """Finds the bytes of images that are given as text."""

    folder: str | None = None
    """Folder or URL that paths are taken from; None where paths are not read."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source) -> ImageValues:
        """Return what finds the images of a source; options of its storage do not hold for a folder of this host."""
        folder = getattr(source.sample, "folder", None)
        return cls(folder, source.storage_options if "://" in (folder or "") else {})

    def check(self) -> None:
        """Refuse a folder that does not exist.

        Raises:
            SpecError: There is none, or its storage is unknown.
        """
        if self.folder is None:
            return
        filesystem, path, _ = filesystem_of(self.folder, self.storage_options)
        if filesystem.get_file_info(path.rstrip("/")).type != fs.FileType.Directory:
            raise SpecError(
                f"sample.folder: {self.folder!r} is no folder; every image that is given by its path would be a bad "
                "sample. Correct the path, or leave it out where images are not given by paths."
            )

    def find(self, value: bytes | memoryview) -> bytes | memoryview:
        r"""Return the encoded image that a value stands for.

        Raises:
            MediaFault: The value stands for none, or its file does not exist.
            ReaderError: The file cannot be read: it would change the stream to go on without it.

        Example:
            >>> ImageValues().find(b"data:image/png;base64,iVBO")
            b'\x89PN'
        """
        if not is_text(value):
            return value
        text = bytes(value).strip()
        if text[:5].lower() == b"data:":
            head, comma, data = text.partition(b",")
            if not comma:
                raise MediaFault("the data: URL has no comma, and so no data")
            return from_base64(data) if head.lower().endswith(b";base64") else unquote_to_bytes(data)
        if text[:7].lower() == b"http://" or text[:8].lower() == b"https://":
            raise MediaFault(f"images are not downloaded ({_shown(text)}); store the file, and give its path")
        may_be_path = len(text) < _PATH_BYTES
        if self.folder is not None and may_be_path and not text.startswith(_BASE64_HEADS):
            return self._read(text)
        try:
            return from_base64(text)
        except MediaFault as fault:
            if not may_be_path:
                raise
            if self.folder is None:
                raise MediaFault(
                    f"{_shown(text)} is neither base64 nor a data: URL; for paths, set folder= of the sample"
                ) from fault
        return self._read(text)

    def find_all(self, images: Ragged, bad: Bools) -> tuple[Ragged, list[Fault]]:
        """Return the encoded images that values stand for, and (row, reason) of those that stand for none.

        These are empty and marked bad. Where no value is text, the same rows are returned, not copied.
        """
        texts = [row for row in np.flatnonzero(~bad).tolist() if is_text(row_memory(images, row))]
        if not texts:
            return images, []
        found: list[Any] = [images[row] for row in range(len(images))]
        faults: list[Fault] = []
        for row in texts:
            try:
                found[row] = np.frombuffer(self.find(row_memory(images, row)), np.uint8)
            except MediaFault as fault:
                found[row] = np.empty(0, np.uint8)
                faults.append((row, str(fault)))
                bad[row] = True
        return Ragged.from_rows(found), faults

    def _read(self, text: bytes) -> bytes:
        assert self.folder is not None
        try:
            name = posixpath.normpath(text.decode())
        except UnicodeDecodeError as error:
            raise MediaFault("the path is not valid UTF-8") from error
        if name.startswith(("/", "..")) or "\0" in name:
            raise MediaFault(f"the path {_shown(text)} leads out of the folder of the images, {self.folder}")
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                filesystem, folder, _ = filesystem_of(self.folder, self.storage_options)
                with filesystem.open_input_file(posixpath.join(folder, name)) as file:
                    return file.read()
            except FileNotFoundError as error:  # the answer of a store that was reached
                raise MediaFault(f"there is no file {_shown(text)} in {self.folder}") from error
            except (OSError, pa.ArrowException) as error:
                if attempt == _ATTEMPTS:
                    raise ReaderError(
                        f"the image {name!r} in {self.folder} cannot be read: {shortened(error)}; "
                        "going on without it would change the stream. Restore the file or the connection to it, and "
                        "start again from the last checkpoint."
                    ) from error
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")


def from_base64(text: bytes) -> bytes:
    r"""Return what base64 stands for: either alphabet, with or without padding, broken into lines or not.

    Raises:
        MediaFault: It is no base64.

    Example:
        >>> from_base64(b"_9j\n_"), from_base64(b"/9j/4A==")
        (b'\xff\xd8\xff', b'\xff\xd8\xff\xe0')
    """
    plain = text.translate(_URL_SAFE, _SPACES).rstrip(b"=")
    try:
        return binascii.a2b_base64(plain + b"=" * (-len(plain) % 4), strict_mode=True)
    except binascii.Error as error:
        raise MediaFault(f"the text is no base64 ({error})") from error


def listed_images(column: Ragged) -> tuple[Ragged, Int64s]:
    """Return the images of a column one by one, and how many each row has.

    A row is one image, or a JSON list of texts that stand for images; an empty one has none.

    Example:
        >>> items, counts = listed_images(Ragged.from_rows([b'["a.jpg","b.jpg"]', b"c.jpg", b"[]", b""]))
        >>> [bytes(items[row]) for row in range(3)], counts.tolist()
        ([b'a.jpg', b'b.jpg', b'c.jpg'], [2, 1, 0, 0])
    """
    filled = np.flatnonzero(column.lengths)
    lists = set(filled[column.values[column.offsets[filled]] == ord("[")].tolist())
    counts = (column.lengths > 0).astype(np.int64)
    if not lists:
        return Ragged(column.values, np.append(column.offsets[filled], column.offsets[-1])), counts
    items: list[Any] = []
    for row in filled.tolist():
        found = _json_list(bytes(column[row])) if row in lists else [column[row]]
        items += found
        counts[row] = len(found)
    return Ragged.from_rows(items), counts


def _json_list(text: bytes) -> list[bytes]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return [text]  # it is no image either, and so a bad one
    return [text_of(one).encode("utf-8", "replace") for one in found]


def text_of(value: Any) -> str:
    """Return the text of a value in JSON that stands for an image: itself, or a field of what wraps it.

    Hugging Face datasets write {"bytes": .., "path": ..}, OpenAI {"url": ..}, Anthropic {"data": ..}. What is no text
    becomes "", which is no image.

    Example:
        >>> text_of({"bytes": None, "path": "a.jpg"}), text_of("b.jpg"), text_of(7)
        ('a.jpg', 'b.jpg', '')
    """
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "data", "url", "path") if value.get(key)), None)
    return value if isinstance(value, str) else ""


def _shown(text: bytes) -> str:
    return repr(text[:80].decode("utf-8", "replace"))
