"""The same files on a disk and in a bucket are the same stream."""

from __future__ import annotations

import io

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

import overlord as ol
from overlord.testing import stream_digests
from overlord.testing.object_server import ObjectServer

OPTIONS = {"access_key": "testing", "secret_key": "testing", "region": "us-east-1", "scheme": "http"}


@pytest.fixture(scope="module")
def server():
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.mark.slow_on_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bucket_and_disk_give_the_same_digests(tmp_path, cache, server, where):
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{server}",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    bucket = f"bucket-{where['runtime']}"
    client.create_bucket(Bucket=bucket)
    for number in range(3):
        out = io.BytesIO()
        rows = [[1000 * number + i] * (i % 17 + 1) for i in range(60)]
        pq.write_table(pa.table({"ids": pa.array(rows, pa.list_(pa.int32()))}), out, row_group_size=20)
        (tmp_path / f"{number}.parquet").write_bytes(out.getvalue())
        client.put_object(Bucket=bucket, Key=f"data/{number}.parquet", Body=out.getvalue())

    def job(path, options):
        sample = ol.Text("ids", tokenized=True)
        source = ol.Source("s", path, sample=sample, shuffle_bytes=2000, storage_options=options)
        return ol.Job(sources=[source], batch=ol.Batch(64, global_samples=16))

    remote = job(f"s3://{bucket}/data/*.parquet", {**OPTIONS, "endpoint_override": server})
    local = job(str(tmp_path), {})
    expected = stream_digests(local, steps=12, cache=cache)
    assert stream_digests(remote, steps=12, cache=cache, **where) == expected
    with ObjectServer(tmp_path.parent) as google:
        options = {"anonymous": True, "endpoint_override": google.url}
        remote = job(f"gs://{tmp_path.name}/*.parquet", options)
        assert stream_digests(remote, steps=12, cache=cache, **where) == expected
