"""The stored files of a source, local or remote: found by paths and globs, opened, mapped, streamed.

Their names say which format they have; their content is not looked at here.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import pyarrow as pa
from pyarrow import fs

from overlord.core.spec_errors import did_you_mean, nearest, unexpanded
from overlord.errors import ReaderError, SourceError, SpecError, pip_install, shortened
from overlord.readers.remote.object_store import OBJECT_SCHEMES, Bucket, RemoteObject, http_key
from overlord.readers.remote.range_cache import RangeCache
from overlord.readers.remote.range_files import ObjectListing, RemoteFile
from overlord.storage import StorageOptions, check_options, filesystem_of

try:
    from isal import igzip as gzip  # three times as fast as the standard library, with the same interface
except ImportError:  # a platform without wheels
    import gzip  # type: ignore[no-redef]

_GZIP_BUFFER_BYTES = 64 << 10


class ByteStream(Protocol):
    """Bytes that are read front to back."""

    def read(self, count: int, /) -> bytes:
        """Return the next bytes: at most `count`, none at the end."""
        ...


class MappedFile:
    """A local file mapped read-only; its pages can be released while it is open.

    Every touched page of a mapping counts as memory of the process. A stream that reads a large file front to back
    releases the pages behind it, at no cost: they stay in the page cache.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self.native: pa.NativeFile = pa.BufferReader(pa.py_buffer(self._map))

    def release_pages(self) -> None:
        """Release the touched pages; views of them stay valid and fault in again."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a source as its listing found it."""

    path: str
    """The local path or the URL, for messages."""
    size: int
    mtime_ns: int
    filesystem: fs.FileSystem = field(repr=False, compare=False)
    location: str = field(repr=False)
    """The path on `filesystem`."""
    max_row_bytes: int = 1 << 62
    """The largest line, or members of one sample, that are read."""
    beside: StoredFile | None = None
    """The file that is read with this one: the `.idx` of a Megatron `.bin`, the `index.json` of a chunk of litdata."""
    remote: RemoteObject | None = field(default=None, repr=False, compare=False)
    """The object that is fetched in ranges; None for a local file, and one of HDFS."""
    ranges: RangeCache | None = field(default=None, repr=False, compare=False)
    """Where ranges of a remote object are kept."""

    @property
    def is_local(self) -> bool:
        """Whether the file is on this host's disks."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def compression(self) -> Compression | None:
        """How the file is compressed as a whole, by its name."""
        return compression_of_name(self.path)

    def open(self) -> pa.NativeFile:
        """Open for random access; not mapped, so that what was read takes no memory."""
        if self.remote is not None:
            return RemoteFile.open(self.remote, self.ranges)
        return self.filesystem.open_input_file(self.location)

    def map(self) -> MappedFile | None:
        """Map the file, or return None when it is remote."""
        return MappedFile(self.location) if self.is_local else None

    @contextlib.contextmanager
    def open_stream(self, compression: Compression | None = None) -> Iterator[ByteStream]:
        """Open for reading front to back, decompressing on the way."""
        # pyarrow would hold 1 MiB for every open stream of gzip.
        inner = None if compression == "gzip" else compression
        if self.remote is not None:
            opened = self.open()
            native = opened if inner is None else pa.CompressedInputStream(opened, inner)
        else:
            buffered = _GZIP_BUFFER_BYTES if compression == "gzip" else None
            native = self.filesystem.open_input_stream(self.location, compression=inner, buffer_size=buffered)
        with native:
            if compression != "gzip":
                yield native
                return
            with gzip.GzipFile(fileobj=native) as unzipped:
                yield unzipped


def verify_unchanged(file: StoredFile) -> None:
    """Check that a file has not changed since it was listed.

    Raises:
        ReaderError: It, or the file that is read with it, has another size or modification time, or is gone.
    """
    if file.beside is not None:
        verify_unchanged(file.beside)
    if file.remote is not None:
        return  # every request names the version that was listed, and every answer is compared with it
    info = file.filesystem.get_file_info(file.location)
    if info.type is not fs.FileType.File:
        found = "is gone"
    elif info.size != file.size:
        found = f"has {info.size} bytes where the listing found {file.size}"
    elif (info.mtime_ns or 0) != file.mtime_ns:
        found = "was written to after it was listed"
    else:
        return
    raise ReaderError(
        f"{file.path} {found}; a file that changes under a running job would change the stream. "
        "Restore the file, or start a new run."
    )


# Formats and compression by file name.


Compression = Literal["gzip", "zstd", "bz2", "brotli"]
SUFFIXES: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq"),
    "jsonl": tuple(name + end for name in (".jsonl", ".ndjson", ".json") for end in ("", ".gz", ".zst")),
    "tar": (".tar", ".tar.gz", ".tgz"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "megatron": (".bin",),
    "mds": tuple(f".mds{end}" for end in ("", ".zstd", ".gz", ".bz2", ".br")),
    "tfrecord": tuple(name + end for name in (".tfrecord", ".tfrecords") for end in ("", ".gz")),
    "arrayrecord": (".array_record", ".arrayrecord"),
    "lance": (".manifest",),
    "litdata": (),
}
"""The suffixes of the file names of each format."""
_SHARD = re.compile(r"-\d+-of-\d+(?=$|\.)")
"""The number of a shard, which TensorFlow's tools write behind the suffix."""
_CHUNK = re.compile(r"(?:^|/)chunk-\d+-\d+(?:\.(zstd)(?::\d+)?)?\.bin$")
"""The chunks of litdata, and how they are compressed; other `.bin` files are Megatron's."""
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that Hugging Face datasets write beside the data."""


def format_of_name(path: str) -> str | None:
    """Return the format that a file's name implies, or None.

    Example:
        >>> format_of_name("web/00.jsonl.gz"), format_of_name("a.tfrecord-00000-of-00008"), format_of_name("README.md")
        ('jsonl', 'tfrecord', None)
    """
    name = _SHARD.sub("", path.lower())
    if _CHUNK.search(name):
        return "litdata"
    return next((f for f, ends in SUFFIXES.items() if name.endswith(ends)), None)


def compression_of_name(path: str) -> Compression | None:
    """Return how a file is compressed as a whole, by its name, or None.

    Example:
        >>> compression_of_name("a.tgz"), compression_of_name("a.jsonl.zst"), compression_of_name("a.tar")
        ('gzip', 'zstd', None)
    """
    chunk = _CHUNK.search(path.lower())
    end = path.lower().rpartition(".")[2] if chunk is None else chunk[1]
    return _COMPRESSIONS.get(end)


_COMPRESSIONS: dict[str, Compression] = {
    "gz": "gzip",
    "tgz": "gzip",
    "zst": "zstd",
    "zstd": "zstd",
    "bz2": "bz2",
    "br": "brotli",
}


# From paths, globs, folders and URLs to the files of a source.


Choose = Callable[[Sequence[str], Mapping[str, str]], list[str]]
"""Selects some of the files of a folder, given their names in it and the texts of its `DESCRIPTIONS`."""
DESCRIPTIONS = ("README.md", ".nv-meta/split.yaml", ".nv-meta/split.json")
"""Files that may tell which files of a folder belong to a split: the card of the Hub, and that of Energon."""
DESCRIPTION_BYTES = 8 << 20
"""How much of such a file is read."""
WILDCARD = re.compile(r"[*?\[]")
_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
"""Common table formats that no reader supports."""


def list_files(
    paths: Sequence[str],
    storage_options: StorageOptions | None = None,
    *,
    format: str | None = None,
    suffixes: Sequence[str] = (),
    choose: Choose | None = None,
) -> list[StoredFile]:
    """Return the files that the paths name, sorted by path, each once, empty ones left out.

    A path is a file, a glob (`*`, `?`, `[..]` inside a folder, `**` across folders) or a folder, which
    stands for the data files in it at any depth, of one `format` or with one of the `suffixes` if they are given; names
    that start with '.' or '_' are not data. It is local or begins with file://, s3://, gs://, hdfs:// or hf://. The two
    files of a Megatron dataset are one: the `.bin`, which any of both names or the prefix that they share stands for.
    Of a folder or a glob, `choose` selects files by their names in it and what describes the folder.

    Raises:
        SpecError: A scheme or a storage option is unknown.
        SourceError: A path matches nothing, or all files are empty.
    """
    found: dict[str, StoredFile] = {}
    for path in paths:
        matches, beside = _list_one(path, storage_options or {}, format, tuple(suffixes), choose)
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
            f"{'the only file' if len(unique) == 1 else f'all {len(unique)} files'} of {', '.join(map(repr, paths))} "
            f"{'is' if len(unique) == 1 else 'are'} empty; the source would have no samples. Write "
            f"{'it' if len(unique) == 1 else 'them'} again, or leave the source out."
        )
    return sorted(files, key=lambda file: file.path)


def _no_file(path: str, beside: Sequence[str], format: str | None) -> SourceError:
    """Return the error for a path without matching files; `beside` are files there that do not match."""
    if not beside:
        return SourceError(
            f"{path!r} matches no file; the source would have no samples. "
            f"Check the spelling and that this host can see it.{unexpanded(path) or _near_miss(path)}"
        )
    names = [name.rsplit("/", 1)[-1] for name in beside]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    count = f"{len(names)} file{'' if len(names) == 1 else 's'}"
    if WILDCARD.search(path):
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


def _near_miss(path: str) -> str:
    """Return which file or folder of this host a path that leads nowhere may have meant."""
    whole = Path(path).expanduser()
    lost = next((part for part in (*reversed(whole.parents), whole) if not part.exists()), None)
    if lost is None or "://" in path or WILDCARD.search(lost.name):
        return ""
    try:
        names = os.listdir(lost.parent)
    except OSError:
        return ""
    # Two names are not alike only because both end in .jsonl.
    stem = nearest(lost.stem, {Path(name).stem for name in names})
    return did_you_mean(lost.name, [name for name in names if Path(name).stem == stem])


def _list_one(
    path: str, options: StorageOptions, format: str | None, suffixes: tuple[str, ...], choose: Choose | None
) -> tuple[list[StoredFile], list[str]]:
    """Return the files of one path, and the names of all files found there."""
    scheme, is_url, rest = path.partition("://")
    listing: ObjectListing | None = None
    if path.startswith(_HUB):
        filesystem, location, prefix = _hub_filesystem(path, options)
    elif is_url and scheme.lower() in OBJECT_SCHEMES:
        location, prefix = http_key(rest) if scheme.lower() in ("http", "https") else rest, f"{scheme.lower()}://"
        listing = ObjectListing(scheme.lower(), options)
        filesystem = fs.PyFileSystem(listing)
    else:
        filesystem, location, prefix = filesystem_of(path, options)
    location = location.rstrip("/") or "/"
    try:
        info, listed = filesystem.get_file_info(location), []
        if info.type is fs.FileType.NotFound and WILDCARD.search(location):
            infos, others = _glob(filesystem, location)
        elif info.type is fs.FileType.Directory:
            listed = filesystem.get_file_info(fs.FileSelector(location, recursive=True))
            infos, others = _data_of_folder(listed, location, format, suffixes)
        else:
            infos, others = _one_file(filesystem, info), []
        if choose is not None:
            infos = _chosen(filesystem, location, infos, listed, choose)
        indices: dict[str, fs.FileInfo] = {}
        if format in (None, "megatron"):
            infos, indices = _pair_indices(filesystem, infos)
        if format in (None, "litdata"):
            indices |= _chunk_indices(filesystem, infos)
    except SourceError as error:
        raise SourceError(f"{path!r}: {error}") from error
    except (OSError, pa.ArrowException) as error:
        reason = shortened(error)
        raise SourceError(
            f"cannot list {path!r}: {reason}; its files cannot be known. Check the path and the permission to read it."
        ) from error
    # A relative path of the user is shown as a relative one.
    relative = "://" not in path and not os.path.isabs(os.path.expanduser(path))
    here = os.getcwd()

    def stored(info: fs.FileInfo, beside: fs.FileInfo | None) -> StoredFile:
        return StoredFile(
            path=os.path.relpath(info.path, here) if relative else prefix + info.path,
            size=int(info.size or 0),
            mtime_ns=int(info.mtime_ns or 0),
            filesystem=filesystem,
            location=info.path,
            beside=stored(beside, None) if beside is not None else None,
            remote=listing.object_at(info.path) if listing is not None else _hub_object(info, prefix, options),
        )

    files = [stored(info, indices.get(info.path)) for info in infos]
    if listing is not None:
        listing.forget()
    return files, [i.path for i in others]


_HUB = "hf://"
_HUB_OPTIONS: dict[str, type] = {"token": str, "endpoint": str}


def _hub_filesystem(url: str, options: StorageOptions) -> tuple[fs.FileSystem, str, str]:
    """Return what `filesystem_of` returns, of a path on the Hugging Face Hub.

    The revision (a branch or a tag, `main` if there is none) becomes the commit that it names now: the files cannot
    change while a job runs, and their indices are kept by that commit.
    """
    chosen = check_options("hf", options, _HUB_OPTIONS)
    try:
        from huggingface_hub import HfApi, HfFileSystem
    except ImportError as error:
        raise SpecError(
            f"the path {url!r} is on the Hugging Face Hub, which needs the package huggingface_hub; nothing can be "
            f"listed. Install it (`{pip_install('hub')}`), or download the dataset and give its folder."
        ) from error
    try:
        hub = HfFileSystem(**chosen)
        at = hub.resolve_path(url[len(_HUB) :])
        found = HfApi(**chosen).repo_info(at.repo_id, repo_type=at.repo_type, revision=at.revision)
        location = f"{at.repo_type}s/{at.repo_id}@{found.sha}/{at.path_in_repo}"
    except Exception as error:  # of the network, of the Hub (no such repository, no permission), of a path
        raise SourceError(
            f"cannot find {url!r} on the Hugging Face Hub: {shortened(error)}; none of its files "
            "can be listed. Write hf://datasets/ORG/NAME or hf://datasets/ORG/NAME@REVISION/PATH; a private one needs "
            "a token."
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(hub)), location, _HUB


def _hub_object(info: fs.FileInfo, prefix: str, options: StorageOptions) -> RemoteObject | None:
    """Return where the bytes of a file of the Hub are; None for a file from elsewhere."""
    if prefix != _HUB:
        return None
    from huggingface_hub import constants, get_token

    endpoint, token = str(options.get("endpoint") or constants.ENDPOINT), options.get("token") or get_token()
    scheme, _, host = endpoint.rstrip("/").partition("://")
    repository, _, path = info.path.partition("@")
    commit, _, inside = path.partition("/")
    key = f"{repository.removeprefix('models/')}/resolve/{commit}/{inside}"
    bucket = Bucket.of(scheme, host, {"token": token} if token else {})
    return RemoteObject(bucket, key, int(info.size or 0), 0, None, f"{_HUB}{info.path}", immutable=True)


_Infos = list[fs.FileInfo]


def _one_file(filesystem: fs.FileSystem, info: fs.FileInfo) -> _Infos:
    if info.type is fs.FileType.NotFound:  # Megatron names a dataset by what its two files share
        found = filesystem.get_file_info([info.path + end for end in (".bin", ".idx")])
        return found[:1] if all(one.type is fs.FileType.File for one in found) else []
    return [info] if info.type is fs.FileType.File else []


def _pair_indices(filesystem: fs.FileSystem, infos: _Infos) -> tuple[_Infos, dict[str, fs.FileInfo]]:
    """Return the files with every `.idx` that has a `.bin` replaced by that, and the `.idx` of each `.bin`."""
    stems = {info.path[:-4]: None for info in infos if info.path.endswith((".bin", ".idx"))}
    pairs = filesystem.get_file_info([stem + end for stem in stems for end in (".bin", ".idx")]) if stems else []
    whole = {
        data.path: index
        for data, index in zip(pairs[::2], pairs[1::2], strict=True)
        if data.type is fs.FileType.File and index.type is fs.FileType.File
    }
    named = {data.path: data for data in pairs[::2]}
    kept: dict[str, fs.FileInfo] = {}
    for info in infos:
        data = f"{info.path[:-4]}.bin"
        of_index = info.path.endswith(".idx") and data in whole
        kept[data if of_index else info.path] = named[data] if of_index else info
    return list(kept.values()), whole


def _chunk_indices(filesystem: fs.FileSystem, infos: _Infos) -> dict[str, fs.FileInfo]:
    """Return the `index.json` that describes each chunk of litdata."""
    chunks = [info.path for info in infos if format_of_name(info.path) == "litdata"]
    folders = sorted({path.rpartition("/")[0] for path in chunks})
    found = filesystem.get_file_info([f"{folder}/index.json" for folder in folders]) if folders else []
    known = {folder: one for folder, one in zip(folders, found, strict=True) if one.type is fs.FileType.File}
    return {path: known[path.rpartition("/")[0]] for path in chunks if path.rpartition("/")[0] in known}


def _data_of_folder(
    listed: _Infos, folder: str, format: str | None, suffixes: tuple[str, ...]
) -> tuple[_Infos, _Infos]:
    infos, listed = _lance_versions(listed)
    for info in listed:
        inside = info.path[len(folder) :].strip("/").split("/")
        if info.type is fs.FileType.File and not any(part.startswith((".", "_")) for part in inside):
            infos.append(info)
    if suffixes:
        return [info for info in infos if info.path.lower().endswith(suffixes)], infos
    infos = _without_copies(infos)
    named = {i.path: format_of_name(i.path) for i in infos}
    for path, found in named.items():  # other tools write .bin files too (weights, for instance), and manifests
        if (found == "megatron" and f"{path[:-4]}.idx" not in named) or (
            found == "lance" and not _MANIFEST.fullmatch(path)
        ):
            named[path] = None
    data = [
        i
        for i in infos
        if named[i.path] in (SUFFIXES if format is None else (format,)) and i.base_name not in _NOT_DATA
    ]
    if data or format is None:
        return data, infos
    return [i for i in infos if named[i.path] is None and not i.path.lower().endswith(_TABLES)], infos


_MANIFEST = re.compile(r"(.*)/_versions/(\d+)\.manifest")


def _lance_versions(listed: _Infos) -> tuple[_Infos, _Infos]:
    """Return the manifest of the newest version of each Lance dataset in a folder, and the files of no such dataset."""
    newest: dict[str, tuple[int, fs.FileInfo]] = {}
    for info in listed:
        found = _MANIFEST.fullmatch(info.path)
        if found is not None and info.type is fs.FileType.File:
            one = (version_of_manifest(found[2]), info)
            newest[found[1]] = max(newest.get(found[1], one), one, key=lambda pair: pair[0])
    folders = tuple(f"{folder}/" for folder in newest)
    return [info for _, info in newest.values()], [info for info in listed if not info.path.startswith(folders)]


def version_of_manifest(number: str) -> int:
    """Return the version of a Lance dataset that a manifest of this name is of.

    Newer datasets name it by what is left of 64 bits, so that the newest version is listed first.

    Example:
        >>> version_of_manifest("7"), version_of_manifest("18446744073709551613")
        (7, 2)
    """
    return (1 << 64) - 1 - int(number) if len(number) == 20 else int(number)


def _without_copies(infos: _Infos) -> _Infos:
    """Leave out what is beside MDS shards and chunks of litdata: `index.json`, and compressed copies of raw shards."""
    shards = {info.path: found for info in infos if (found := format_of_name(info.path)) in ("mds", "litdata")}

    def is_data(info: fs.FileInfo) -> bool:
        if shards.get(info.path) == "mds":
            raw = info.path[: info.path.lower().rfind(".mds") + len(".mds")]
            return raw == info.path or raw not in shards
        folder = info.path.removesuffix("index.json")
        return info.base_name != "index.json" or not any(shard.startswith(folder) for shard in shards)

    return [info for info in infos if is_data(info)]


def _chosen(filesystem: fs.FileSystem, path: str, infos: _Infos, listed: _Infos, choose: Choose) -> _Infos:
    """Return the files that are wanted: of a folder, of which all is listed, by what describes it; else by names."""
    folder = path if listed else WILDCARD.split(path)[0].rpartition("/")[0]
    texts: dict[str, str] = {}
    for info in listed:
        name = info.path[len(folder) :].strip("/")
        if name in DESCRIPTIONS and info.type is fs.FileType.File:
            if name != DESCRIPTIONS[0] and (info.size or 0) > DESCRIPTION_BYTES:  # of the card, only its head counts
                raise SourceError(
                    f"its {name} has {info.size} bytes, and at most {DESCRIPTION_BYTES} are read; it is not known "
                    "which shards belong to which split. Prepare the dataset again, or name the shards in the path."
                )
            with filesystem.open_input_stream(info.path) as native:
                texts[name] = native.read(DESCRIPTION_BYTES).decode("utf-8", "replace")
    inside = {info.path[len(folder) :].strip("/"): info for info in infos}
    return [inside[name] for name in choose(list(inside), texts)] if inside else []


def _glob(filesystem: fs.FileSystem, pattern: str) -> tuple[_Infos, _Infos]:
    parts = pattern.split("/")
    first = next(n for n, part in enumerate(parts) if WILDCARD.search(part))
    base = "/".join(parts[:first]) or ("/" if pattern.startswith("/") else "")
    deep = first + 1 < len(parts) or "**" in parts[first]
    selector = fs.FileSelector(base, recursive=deep, allow_not_found=True)
    matches = glob_regex(pattern).fullmatch
    found = [i for i in filesystem.get_file_info(selector) if i.type is fs.FileType.File]
    return _without_copies([i for i in found if matches(i.path)]), found


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a glob: `*` stays inside a folder, `**` crosses folders.

    Patterns come with datasets, so it must not take exponential time: what follows a wildcard is taken where it first
    matches (an atomic group), since the next wildcard that takes as much can take whatever comes in between.

    Example:
        >>> bool(glob_regex("a/**/*.tar").fullmatch("a/b/c/1.tar"))
        True
        >>> bool(glob_regex("a/*.tar").fullmatch("a/b/1.tar"))
        False
    """
    tokens: list[str] = []
    at = 0
    while at < len(pattern):
        starts_name = at == 0 or pattern[at - 1] == "/"
        if pattern.startswith("**/", at) and starts_name:
            tokens.append(_FOLDERS)
            at += 3
            continue
        if pattern.startswith("**", at):
            tokens.append(_ANYTHING)
            at += 2
            continue
        char = pattern[at]
        if char in "*?[" and starts_name:
            tokens.append(r"(?!\.)")  # as in a shell, a wildcard does not match hidden names
        close = pattern.find("]", at + 2) if char == "[" else -1
        if close > 0:
            body = pattern[at + 1 : close].replace("\\", r"\\")
            tokens.append(f"[{'^/' + body[1:] if body[0] in '!^' else body}]")
            at = close
        else:
            tokens.append({"*": _IN_NAME, "?": "[^/]"}.get(char, re.escape(char)))
        at += 1
    return re.compile(_without_backtracking([*tokens, r"\Z"], (_ANYTHING, _FOLDERS, _IN_NAME)))


_ANYTHING, _FOLDERS, _IN_NAME = ".*?", r"(?:(?!\.)[^/]+/)*?", "[^/]*?"
"""What wildcards take: `**`, `**/` and `*`, each more than the next."""


def _without_backtracking(tokens: Sequence[str], wildcards: Sequence[str]) -> str:
    """Return tokens as one expression, in which each wildcard and what follows it is an atomic group."""
    if not wildcards:
        return "".join(tokens)
    starts = [0, *(at for at, token in enumerate(tokens) if token == wildcards[0]), len(tokens)]
    parts = [_without_backtracking(tokens[a:b], wildcards[1:]) for a, b in itertools.pairwise(starts)]
    return parts[0] + "".join(f"(?>{part})" for part in parts[1:])
