"""The hand-over from a launcher to its service: other code is refused by name, and options never shift."""

from __future__ import annotations

import dataclasses
import importlib
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


SPAWNS = """
import multiprocessing, sys
import overlord as ol

LIMIT = 5

def sample(row):
    return {"tokens": row["ids"].tolist()[:LIMIT]}

def strategy(buffer, tree):
    return ol.strategies.backbone_balance()(buffer, tree)

def rank(path, cache, runtime):
    source = ol.Source("a", path, sample=ol.Custom(sample, columns=["ids"]))
    job = ol.Job([source], batch=ol.Batch(16, global_samples=2))
    with ol.launch(job, strategy=strategy, cache=cache, runtime=runtime) as service:
        print(runtime, next(service.client()).global_tokens, flush=True)

if __name__ == "__main__":
    for runtime in ("local", "inline"):
        process = multiprocessing.get_context("spawn").Process(target=rank, args=(*sys.argv[1:], runtime))
        process.start()
        process.join()
"""


def test_functions_of_a_script_whose_ranks_are_spawned_travel_by_value(ids_job, cache, tmp_path):
    """As torch.multiprocessing.spawn does: the script is the module `__mp_main__`, which exists in its ranks only."""
    script = tmp_path / "train.py"
    script.write_text(SPAWNS)
    command = [sys.executable, str(script), ids_job.sources[0].path[0], cache]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["local", "inline"], done.stderr
    assert len({line.split()[1] for line in done.stdout.splitlines()}) == 1


class Unloadable:
    """A strategy that pickles, and fails when it is loaded."""

    def __call__(self, buffer, tree):
        raise NotImplementedError

    def __reduce__(self):
        return int, ("no number",)


def test_the_launcher_is_told_why_its_service_could_not_start(ids_job, cache, tmp_path, monkeypatch):
    with pytest.raises(ol.OverlordError, match=r"failed while it started \(ValueError: invalid literal.*'no number'"):
        ol.launch(ids_job, strategy=Unloadable(), cache=cache)
    (tmp_path / "only_in_the_launcher.py").write_text("def strategy(buffer, tree): pass")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("only_in_the_launcher")
    monkeypatch.undo()
    with pytest.raises(ol.SpecError, match=r"cannot be loaded in the service.*No module named 'only_in_the_launcher'"):
        ol.launch(ids_job, strategy=module.strategy, cache=cache)
