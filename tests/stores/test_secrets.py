"""Credentials are in no store, state, status or process list, and a store is readable by its owner only."""

from __future__ import annotations

import io
import json
import os
import signal
import stat

import boto3
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

import overlord as ol
from overlord.job.specs import without_secrets
from overlord.stores.places import open_place

WHERE = pytest.mark.parametrize("hosts", [None, pytest.param(2, marks=pytest.mark.slow)], ids=["local", "hosts"])
SECRET, KEY = "s3cret-of-the-added-source", "key-id-of-the-added-source"


@pytest.fixture(scope="module")
def bucket():
    """Storage options of a bucket with a few rows. Its name is its own: servers of one process share buckets."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", aws_access_key_id=KEY,
                          aws_secret_access_key=SECRET, region_name="us-east-1")  # fmt: skip
    client.create_bucket(Bucket="secrets")
    out = io.BytesIO()
    pq.write_table(pa.table({"ids": pa.array([[7] * (n % 9 + 1) for n in range(300)], pa.list_(pa.int32()))}), out)
    client.put_object(Bucket="secrets", Key="data/0.parquet", Body=out.getvalue())
    yield {"access_key": KEY, "secret_key": SECRET, "region": "us-east-1", "endpoint_override": f"http://{host}:{port}"}
    server.stop()


@pytest.fixture
def added(bucket):
    return ol.Source("s3", "s3://secrets/data/", sample=ol.Text("ids", tokenized=True), storage_options=bucket)


def leaks(text):
    return SECRET in text or KEY in text


def files_with_secrets(folder):
    """Return the files below a folder that hold a credential."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "rb") as file:
                    if leaks(file.read().decode("utf-8", "replace")):
                        found.append(path)
    return found


def take(client, steps):
    return [[str(one) for batch in next(client).microbatches for one in batch.meta.sample_ids] for _ in range(steps)]


@WHERE
def test_credentials_of_an_added_source_are_written_nowhere(ids_job, tmp_path, added, hosts, caplog):
    store = tmp_path / "store"
    with ol.launch(ids_job, cache=tmp_path / "cache", store=store, loader_hosts=hosts) as service:
        client = service.client(0)
        take(client, 3)
        at = service.add_source(added, weight=5.0)
        take(client, at + 20 - client.next_step)
        assert service.status()["sources"]["s3"]["samples"] > 0
        told = [
            json.dumps(service.status(), default=str),
            json.dumps(client.state_dict()),
            json.dumps(service.history()),
        ]
        for process in [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]:
            told += [" ".join(process.cmdline()), str(process.environ())]
        folder = service.address.removeprefix("unix://")
        assert not [text for text in told if leaks(text)]
        assert files_with_secrets(folder) == []
        assert files_with_secrets(tmp_path) == []
    assert files_with_secrets(tmp_path) == []
    assert not leaks(caplog.text)
    assert leaks(json.dumps(added.storage_options))  # so the search itself finds them


@WHERE
def test_a_service_that_dies_is_restarted_with_the_credentials(ids_job, tmp_path, added, hosts):
    with ol.launch(ids_job, cache=tmp_path / "cache", store=tmp_path / "calm") as service:
        client = service.client(0)
        take(client, 3)
        at = service.add_source(added, weight=5.0, at_step=40)
        expected = take(client, 60)
    with ol.launch(ids_job, cache=tmp_path / "cache", store=tmp_path / "store", loader_hosts=hosts) as service:
        client = service.client(0)
        take(client, 3)
        assert service.add_source(added, weight=5.0, at_step=40) == at
        got = take(client, 42)
        os.kill(service.pid, signal.SIGKILL)
        got += take(client, 18)
        assert service.status()["restarts"] == 1
        if hosts:  # a role that is replaced is given them too
            planner = next(one for one in service.status()["hosts"] if one["role"] == "planner")
            os.kill(planner["pid"], signal.SIGKILL)
        assert take(client, 5)
    assert got == expected
    assert files_with_secrets(tmp_path) == []


def test_a_run_is_resumed_only_with_the_credentials(ids_job, tmp_path, added, bucket):
    given = {"cache": tmp_path / "cache", "store": tmp_path / "store", "runtime": "inline"}
    with ol.launch(ids_job, **given) as service:
        client = service.client(0)
        take(client, 2)
        at = service.add_source(added, weight=5.0)
        take(client, 20)
        state = client.state_dict()
        expected = take(client, 5)
    for resumed in ({"state": state}, {"state": "latest"}):
        with pytest.raises(ol.SpecError, match=r"source 's3' was added .* access_key, secret_key, which are never"):
            ol.launch(ids_job, **given, **resumed)
    with pytest.raises(ol.SpecError, match=r"there is no source 's4'.*'s3'"):
        ol.launch(ids_job, **given, state=state, source_options={"s3": bucket, "s4": {}})
    secret = {name: bucket[name] for name in ("access_key", "secret_key")}  # the rest is in the state
    with ol.launch(ids_job, **given, state=state, source_options={"s3": secret}) as service:
        assert take(service.client(0), 5) == expected
        assert not leaks(repr(service.options)) and not leaks(repr(service.job))
    with ol.replay(tmp_path / "store", at + 2, source_options={"s3": secret}) as service:
        assert take(service.client(0), 1)
    assert files_with_secrets(tmp_path) == []


def test_what_may_be_written_of_storage_options():
    join = ol.Join("s3://b/other", ["x"], storage_options={"secret_key": SECRET, "region": "eu"})
    options = {"proxy_options": f"http://u:{SECRET}@proxy", "endpoint_override": f"https://u:{SECRET}@host",
               "session_token": SECRET, "anything_new": SECRET, "anonymous": False}  # fmt: skip
    source = without_secrets(ol.Source("a", "s3://b/a", sample=ol.Text("x"), join=join, storage_options=options))
    assert source.storage_options == {"anonymous": False}
    assert source.join.storage_options == {"region": "eu"}


def test_an_option_of_a_wrong_type_is_not_shown(ids_job, tmp_path):
    source = ol.Source("s3", "s3://secrets/data/", sample=ol.Text("ids", tokenized=True),
                       storage_options={"secret_key": 918273645})  # fmt: skip
    with pytest.raises(ol.SpecError, match="secret_key") as refused:
        ol.launch(ids_job.replace(sources=[source]), cache=tmp_path, runtime="inline")
    assert "918273645" not in str(refused.value)


@pytest.mark.parametrize("umask", [0o000, 0o777], ids=oct)
def test_a_store_is_private_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        place = open_place(str(tmp_path / "a" / "store")) if umask == 0 else open_place(str(tmp_path / "store"))
        place.write("lineage-0001/snapshot-1", b"x")
        place.create("owner-000001", b"x")
        place.open_append("lineage-0001/journal-1").close()
    finally:
        os.umask(before)
    modes = {}
    for root, _, names in os.walk(place.name):
        for path in (root, *(os.path.join(root, name) for name in names)):
            modes.setdefault(os.path.isdir(path), set()).add(stat.S_IMODE(os.lstat(path).st_mode))
    assert modes == {True: {0o700}, False: {0o600}}


def test_all_files_of_a_run_are_private(ids_job, tmp_path):
    before = os.umask(0)
    try:
        with ol.launch(ids_job, cache=tmp_path / "cache", store=tmp_path / "store") as service:
            take(service.client(0), 20)
            folder = service.address.removeprefix("unix://")
            folder = folder if os.path.isdir(folder) else os.path.dirname(folder)
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    finally:
        os.umask(before)
    loose = []
    for top in ("store", "cache"):
        for root, _, names in os.walk(tmp_path / top):
            paths = (root, *(os.path.join(root, name) for name in names))
            loose += [path for path in paths if os.lstat(path).st_mode & 0o077]
    assert loose == []
