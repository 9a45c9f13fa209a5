"""Files that change, schemes and storage options."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overlord.errors import ReaderError, SpecError
from overlord.readers.files import StoredFile, list_files, verify_unchanged
from overlord.storage import filesystem_of


@pytest.fixture
def stored(tmp_path: Path) -> StoredFile:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    return list_files([str(tmp_path / "x.jsonl")])[0]


def test_a_file_is_opened_for_random_access_and_as_a_stream(stored: StoredFile):
    with stored.open() as native:
        assert native.read_at(4, 2) == b"text"
    with stored.open_stream() as native:
        assert native.read() == b'{"text": "a"}'


def test_a_file_that_stayed_the_same_passes(stored: StoredFile):
    verify_unchanged(stored)


def test_a_file_that_grew_is_refused(stored: StoredFile):
    Path(stored.location).write_text('{"text": "longer"}')
    with pytest.raises(ReaderError, match=r"has 18 bytes where the listing found 13; a file that changes under"):
        verify_unchanged(stored)


def test_a_file_that_was_rewritten_with_the_same_size_is_refused(stored: StoredFile):
    os.utime(stored.location, ns=(0, stored.mtime_ns + 1_000_000))
    with pytest.raises(ReaderError, match=r"was written to after it was listed"):
        verify_unchanged(stored)


def test_a_file_that_vanished_is_refused(stored: StoredFile):
    Path(stored.location).unlink()
    with pytest.raises(ReaderError, match=r"x.jsonl is gone; .* Restore the file, or start a new run"):
        verify_unchanged(stored)


def test_an_unknown_option_is_named_with_those_that_exist():
    with pytest.raises(SpecError, match=r"'endpoint' is unknown for s3 files; .*Allowed are: access_key, .*scheme"):
        filesystem_of("s3://bucket/x", {"endpoint": "localhost:9000"})
    with pytest.raises(SpecError, match=r"'region' is unknown for local files; .*Allowed are: none"):
        filesystem_of("/data/x", {"region": "us-east-1"})
    with pytest.raises(SpecError, match=r"'user_name' is unknown for hdfs files; .*kerb_ticket"):
        filesystem_of("hdfs://host:1/x", {"user_name": "me"})


def test_an_option_of_the_wrong_type_is_refused():
    with pytest.raises(SpecError, match=r"'anonymous' is a str, not a bool"):
        filesystem_of("s3://bucket/x", {"anonymous": "yes"})


def test_an_unknown_scheme_is_named_with_those_that_exist():
    with pytest.raises(SpecError, match=r"unknown scheme 'ftp'.*s3://, .*hdfs://"):
        filesystem_of("ftp://host/x", {})
    with pytest.raises(SpecError, match=r"names a host"):
        filesystem_of("file://host/x", {})


def test_a_url_of_google_cloud_storage_keeps_its_bucket():
    filesystem, location, prefix = filesystem_of("gs://bucket/a/b", {"anonymous": True, "retry_time_limit": 5})
    assert filesystem.type_name == "gcs" and (location, prefix) == ("bucket/a/b", "gs://")
