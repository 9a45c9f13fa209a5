"""Datasets on the Hugging Face Hub, with its own client against a small Hub on the loopback device."""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.errors import SourceError, SpecError
from overlord.readers.files import list_files
from overlord.testing import stream_digests

from .conftest import read_all

COMMITS = {"main": "a" * 40, "v1": "b" * 40}
CARD = "---\nconfigs: [{config_name: en, data_files: {train: data/train-*, test: data/test-*}}]\n---\n# A dataset\n"


class Hub(BaseHTTPRequestHandler):
    """Serves one dataset, org/web: a folder of files for each commit."""

    folder: Path

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", "datasets", "org", "web"] | ["api", "datasets", "org", "web", "revision", _]:
                revision = parts[5] if len(parts) > 4 else "main"
                commit = COMMITS.get(revision, revision)
                if commit not in COMMITS.values():
                    return self.answer({"error": "no revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
                return self.answer({"id": "org/web", "sha": commit, "siblings": [], "tags": []})
            case ["api", "datasets", "org", "web", "tree", revision, *path]:
                return self.answer(self.listing(revision, "/".join(path)))
            case ["datasets", "org", "web", "resolve", revision, *path]:
                return self.send_file(self.folder / COMMITS.get(revision, revision) / "/".join(path))
        return self.answer({"error": "no repository"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        asked = json.loads(body)["paths"] if body.startswith("{") else urllib.parse.parse_qs(body)["paths"]
        revision = urllib.parse.unquote(self.path).rpartition("/")[2]
        self.answer([one for one in self.listing(revision, "") if one["path"] in asked])

    def listing(self, revision: str, inside: str) -> list[dict[str, Any]]:
        root = self.folder / COMMITS.get(revision, revision)
        found = []
        for path in sorted((root / inside).rglob("*")):
            kind = {"type": "directory"} if path.is_dir() else {"type": "file", "size": path.stat().st_size}
            found.append({"path": path.relative_to(root).as_posix(), "oid": "0" * 40, **kind})
        return found

    def send_file(self, path: Path) -> None:
        data, status, headers = path.read_bytes(), 200, {}
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
            data, status = data[start:stop], 206
        self.send(data, status, headers)

    def answer(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    for name, commit in COMMITS.items():
        folder = tmp_path / "hub" / commit / "data"
        folder.mkdir(parents=True)
        (folder.parent / "README.md").write_text(CARD)
        for number, split in enumerate(("train", "test")):
            rows = [[number, row, len(name)] for row in range(20)]
            pq.write_table(pa.table({"ids": rows}), folder / f"{split}-0.parquet", row_group_size=6)
    handler = type("OneHub", (Hub,), {"folder": tmp_path / "hub"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_rows_of_a_split_at_a_revision(endpoint: str, open_source):
    options = {"storage_options": {"endpoint": endpoint}, "columns": ["ids"]}
    for path, split, first in (
        ("hf://datasets/org/web", "train", [0, 0, 4]),
        ("hf://datasets/org/web@v1", "test", [1, 0, 2]),
        (f"hf://datasets/org/web@{COMMITS['v1']}/data/test-*.parquet", None, [1, 0, 2]),
        ("hf://datasets/org/web/data/train-0.parquet", None, [0, 0, 4]),
    ):
        rows = read_all(open_source(path, split=split, **options))
        assert len(rows) == 20 and rows[0]["ids"] == first, path


def test_a_revision_is_pinned_to_its_commit(endpoint: str):
    (file,) = list_files(["hf://datasets/org/web@v1/data/test-0.parquet"], {"endpoint": endpoint})
    assert file.location == f"datasets/org/web@{COMMITS['v1']}/data/test-0.parquet"
    assert not file.is_local and file.size > 0


@pytest.mark.timeout(60)
def test_what_is_not_there_is_refused(endpoint: str):
    for path in ("hf://datasets/org/other", "hf://datasets/org/web@v9"):
        with pytest.raises(SourceError, match=r"cannot find 'hf://datasets/org/.*Write hf://datasets/ORG/NAME"):
            list_files([path], {"endpoint": endpoint})
    with pytest.raises(SourceError, match=r"matches no file"):
        list_files(["hf://datasets/org/web/nothing.parquet"], {"endpoint": endpoint})
    with pytest.raises(SpecError, match=r"'region' is unknown for hf files; .*Allowed are: endpoint, token"):
        list_files(["hf://datasets/org/web"], {"region": "x"})


@pytest.mark.parametrize("runtime", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_the_stream_is_that_of_the_downloaded_folder(runtime: Any, endpoint: str, tmp_path: Path):
    def digests(path: str, runtime: Any, **options: Any):
        sample = ol.Text("ids", tokenized=True)
        source = ol.Source("web", path, sample=sample, split="train", **options)
        job = ol.Job([source], batch=ol.Batch(16, global_samples=4))
        return stream_digests(job, steps=6, runtime=runtime, cache=str(tmp_path / "cache"))

    here = digests(str(tmp_path / "hub" / COMMITS["main"]), "inline")
    assert here == digests("hf://datasets/org/web", runtime, storage_options={"endpoint": endpoint})
