"""Job files from Python: `ol.load_job`, `ol.launch(path)`, and arguments written as on the command line."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import overlord as ol
from overlord.job_files import LaunchOptions, dump_job_yaml, load_job_file
from overlord.launch_spec import Launch
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
    assert loaded.call({}).strategy is loaded.launch.strategy is not None
    assert loaded.call({"strategy": "hdp"}).strategy == ol.strategies.hdp()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh": "dq=2"}, "launch: mesh: mesh 'dq=2': unknown axis 'dq'"),
        ({"mesh": {"dp": 0}}, "dp is 0: it must be a whole number"),
        ({"mesh": 2}, "launch: mesh is 2: this must give the size of each axis"),
        ({"strategy": "paked"}, "launch: strategy: there is no strategy 'paked'.* Did you mean 'packed'"),
        ({"strategy": {"packed": {"methd": 1}}}, "launch: strategy.packed.methd: unknown key.* Did you mean 'method'"),
        ({"strategy": 7}, "launch: strategy is 7: this must be a strategy, its name, or a function"),
        ({"layout": "huggingface"}, "launch: layout is 'huggingface': expected 'hf'"),
        ({"layout": 7}, "launch: layout is 7: expected .*; batches would have unknown keys"),
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
    assert LaunchOptions(loader_hosts=2).call({"runtime": "local"}).loader_hosts == 2
    assert LaunchOptions(loader_hosts=2).call({}).loader_hosts == 2
    assert LaunchOptions(loader_hosts=2).call({"runtime": "inline"}).loader_hosts is None


def test_the_profile_beside_a_job_file_is_used_where_workers_are_counted_by_one(tmp_path: Path, job_file: Path) -> None:
    beside = tmp_path / "job.profile.json"
    loaded = load_job_file(job_file)
    assert loaded.call({}).profile is None
    assert loaded.call({"loaders_per_source": "auto"}).profile == str(beside)
    assert loaded.call({"scaling": True}).profile is None  # there is none, and it is not needed
    beside.write_text("{}")
    assert loaded.call({"scaling": True}).profile == str(beside)
    assert loaded.call({"scaling": True, "profile": "other.json"}).profile == "other.json"


def test_launch_takes_what_is_declared_with_the_same_defaults() -> None:
    parameters = {name: one for name, one in inspect.signature(ol.launch).parameters.items() if name != "job"}
    assert set(parameters) == set(Launch.known_keys())
    for name, parameter in parameters.items():
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default in (None, Launch.model_fields[name].get_default())
        assert f"        {name}: " in (ol.launch.__doc__ or "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shadows": "web"}, "shadows is 'web': this must be true, false, auto or a list"),
        ({"shadow": True}, "shadow: unknown key.* Did you mean 'shadows'"),
        ({"steps": 3}, "steps: unknown key"),
        ({"heartbeat": 0.1}, "heartbeat is 0.1: this must be at least 0.2; no role could answer that often"),
        ({"heartbeat": True}, "heartbeat is True: this must be a finite number"),
        ({"loaders_per_source": {"a": 0}}, "loaders_per_source.a is 0: this must be a whole number of at least 1"),
        ({"budget": {"cpus": 0}}, "budget.cpus is 0: this must be at least 1; nothing could be loaded"),
        ({"scaling": 3}, "scaling is 3: this must be true, false or ol.Scaling"),
        ({"skip_steps": -1}, "skip_steps is -1: this must be at least 0"),
        ({"runtime": "rai"}, "runtime is 'rai': expected 'local', 'ray' or 'inline'; nothing could run. Did you mean"),
        ({"address": "auto"}, "address: 'auto' is given and runtime is 'local', which has no cluster"),
        ({"store_options": {"key": ["s3cret"]}}, "store_options.key[^']*$"),
    ],
)
def test_a_wrong_option_is_told_alike_in_python_in_a_file_and_on_a_command_line(
    given: dict[str, Any], message: str, ids_job: ol.Job
) -> None:
    with pytest.raises(ol.SpecError, match=f"^launch: {message}"):
        LaunchOptions().call(given)
    with pytest.raises(ol.SpecError, match=f"^--flag: {message}"):
        LaunchOptions().call(given, locate=lambda _: "--flag")
    if not {*given} & {"shadow", "steps"}:
        with pytest.raises(ol.SpecError, match=f"^launch: {message}"):
            ol.launch(ids_job, **given)
