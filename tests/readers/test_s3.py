"""Remote files, against a real S3 server on the loopback device."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterator
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from overlord.errors import ReaderError, SourceError
from overlord.readers.files import list_files

from .conftest import read_all

ROWS = [{"text": f"text {n}", "n": n} for n in range(40)]


def parquet_bytes() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), out, row_group_size=10)
    return out.getvalue()


def arrow_bytes() -> bytes:
    out = io.BytesIO()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return out.getvalue()


def lines() -> bytes:
    return "\n".join(map(json.dumps, ROWS)).encode()


def tar_bytes() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for row in ROWS:
            for end, payload in (("txt", row["text"].encode()), ("bin", os.urandom(60_000))):
                info = tarfile.TarInfo(f"{row['n']:03}.{end}")
                info.size = len(payload)
                tar.addfile(info, io.BytesIO(payload))
    return out.getvalue()


FILES = {
    "data/0.parquet": parquet_bytes,
    "data/1.parquet": parquet_bytes,
    "data/deep/2.parquet": parquet_bytes,
    "data/_tmp/3.parquet": parquet_bytes,
    "lines/0.jsonl.gz": lambda: gzip.compress(lines()),
    "plain/0.jsonl": lines,
    "shards/0.tar": tar_bytes,
    "saved/data-0.arrow": arrow_bytes,
}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Any, dict[str, str]]]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    options = {"endpoint_override": f"http://{host}:{port}", "access_key": "key", "secret_key": "secret"}
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_override"],
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    for name, make in FILES.items():
        client.put_object(Bucket="bucket", Key=name, Body=make())
    yield client, options
    client.close()
    moto.stop()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("data/0.parquet", ["data/0.parquet"]),
        ("data", ["data/0.parquet", "data/1.parquet", "data/deep/2.parquet"]),
        ("data/", ["data/0.parquet", "data/1.parquet", "data/deep/2.parquet"]),
        ("data/*.parquet", ["data/0.parquet", "data/1.parquet"]),
        ("data/[1-9].parquet", ["data/1.parquet"]),
        ("d*/deep/?.parquet", ["data/deep/2.parquet"]),
        ("**/*.tar", ["shards/0.tar"]),
    ],
)
def test_files_globs_and_folders_are_listed(path: str, found: list[str], server):
    files = list_files([f"s3://bucket/{path}"], server[1])
    assert [file.path for file in files] == [f"s3://bucket/{name}" for name in found]
    assert all(file.size > 0 and file.mtime_ns > 0 and not file.is_local for file in files)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("data/*.parquet", "text"),
        ("lines", "text"),
        ("plain", "text"),
        ("shards", "txt"),
        ("saved", "text"),
    ],
)
def test_every_format_is_read(path: str, text: str, server, open_source):
    source = open_source(f"s3://bucket/{path}", columns=[text], storage_options=server[1])
    rows = read_all(source)
    expected = [row["text"].encode() for row in ROWS] * len(source.files)
    assert [row[text] for row in rows] == expected


def test_what_is_not_there_is_named(server):
    with pytest.raises(SourceError, match=r"'s3://bucket/none/.*.parquet' matches no file"):
        list_files(["s3://bucket/none/*.parquet"], server[1])


def test_a_bucket_that_does_not_exist_is_named(server):
    with pytest.raises(SourceError, match=r"'s3://nobucket/x/"):
        list_files(["s3://nobucket/x/*.parquet"], server[1])


def test_an_object_that_is_replaced_or_removed_stops_the_stream(server, open_source):
    client, options = server
    client.put_object(Bucket="bucket", Key="moving/0.jsonl", Body=lines())
    source = open_source("s3://bucket/moving", columns=["text"], storage_options=options)
    source.blocks(0)
    client.put_object(Bucket="bucket", Key="moving/0.jsonl", Body=lines() + b"\n{}")
    with pytest.raises(ReaderError, match=r"s3://bucket/moving/0.jsonl has .* bytes where the listing found"):
        read_all(source)
    client.delete_object(Bucket="bucket", Key="moving/0.jsonl")
    with pytest.raises(ReaderError, match=r"s3://bucket/moving/0.jsonl is gone"):
        read_all(source)
