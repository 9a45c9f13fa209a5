"""The hand-over from a launcher to its service: other code is refused by name, and options never shift."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import overlord as ol
from overlord.runtimes.launching.service_options import ServiceOptions, pack, unpack
from overlord.version import VERSION


@pytest.fixture
def options() -> ServiceOptions:
    return ServiceOptions(mesh=ol.ClientPlaceTree(dp=2), cache="/c", store="/s", service="abc", keep=7)


def with_head(bundle: bytes, changed: dict[str, object]) -> bytes:
    head, _, body = bundle.partition(b"\n")
    return json.dumps(json.loads(head) | changed).encode() + b"\n" + body


def test_a_bundle_comes_out_as_it_went_in(ids_job, options):
    job, read = unpack(pack(ids_job, options))
    assert job == ids_job
    assert read == options


@pytest.mark.parametrize("changed", [{"version": "9.9.9"}, {"fields": "0" * 64}, {"bundle": 0}])
def test_a_launcher_of_other_code_is_refused_with_both_versions(ids_job, options, changed):
    with pytest.raises(ol.SpecError, match="the same version on all hosts") as refused:
        unpack(with_head(pack(ids_job, options), changed))
    assert VERSION in str(refused.value) and str(changed.get("version", VERSION)) in str(refused.value)


@pytest.mark.parametrize("bundle", [b"", b"\n", b"{}\nbody", b"nonsense", b"[1]\n", b"\x80\x05."])
def test_bytes_without_a_head_are_never_unpickled(bundle):
    with pytest.raises(ol.SpecError, match="an unknown version"):
        unpack(bundle)


def test_the_digest_of_fields_notices_a_field_that_came(monkeypatch, ids_job, options):
    from overlord.runtimes.launching import service_options as module

    packed = pack(ids_job, options)
    fields = [*dataclasses.fields(ServiceOptions), *dataclasses.fields(ServiceOptions)[:1]]
    monkeypatch.setattr(module.dataclasses, "fields", lambda kind: fields)
    module._fields_digest.cache_clear()
    try:
        with pytest.raises(ol.SpecError, match="the same version"):
            unpack(packed)
    finally:
        monkeypatch.undo()
        module._fields_digest.cache_clear()


def test_a_service_process_of_another_version_says_so(ids_job, cache, tmp_path):
    """The launcher is real, and so is the service process; only its package has another version."""
    src = Path(ol.__file__).parent
    shutil.copytree(src, tmp_path / "new" / "overlord", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "new" / "overlord" / "version.py"
    file.write_text(file.read_text().replace(VERSION, "9.9.9"))
    script = tmp_path / "launch.py"
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(src.parent)!r})\n"
        "import overlord as ol\n"
        f"sys.path.insert(0, {str(tmp_path / 'new')!r})\n"  # the service process finds the other package first
        f"path = {ids_job.sources[0].path[0]!r}\n"
        "job = ol.Job(sources=[ol.Source('a', path, sample=ol.Text('ids', tokenized=True))],\n"
        "             batch=ol.Batch(32, global_samples=2))\n"
        "try:\n"
        f"    ol.launch(job, runtime='local', cache={cache!r}).close()\n"
        "except ol.SpecError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=os.environ)
    assert VERSION in done.stdout and "9.9.9" in done.stdout, done.stdout + done.stderr
