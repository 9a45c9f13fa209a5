"""Job files from Python: `ol.load_job`, `ol.launch(path)`, and arguments written as on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import overlord as ol
from overlord.job_files import LaunchOptions, dump_job_yaml, load_job_file
from overlord.testing.digests import StreamDigests, digest_service

PYTHON = """\
import overlord as ol

job = ol.load_job({path!r})
mesh = "dp=2"

def strategy(buffer, tree):
    return ol.strategies.packed()(buffer, tree)
"""


@pytest.fixture
def job_file(ids_job: ol.Job, tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    launch = LaunchOptions.from_mapping({"mesh": {"dp": 2}, "strategy": "packed", "layout": "megatron", "prefetch": 3})
    path.write_text(dump_job_yaml(ids_job, launch))
    return path


def test_a_job_file_from_python_is_the_job(ids_job: ol.Job, job_file: Path) -> None:
    assert ol.load_job(job_file) == ol.load_job(str(job_file)) == ids_job


def test_the_launch_section_of_a_file_gives_the_defaults_of_launch(job_file: Path, cache: str) -> None:
    with ol.launch(str(job_file), runtime="inline", cache=cache) as service:
        assert service.mesh == ol.ClientPlaceTree(dp=2)
        assert "tokens" in next(service.client(1)).microbatches[0]  # Megatron's key
    with ol.launch(job_file, mesh="tp=2", layout="hf", runtime="inline", cache=cache) as service:
        assert service.mesh == ol.ClientPlaceTree(tp=2)
        assert "input_ids" in next(service.client(1)).microbatches[0]


def test_text_and_mappings_are_taken_as_on_the_command_line(ids_job: ol.Job, cache: str) -> None:
    def digests(**given: Any) -> StreamDigests:
        with ol.launch(ids_job, runtime="inline", cache=cache, **given) as service:
            return digest_service(service, steps=3)

    expected = digests(mesh=ol.ClientPlaceTree(dp=2), strategy=ol.strategies.packed(method="first_fit"))
    assert digests(mesh="dp=2", strategy={"packed": {"method": "first_fit"}}) == expected
    assert digests(mesh={"dp": 2}, strategy="{packed: {method: first_fit}}") == expected
    packed = digests(mesh=ol.ClientPlaceTree(dp=2), strategy=ol.strategies.packed())
    assert digests(mesh="dp=2", strategy="packed") == packed


def test_a_python_file_is_launched_with_its_own_strategy(job_file: Path, tmp_path: Path, cache: str) -> None:
    path = tmp_path / "job.py"
    path.write_text(PYTHON.format(path=str(job_file)))
    with ol.launch(path, runtime="inline", cache=cache) as service:
        assert service.mesh == ol.ClientPlaceTree(dp=2)
        next(service.client(0))
    loaded = load_job_file(path)
    assert loaded.arguments({})["strategy"] is loaded.function
    assert loaded.arguments({"strategy": "hdp"})["strategy"] is not loaded.function


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": "dq=2"}, "launch: mesh: mesh 'dq=2': unknown axis 'dq'"),
        ({"mesh": {"dp": 0}}, "dp is 0: it must be a whole number"),
        ({"mesh": 2}, "launch: mesh is 2, not a mesh"),
        ({"strategy": "paked"}, "launch: strategy: there is no strategy 'paked'.* Did you mean 'packed'"),
        ({"strategy": {"packed": {"methd": 1}}}, "launch: strategy.packed.methd: unknown key.* Did you mean 'method'"),
        ({"strategy": 7}, "launch: strategy is 7, not a function"),
        ({"layout": "huggingface"}, "launch: layout is 'huggingface': expected 'hf'"),
        ({"layout": 7}, "launch: layout is 7; batches would have unknown keys"),
    ],
)
def test_wrong_words_are_told_as_of_a_file(given: dict[str, Any], message: str, ids_job: ol.Job) -> None:
    with pytest.raises(ol.SpecError, match=message):
        ol.launch(ids_job, runtime="inline", **given)


def test_a_wrong_file_is_told_with_its_line(job_file: Path) -> None:
    job_file.write_text(job_file.read_text().replace("seed: 3", "seeed: 3"))
    line = next(n for n, text in enumerate(job_file.read_text().splitlines(), 1) if text.startswith("seeed"))
    for read in (ol.load_job, ol.launch):
        with pytest.raises(ol.SpecError, match=rf"job.yaml:{line}: seeed: unknown key.*'seed'"):
            read(job_file)
    with pytest.raises(ol.SpecError, match=r"job is a int, not an ol\.Job and not the path of a job file"):
        ol.launch(3)  # type: ignore[arg-type]


def test_what_a_file_says_of_processes_of_this_host_is_used_on_the_command_line_too() -> None:
    assert LaunchOptions(loader_hosts=2).arguments({"runtime": "local"})["loader_hosts"] == 2
    assert LaunchOptions(loader_hosts=2).arguments({})["loader_hosts"] == 2
    assert LaunchOptions(loader_hosts=2).arguments({"runtime": "inline"})["loader_hosts"] is None


def test_the_profile_beside_a_job_file_is_used_where_workers_are_counted_by_one(tmp_path: Path, job_file: Path) -> None:
    beside = tmp_path / "job.profile.json"
    loaded = load_job_file(job_file)
    assert loaded.arguments({})["profile"] is None
    assert loaded.arguments({"loaders_per_source": "auto"})["profile"] == str(beside)
    assert loaded.arguments({"scaling": True})["profile"] is None  # there is none, and it is not needed
    beside.write_text("{}")
    assert loaded.arguments({"scaling": True})["profile"] == str(beside)
    assert loaded.arguments({"scaling": True, "profile": "other.json"})["profile"] == "other.json"
