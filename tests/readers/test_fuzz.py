"""Flipped bytes: every reader and every image decoder answers with rows, bad samples or our errors, never a signal.

Each case flips one byte of a small valid file, by a seed. `make test` runs 200 flips of each file (40 of a columnar
file, whose 200 are in `make test-slow`), `make test-nightly` 20,000. What pyarrow decodes is read in reader processes,
as a service reads it; the rest in forked children, which must not end by a signal.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import ipc

from overlord.core.ragged import Ragged
from overlord.errors import OverlordError
from overlord.readers.files import list_files
from overlord.readers.index import IndexCache
from overlord.readers.jsonl import JsonlReader
from overlord.readers.parquet_footer import read_footer, warm_footer
from overlord.readers.reader import DamagedFile
from overlord.readers.source_files import SourceFiles
from overlord.runtimes.supervision.reader_processes import ReaderProcesses
from overlord.transforms.samples.images import decode_image
from overlord.transforms.samples.per_sample import MediaFault

DATA = Path(__file__).parent / "data"
ROWS = 24
FEW, MANY = 200, 20_000
BATCH = 100
"""Flips in one forked child."""
MOST_BYTES = 1 << 30
"""What a child may use beyond what it starts with, and a reader process in all."""

COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.nightly)]
# A columnar file is read by another process, which takes a hundred times longer than a read in a forked child.
COLUMNAR_COUNTS = [40, pytest.param(FEW, marks=pytest.mark.slow), pytest.param(MANY, marks=pytest.mark.nightly)]


def flip(data: bytes, name: str, seed: int) -> bytes:
    """Change one byte, by a bit or wholly."""
    rng = random.Random(f"{name}/{seed}")
    damaged = bytearray(data)
    damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256)
    return bytes(damaged)


# -- columnar files, in reader processes --------------------------------------------------------


def table() -> pa.Table:
    return pa.table(
        {
            "text": [f"row {n} ünï" * 3 for n in range(ROWS)],
            "ids": [list(range(n)) for n in range(ROWS)],
            "kind": pa.array([f"k{n % 3}" for n in range(ROWS)]).dictionary_encode(),
            "chat": [[{"role": "user", "content": f"x{n}"}] * 2 for n in range(ROWS)],
            "images": [[b"a" * n, b"b"] for n in range(ROWS)],
            "n": list(range(ROWS)),
        }
    )


def parquet(**options: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(table(), out, row_group_size=10, **options)  # type: ignore[arg-type]
    return out.getvalue()


def arrow(*, stream: bool, compression: str | None = None) -> bytes:
    out = io.BytesIO()
    new = ipc.new_stream if stream else ipc.new_file
    with new(out, table().schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table(), max_chunksize=10)
    return out.getvalue()


COLUMNAR: dict[str, Callable[[], bytes]] = {
    "snappy.parquet": parquet,
    "zstd.parquet": lambda: parquet(compression="zstd", data_page_version="2.0"),
    "pages.parquet": lambda: parquet(compression="snappy", data_page_size=40, write_batch_size=2),
    "plain.parquet": lambda: parquet(compression="none", use_dictionary=False),
    "file.arrow": lambda: arrow(stream=False),
    "stream.arrow": lambda: arrow(stream=True),
    "zstd.arrow": lambda: arrow(stream=True, compression="zstd"),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[ReaderProcesses]:
    readers = ReaderProcesses(2)
    yield readers
    readers.close()


def read_everything(path: Path, cache: Path, pool: ReaderProcesses | None, columns: list[str]) -> None:
    files = SourceFiles(
        "s", [str(path)], cache=IndexCache(cache), columns=columns, pause=lambda _: None,
        isolate=pool.isolate if pool else None,
    )  # fmt: skip
    for block in range(len(files.blocks(0).rows)):
        for batch in files.stream(0, block, batch_rows=7):
            for column in batch.values():
                if isinstance(column, Ragged):
                    column.take(np.arange(len(column)))  # a kernel that follows every offset
        for start in (0, 4):
            for batch in files.stream(0, block, skip=start, stop=start + 3, batch_rows=7):
                assert all(len(column) <= 3 for column in batch.values())


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COLUMNAR_COUNTS)
@pytest.mark.parametrize("name", COLUMNAR)
def test_columnar_files(name: str, count: int, tmp_path: Path, pool: ReaderProcesses) -> None:
    if count == MANY:  # of each reader, over all of its files
        count = -(-MANY // sum(Path(name).suffix == Path(one).suffix for one in COLUMNAR))
    data, damaged = COLUMNAR[name](), 0
    for seed in range(count):
        path, cache = tmp_path / f"{seed}.{name}", tmp_path / "cache"
        path.write_bytes(flip(data, name, seed))
        try:
            read_everything(path, cache, pool, table().schema.names)
        except OverlordError as error:
            damaged += 1
            assert str(path) in str(error)
        path.unlink()
        for pid in pool.pids:
            assert psutil.Process(pid).memory_info().rss < MOST_BYTES
    assert damaged > count // 50


# -- the rest, in forked children ---------------------------------------------------------------


def in_children(count: int, case: Callable[[int], None]) -> None:
    """Run a case for every seed; a signal, or an exception that the case lets pass, fails with the seed."""
    for first in range(0, count, BATCH):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                warnings.simplefilter("ignore")
                used = psutil.Process().memory_info().vms
                resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, used + MOST_BYTES))
                for seed in range(first, min(first + BATCH, count)):
                    os.write(write_end, seed.to_bytes(8, "little"))
                    case(seed)
                code = 0
            except BaseException as error:  # the parent tells which seed it was
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            seeds = pipe.read()
        _, status = os.waitpid(child, 0)
        last = int.from_bytes(seeds[-8:], "little")
        assert os.waitstatus_to_exitcode(status) == 0, f"seed {last}: {os.waitstatus_to_exitcode(status)}"


def jsonl() -> bytes:
    rows = [{"text": f"row {n} ünï", "ids": list(range(n)), "n": n, "chat": [{"role": "user"}]} for n in range(ROWS)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def tar(mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for n in range(ROWS):
            for ending, content in (("txt", b"text %d" % n), ("jpg", bytes(range(n)))):
                info = tarfile.TarInfo(f"{n:04d}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as packed:
        packed.write(data)
    return out.getvalue().to_pybytes()


LINES = ["text", "ids", "n", "chat"]
MDS = ["text", "ids", "any", "four", "n", "score", "digits", "meta", "raw", "image", "images"]
OTHERS: dict[str, tuple[Callable[[], bytes], list[str]]] = {
    "a.jsonl": (jsonl, LINES),
    "a.jsonl.gz": (lambda: gzip.compress(jsonl(), mtime=0), LINES),
    "a.jsonl.zst": (lambda: zstd(jsonl()), LINES),
    "a.tar": (tar, ["txt", "jpg"]),
    "a.tar.gz": (lambda: tar("w:gz"), ["txt", "jpg"]),
    "a.mds": (lambda: (DATA / "mds" / "raw" / "shard.00006.mds").read_bytes(), MDS),
    "a.mds.zstd": (lambda: (DATA / "mds" / "zstd" / "shard.00001.mds.zstd").read_bytes(), MDS),
    "a.mds.br": (lambda: (DATA / "mds" / "br" / "shard.00001.mds.br").read_bytes(), MDS),
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", OTHERS)
def test_lines_and_shards(name: str, count: int, tmp_path: Path) -> None:
    make, columns = OTHERS[name]
    data = make()

    def case(seed: int) -> None:
        path = tmp_path / f"{seed}-{name}"
        path.write_bytes(flip(data, name, seed))
        try:
            read_everything(path, tmp_path / "cache", None, columns)
        except OverlordError:
            pass
        path.unlink()

    case(-1)  # kernels are loaded before the fork
    in_children(count, case)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", ["gpt_uint16_text_document", "bert_int32_text_sentence"])
def test_megatron_indices(name: str, count: int, tmp_path: Path) -> None:
    data, index = ((DATA / "megatron" / f"{name}{end}").read_bytes() for end in (".bin", ".idx"))

    def case(seed: int) -> None:
        path = tmp_path / f"{seed}.bin"
        path.write_bytes(data)
        path.with_suffix(".idx").write_bytes(flip(index, name, seed))
        try:
            read_everything(path, tmp_path / "cache", None, ["tokens"])
        except OverlordError as error:
            assert str(path) in str(error)
        path.unlink()

    case(-1)
    in_children(count, case)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COUNTS)
def test_parquet_footers(count: int) -> None:
    data = parquet()
    footer = data[-int.from_bytes(data[-8:-4], "little") - 8 :]
    warm_footer()

    def case(seed: int) -> None:
        damaged = flip(footer, "footer", seed)
        try:
            found = read_footer(pa.BufferReader(damaged), len(damaged))
        except DamagedFile:
            return
        assert 0 <= found.list_at <= len(damaged) and (np.diff(found.bounds) >= 0).all()

    in_children(count, case)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COUNTS)
def test_cached_indices(count: int, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl())
    cache, reader, file = IndexCache(tmp_path / "cache"), JsonlReader(), list_files([str(path)])[0]
    cache.index(file, reader, ["text"])
    (entry,) = (found for found in (tmp_path / "cache").rglob("*.index"))
    data = entry.read_bytes()
    for seed in range(count):
        entry.write_bytes(flip(data, "index", seed))
        assert cache.find(file, reader, ["text"]) is None, f"seed {seed}"


# -- images -------------------------------------------------------------------------------------


def image(form: str, **options: object) -> bytes:
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.arange(40), np.arange(48))[..., None] * np.array([1, 2, 3]) + rng.integers(
        0, 9, (40, 48, 3)
    )
    out = io.BytesIO()
    Image.fromarray(smooth.astype(np.uint8)).save(out, form, **options)
    return out.getvalue()


IMAGES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: image("JPEG"),
    "progressive jpeg": lambda: image("JPEG", progressive=True, quality=95),
    "png": lambda: image("PNG"),
    "webp": lambda: image("WEBP"),
    "lossless webp": lambda: image("WEBP", lossless=True),
    "gif": lambda: image("GIF"),
    "bmp": lambda: image("BMP"),
    "tiff": lambda: image("TIFF"),
    "packed tiff": lambda: image("TIFF", compression="tiff_lzw"),
    "avif": lambda: image("AVIF"),
}


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str, count: int) -> None:
    data = IMAGES[name]()
    assert decode_image(data).shape == (40, 48, 3)

    def case(seed: int) -> None:
        try:
            pixels = decode_image(flip(data, name, seed))
        except MediaFault:
            return
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3

    in_children(count, case)
