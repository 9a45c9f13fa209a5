"""From paths, globs, folders and URLs to the files of a source."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import pyarrow as pa
from pyarrow import fs

from overlord.errors import SourceError
from overlord.readers.filesystems import SUFFIXES, StoredFile, format_of_name, is_data_file
from overlord.storage import StorageOptions, filesystem_of

_WILDCARD = re.compile(r"[*?\[]")
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
"""Common table formats that no reader supports."""


def list_files(
    paths: Sequence[str], storage_options: StorageOptions | None = None, *, format: str | None = None
) -> list[StoredFile]:
    """Return the files that the paths name, sorted by path, each once, empty ones left out.

    A path is a file, a glob (`*`, `?`, `[..]` inside a folder, `**` across folders) or a folder, which
    stands for the data files in it at any depth; names that start with '.' or '_' are not data. It is
    local or begins with file://, s3://, gs:// or hdfs://.

    Args:
        paths: What to list.
        storage_options: How to reach a remote store (`endpoint_override`, `region`, ...).
        format: Take only files of this format from a folder.

    Raises:
        SpecError: A scheme or a storage option is unknown.
        SourceError: A path matches nothing, or all files are empty.
    """
    found: dict[str, StoredFile] = {}
    for path in paths:
        matches, beside = _list_one(path, storage_options or {}, format)
        if not matches:
            raise _no_file(path, beside, format)
        found.update((file.path, file) for file in matches)
    if not found:
        raise SourceError("the source names no path; it would have no samples. Give at least one path.")
    # The same file may be listed twice, by a relative and by an absolute path.
    unique = {(file.filesystem.type_name, file.location): file for file in found.values()}
    files = [unique[key] for key in unique if unique[key].size > 0]
    if not files:
        raise SourceError(
            f"all {len(unique)} files of {', '.join(map(repr, paths))} are empty; the source would have no "
            "samples. Write them again, or leave the source out."
        )
    return sorted(files, key=lambda file: file.path)


def _no_file(path: str, beside: Sequence[str], format: str | None) -> SourceError:
    """Return the error for a path without matching files; `beside` are files there that do not match."""
    if not beside:
        return SourceError(
            f"{path!r} matches no file; the source would have no samples. "
            "Check the spelling and that this host can see it."
        )
    names = [name.rsplit("/", 1)[-1] for name in beside]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    count = f"{len(names)} file{'' if len(names) == 1 else 's'}"
    if _WILDCARD.search(path):
        return SourceError(
            f"{path!r} matches no file, though there {'is' if len(names) == 1 else 'are'} {count} there ({shown}); the "
            "source would have no samples. Check the pattern."
        )
    known = {format_of_name(name) for name in names} - {None}
    if format is not None and known:
        return SourceError(
            f"{path!r} holds {count} ({shown}), and by their names none is of format {format!r}; the source would have "
            f"no samples. Set format to {' or '.join(map(repr, sorted(map(str, known))))}, or leave it out."
        )
    tables = " CSV and TSV are not read: write them as Parquet, for instance with pandas."
    return SourceError(
        f"{path!r} holds {count} ({shown}), and their names end like no format that is read "
        f"({', '.join(end for ends in SUFFIXES.values() for end in ends[:1])}, ..); the source would have no samples."
        f"{tables if any(name.lower().endswith(_TABLES) for name in names) else ''} Convert the files, or set format "
        "if only their names differ."
    )


def _list_one(path: str, options: StorageOptions, format: str | None) -> tuple[list[StoredFile], list[str]]:
    """Return the files of one path, and the names of all files found there."""
    filesystem, location, prefix = filesystem_of(path, options)
    location = location.rstrip("/") or "/"
    try:
        info = filesystem.get_file_info(location)
        if info.type is fs.FileType.NotFound and _WILDCARD.search(location):
            infos, others = _glob(filesystem, location)
        elif info.type is fs.FileType.Directory:
            infos, others = _walk_folder(filesystem, location, format)
        else:
            infos, others = [info] if info.type is fs.FileType.File else [], []
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:160]
        raise SourceError(
            f"cannot list {path!r}: {reason}; its files cannot be known. Check the path and the permission to read it."
        ) from error
    # A relative path of the user is shown as a relative one.
    relative = "://" not in path and not os.path.isabs(os.path.expanduser(path))
    here = os.getcwd()
    files = [
        StoredFile(
            path=os.path.relpath(i.path, here) if relative else prefix + i.path,
            size=int(i.size or 0),
            mtime_ns=int(i.mtime_ns or 0),
            filesystem=filesystem,
            location=i.path,
        )
        for i in infos
    ]
    return files, [i.path for i in others]


_Infos = list[fs.FileInfo]


def _walk_folder(filesystem: fs.FileSystem, folder: str, format: str | None) -> tuple[_Infos, _Infos]:
    infos: list[fs.FileInfo] = []
    for info in filesystem.get_file_info(fs.FileSelector(folder, recursive=True)):
        inside = info.path[len(folder) :].strip("/").split("/")
        if info.type is fs.FileType.File and not any(part.startswith((".", "_")) for part in inside):
            infos.append(info)
    data = [i for i in infos if is_data_file(i.path) and format in (None, format_of_name(i.path))]
    if data or format is None:
        return data, infos
    return [i for i in infos if format_of_name(i.path) is None and not i.path.lower().endswith(_TABLES)], infos


def _glob(filesystem: fs.FileSystem, pattern: str) -> tuple[_Infos, _Infos]:
    parts = pattern.split("/")
    first = next(n for n, part in enumerate(parts) if _WILDCARD.search(part))
    base = "/".join(parts[:first]) or ("/" if pattern.startswith("/") else "")
    deep = first + 1 < len(parts) or "**" in parts[first]
    selector = fs.FileSelector(base, recursive=deep, allow_not_found=True)
    matches = glob_regex(pattern).fullmatch
    found = [i for i in filesystem.get_file_info(selector) if i.type is fs.FileType.File]
    return [i for i in found if matches(i.path)], found


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a glob: `*` stays inside a folder, `**` crosses folders.

    Example:
        >>> bool(glob_regex("a/**/*.tar").fullmatch("a/b/c/1.tar"))
        True
        >>> bool(glob_regex("a/*.tar").fullmatch("a/b/1.tar"))
        False
    """
    out = ""
    at = 0
    while at < len(pattern):
        starts_name = at == 0 or pattern[at - 1] == "/"
        if pattern.startswith("**/", at) and starts_name:
            out, at = out + r"(?:(?!\.)[^/]+/)*", at + 3
            continue
        if pattern.startswith("**", at):
            out, at = out + ".*", at + 2
            continue
        char = pattern[at]
        if char in "*?[" and starts_name:
            out += r"(?!\.)"  # as in a shell, a wildcard does not match hidden names
        close = pattern.find("]", at + 2) if char == "[" else -1
        if close > 0:
            body = pattern[at + 1 : close].replace("\\", r"\\")
            out += f"[{'^' + body[1:] if body[0] in '!^' else body}]"
            at = close
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
        at += 1
    return re.compile(out)
