"""Job files and manifests: what is read, and where in the file an error is shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import yaml

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SourceError, SpecError
from overlord.job.layout_specs import Layout
from overlord.job.spec_model import Spec
from overlord.job.specs import (
    Audio,
    Augment,
    Batch,
    Chat,
    Custom,
    ImageText,
    Interleaved,
    Job,
    Mixture,
    Source,
    Text,
    Video,
)
from overlord.job_files import (
    JobFile,
    LaunchOptions,
    dump_job_yaml,
    job_file_schema,
    load_job_file,
    write_job_schema,
)
from overlord.session import launch

SCHEMA = Path(__file__).parents[2] / "docs" / "job.schema.json"

JOB = """\
sources:
  - name: web
    path: web/*.parquet
    sample: {text: body}
    shuffle_bytes: 16MB
  - name: coyo
    path: [s3://bucket/coyo/, ../coyo/]
    sample: {kind: image_text, image: jpg, text: caption, merge: 2}
mixture:
  stages:
    - [0, {web: 0.7, coyo: 0.3}]
    - [1000, {web: 0.4, coyo: 0.6}]
tokenizer: tokenizer.json
batch: {context_length: 8192, global_tokens: 1e6}
launch:
  mesh: {dp: 2, tp: 2}
  prefetch: 4
  store: run
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        load_job_file(path)
    text = str(caught.value)
    assert all(line.startswith(str(path.parent)) for line in text.splitlines()) and "pydantic" not in text
    return text.replace(f"{path.parent}/", "")


# ---- YAML


def test_yaml_job(tmp_path: Path) -> None:
    found = load_job_file(write(tmp_path / "jobs" / "job.yaml", JOB))
    job, launch = found.job, found.launch
    assert job.sources[0] == Source(
        "web", f"{tmp_path}/jobs/web/*.parquet", sample=Text("body"), shuffle_bytes=16_000_000
    )
    assert job.sources[1].path == ("s3://bucket/coyo/", f"{tmp_path}/coyo/")
    assert job.sources[1].sample == ImageText("jpg", "caption", merge=2)
    assert job.tokenizer == f"{tmp_path}/jobs/tokenizer.json"
    assert job.batch == Batch(8192, global_tokens=1_000_000)
    assert job.mixture.weights_at(1000, job.names, {}) == [0.4, 0.6]
    assert launch.mesh == ClientPlaceTree(dp=2, tp=2)
    assert (launch.prefetch, launch.loaders_per_source, launch.layout) == (4, 1, Layout())
    assert launch.store == f"{tmp_path}/jobs/run"


def test_paths_without_a_folder_are_taken_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "job.yaml", JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert load_job_file("job.yaml").job.tokenizer == f"{tmp_path}/tokenizer.json"
    write(tmp_path / "job.yaml", JOB.replace("tokenizer.json", "~/tokenizer.json"))
    assert load_job_file("job.yaml").job.tokenizer == "/home/me/tokenizer.json"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "    sample: {text: body}",
            "    smaple: {text: body}",
            ["job.yaml:4: sources[0].smaple (source 'web')", "'sample'?"],
        ),
        ("shuffle_bytes: 16MB", "shuffle_bytes: much", ["job.yaml:5: sources[0].shuffle_bytes", "is 'much'"]),
        ("name: coyo", "name: web", ["job.yaml:6: sources[1].name", "also the name of sources[0]"]),
        ("name: web", "name: no", ["job.yaml:2: sources[0].name is False", "put it in quotes"]),
        ("merge: 2", "merge: two", ["job.yaml:8: sources[1].sample.merge", "is 'two'", "whole number"]),
        ("kind: image_text", "kind: custom", ["job.yaml:8:", "Use a Python job file"]),
        ("coyo: 0.6", "coyoo: 0.6", ["job.yaml:12: mixture.stages[1][1].coyoo", "Did you mean 'coyo'?"]),
        (
            "web: 0.4, coyo: 0.6",
            "web: 0",
            ["job.yaml:12: mixture.stages[1]", "stage 1 (from step 1000) sum to zero"],
        ),
        (
            "tokenizer: tokenizer.json",
            "lag: 16",
            ["job.yaml:1: tokenizer: missing", "'web' holds text", 'tokenizer: "tokenizer.json"', "tokenized: true"],
        ),
        ("tokenizer:", "tokeniser:", ["job.yaml:13: tokeniser: unknown key", "Did you mean 'tokenizer'?"]),
        ("context_length: 8192", "context_length: 0", ["job.yaml:14: batch.context_length is 0"]),
        ("context_length: 8192", "contxt_length: 8192", ["batch.contxt_length: unknown key", "'context_length'?"]),
        ("global_tokens: 1e6", "global_tokens: 64", ["job.yaml:14:", "Write at least global_tokens: 8192,"]),
        ("    shuffle_bytes: 16MB", "    tolerance: some", ["tolerance (source 'web') is 'some'", "such as 0.3"]),
        ("batch: {context_length: 8192, global_tokens: 1e6}", "", ["job.yaml:1: batch: missing", "Add it"]),
        (
            "mesh: {dp: 2",
            "mesh: {ddp: 2",
            ["job.yaml:16: launch: mesh: unknown axis 'ddp'", "Did you mean 'dp'?"],
        ),
        ("mesh: {dp: 2, tp: 2}", "mesh: 8", ["job.yaml:16: launch: mesh is 8", "{dp: 2, tp: 2}"]),
        ("prefetch: 4", "prefetch: 0", ["job.yaml:17: launch: prefetch is 0", "at least 1"]),
        (
            "prefetch: 4",
            "prefetch: 16",
            ["launch.prefetch is 16, but the job's lag is 16", "larger than prefetch"],
        ),
        ("store: run", "stor: run", ["job.yaml:18: launch: stor: unknown key", "Did you mean 'store'?"]),
        (
            "  store: run",
            "  prefetch: 5",
            ["job.yaml:18: the key 'prefetch' is given twice (first on line 17)"],
        ),
        ("text: caption", "text: caption, image: x", ["job.yaml:8: the key 'image' is given twice"]),
        (
            "tokenizer: tokenizer.json",
            "tokenizer: [",
            ["job.yaml:15: this is not plain YAML", "begins on line 13", "indentation"],
        ),
        (
            "tokenizer: tokenizer.json",
            "tokenizer: !!python/name:os.system",
            ["job.yaml:13: this is not plain YAML"],
        ),
        ("  - name: web", "    name: web", ["job.yaml:6: this is not plain YAML"]),
    ],
)
def test_yaml_refused(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    assert old in JOB
    text = refusal(write(tmp_path / "job.yaml", JOB.replace(old, new)))
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ("", "this one holds nothing"),
        ("- a\n- b\n", "this one holds a list"),
        ("sources: {web: x.parquet}\n", "sources is a mapping of 'web', but must be a list"),
        ("sources: {manifest: 3}\n", "sources.manifest is 3, not the path of a file"),
        ("a: &a [*a]\n", "has an alias inside of what it names"),
        ("a: " + "[" * 50_000, "is nested more than 100 deep"),
    ],
)
def test_files_of_another_shape(tmp_path: Path, contents: str, words: str) -> None:
    assert words in refusal(write(tmp_path / "job.yaml", contents))


def test_errors_of_a_launch_name_the_line_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "web.jsonl").write_text('{"ids": [1, 2]}\n')
    sources = [{"name": name, "path": f"{name}.jsonl", "sample": {"text": "ids", "tokenized": True}}
               for name in ("web", "webb")]  # fmt: skip
    (tmp_path / "sources.jsonl").write_text("".join(json.dumps(source) + "\n" for source in sources))
    batch = "batch: {context_length: 8, global_samples: 1}\n"
    listed = "".join(f"  - {json.dumps(source)}\n" for source in sources)
    for text, place in ((f"sources:\n{listed}", "job.yaml:3"), ("sources: sources.jsonl\n", "sources.jsonl:2")):
        file = write(tmp_path / "job.yaml", text + batch)
        with pytest.raises(SourceError, match=rf"^{tmp_path}/{place}: source 'webb': .* Did you mean 'web.jsonl'\?$"):
            launch(file, runtime="inline", cache=tmp_path / "cache")
    sources[1] = sources[0] | {"name": "b", "sample": {"text": "idz", "tokenized": True}}
    file = write(tmp_path / "job.yaml", f"{batch}sources: {json.dumps(sources)}\n")
    with pytest.raises(SourceError, match=rf"^{file}:2: source 'b': .* has no column 'idz'"):
        launch(file, runtime="inline", cache=tmp_path / "cache")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "none.yaml")
    assert "there is no such file" in refusal(tmp_path / "none.py")
    assert "ends in .yaml, .yml, .json or .py, not '.toml'" in refusal(tmp_path / "job.toml")
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read (Is a directory)" in refusal(tmp_path / "folder.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xe9\n")
    assert "byte 6 is not UTF-8" in refusal(tmp_path / "latin.yaml")


def test_a_file_of_aliases_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    assert "this file stands for more than 200000 values" in refusal(write(tmp_path / "job.yaml", "\n".join(lines)))


# ---- kinds of samples


def job_of(sample: str, more: str = "") -> str:
    sources = f"[{{name: a, path: x, sample: {sample}}}]"
    return f"sources: {sources}\ntokenizer: t.json\nbatch: {{context_length: 4096, global_samples: 8}}\n{more}"


@pytest.mark.parametrize(
    ("written", "sample"),
    [
        ("{text: body}", Text("body")),
        ("{column: body, bos: true, eos: 0}", Text("body", bos=True, eos=0)),
        ("{text: body, eos: true}", Text("body", eos=True)),
        ("{chat: turns}", Chat("turns")),
        ("{chat: turns, template: chatml}", Chat("turns", template="chatml")),
        ("{chat: {loss: last}, template: chatml}", Chat(template="chatml", loss="last")),
        ("{chat: {template: chatml, loss: last}}", Chat(template="chatml", loss="last")),
        ("{messages: turns, process: false, deadline: 3}", Chat("turns", process=False, deadline=3)),
        ("{image_text: png}", ImageText("png")),
        ("{image_text: png, text: alt, merge: 2}", ImageText("png", "alt", merge=2)),
        ("{image: png, text: alt, before: '<s>', after: 7}", ImageText("png", "alt", before="<s>", after=7)),
        ("{image: jpg, augment: {flip: 0.5, crop: 0.8}}", ImageText(augment=Augment(flip=0.5, crop=0.8))),
        ("{image: jpg, resize: any, temporal: 2}", ImageText(resize="any", temporal=2)),
        ("{interleaved: pictures}", Interleaved("pictures")),
        ("{interleaved: [a, b], text: body}", Interleaved(["a", "b"], "body")),
        ("{images: [0.jpg, 1.jpg], parts: json.parts}", Interleaved(["0.jpg", "1.jpg"], parts="json.parts")),
        ("{images: pictures, text: body, marker: '<pic>'}", Interleaved("pictures", "body", marker="<pic>")),
        ("{audio: wav}", Audio("wav")),
        ("{audio: wav, text: said}", Audio("wav", "said")),
        ("{audio: {mels: 128}, text: said}", Audio(text="said", mels=128)),
        ("{kind: audio, audio: mp3, text: said, mels: 128}", Audio("mp3", "said", mels=128)),
        ("{video: mp4, fps: 1, max_tokens: 4096}", Video("mp4", fps=1, max_tokens=4096)),
    ],
)
def test_every_kind_of_sample_is_read_and_reads_back(tmp_path: Path, written: str, sample: Spec) -> None:
    found = load_job_file(write(tmp_path / "job.yaml", job_of(written)))
    assert found.job.sources[0].sample == sample
    assert load_job_file(write(tmp_path / "again.yaml", dump_job_yaml(found.job))) == found


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{chat: {loss: al}}", ["sources[0].sample.loss (source 'a') is 'al'", "'assistant', 'all' or 'last'"]),
        ("{chat: {deadline: 0}}", ["sources[0].sample.deadline", "at least 0.01", "Give seconds"]),
        ("{audio: {sample_rate: 16001}}", ["sources[0].sample.sample_rate", "Write sample_rate: 16000"]),
        ("{kind: audio, frames_per_token: 3}", ["sources[0].sample.frames_per_token", "is odd"]),
        ("{video: {max_frames: 2}}", ["sources[0].sample.m", "_frames"]),
        ("{video: mp4, fsp: 1}", ["sources[0].sample.fsp", "Did you mean 'fps'?"]),
        ("{chat: a, templat: chatml}", ["sources[0].sample.templat", "Did you mean 'template'?"]),
        ("{chat: a, messages: b}", ["sources[0].sample.messages", "given twice, here and by chat"]),
        ("{images: []}", ["sources[0].sample.images", "list of columns"]),
        ("{images: a, parts: b, marker: c}", ["sources[0].sample.parts", "text and marker would be ignored"]),
        ("{image: a, augment: {flip: 2}}", ["sources[0].sample.augment.flip", "between 0 and 1"]),
        ("{image: a, size: 100}", ["sources[0].sample.size", "not a multiple of patch*merge = 16"]),
        ("{column: a, bos: [1]}", ["sources[0].sample.bos", "is [1]"]),
        ("{kind: vidio}", ["sources[0].sample.kind", "Did you mean 'video'?"]),
    ],
)
def test_a_wrong_sample_names_its_field(tmp_path: Path, written: str, words: list[str]) -> None:
    text = refusal(write(tmp_path / "job.yaml", job_of(written)))
    assert text.startswith("job.yaml:1: ")
    for word in words:
        assert word in text


def test_what_was_given_stays_given_although_it_is_the_default(tmp_path: Path) -> None:
    """A processor folder fills in what a sample leaves open, and nothing else."""
    path = write(tmp_path / "job.yaml", job_of("{image: jpg, patch: 16}"))
    again = load_job_file(write(tmp_path / "again.yaml", dump_job_yaml(load_job_file(path).job)))
    assert "patch" in again.job.sources[0].sample.model_fields_set
    assert "merge" not in again.job.sources[0].sample.model_fields_set


@pytest.mark.parametrize("template", ["chat.jinja", "sub/chat.jinja"])
def test_template_files_are_seen_from_the_job_file(tmp_path: Path, template: str) -> None:
    found = load_job_file(write(tmp_path / "job.yaml", job_of(f"{{chat: {{template: {template}}}}}")))
    assert found.job.sources[0].sample == Chat(template=f"{tmp_path}/{template}")
    named = load_job_file(write(tmp_path / "named.yaml", job_of("{chat: {template: chatml}}")))
    assert named.job.sources[0].sample == Chat(template="chatml")


# ---- layouts


@pytest.mark.parametrize(
    ("written", "layout"),
    [
        ("megatron", Layout("megatron")),
        ("{keys: torchtitan}", Layout("torchtitan")),
        ("{rows: padded, block: 16}", Layout(rows="padded", block=16)),
        (
            "{keys: megatron, slicing: contiguous, sequence_parallel: true, positions: mrope}",
            Layout("megatron", slicing="contiguous", sequence_parallel=True, positions="mrope"),
        ),
        ("{pixels: float32, mean: [0, 0, 0], std: [1, 1, 1]}", Layout(pixels="float32", mean=(0, 0, 0), std=(1, 1, 1))),
    ],
)
def test_layouts_are_read_and_read_back(tmp_path: Path, written: str, layout: Layout) -> None:
    more = f"launch: {{layout: {written}, placement: constructor}}\n"
    found = load_job_file(write(tmp_path / "job.yaml", job_of("{text: a}", more)))
    assert (found.launch.layout, found.launch.placement) == (layout, "constructor")
    assert load_job_file(write(tmp_path / "again.yaml", dump_job_yaml(found.job, found.launch))) == found


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("{layout: hff}", ["job.yaml:4: launch: layout is 'hff'", "'hf', 'megatron' or 'torchtitan'", "Did you mean"]),
        ("{layout: 3}", ["launch: layout is 3", "{keys: hf, rows: padded}"]),
        ("{layout: {rows: pad}}", ["launch: layout.rows is 'pad'", "'packed', 'padded' or 'full'"]),
        ("{layout: {row: packed}}", ["launch: layout.row: unknown key", "Did you mean 'rows'?"]),
        ("{layout: {block: 0}}", ["launch: layout.block is 0", "at least 1"]),
        ("{placement: loaders}", ["launch: placement is 'loaders'", "Did you mean 'loader'?"]),
    ],
)
def test_layouts_refused(tmp_path: Path, written: str, words: list[str]) -> None:
    text = refusal(write(tmp_path / "job.yaml", job_of("{text: a}", f"launch: {written}\n")))
    for word in words:
        assert word in text


@pytest.mark.parametrize("written", ['"megatron"', 'ol.Layout("megatron")', '{"keys": "megatron"}'])
def test_a_python_file_may_have_a_layout(tmp_path: Path, written: str) -> None:
    lines = [
        "import overlord as ol",
        'job = ol.Job([ol.Source("a", "x", sample=ol.Text("i", tokenized=True))], batch=ol.Batch(8, global_samples=1))',
        f"layout = {written}",
    ]
    assert load_job_file(write(tmp_path / "job.py", "\n".join(lines))).launch.layout == Layout("megatron")


# ---- manifests named by a job file


def job_with(sources: str) -> str:
    return f"sources: {sources}\ntokenizer: t.json\nbatch: {{context_length: 512, global_samples: 8}}\n"


@pytest.mark.parametrize("form", ["{manifest: lists/all.jsonl}", "lists/all.jsonl"])
def test_jsonl_manifest(tmp_path: Path, form: str) -> None:
    rows = [{"name": f"s{n}", "path": f"s{n}/*.parquet", "weight": n, "sample": {"text": "body"}} for n in range(306)]
    write(tmp_path / "lists" / "all.jsonl", "\n\n".join(map(json.dumps, rows)) + "\n")
    job = load_job_file(write(tmp_path / "job.yaml", job_with(form))).job
    assert len(job.sources) == 306
    assert job.sources[7] == Source("s7", f"{tmp_path}/lists/s7/*.parquet", weight=7, sample=Text("body"))


def test_problems_of_the_whole_job_name_the_line_of_the_manifest(tmp_path: Path) -> None:
    write(tmp_path / "m.jsonl", '{"name": "a", "path": "x"}\n\n{"name": "a", "path": "y"}\n')
    job = write(tmp_path / "job.yaml", job_with("m.jsonl"))
    assert "m.jsonl:3: sources[1].name (source 'a')" in refusal(job)
    write(tmp_path / "m.jsonl", "")
    assert "m.jsonl: the manifest names no source" in refusal(job)
    (tmp_path / "m.jsonl").unlink()
    assert "m.jsonl: there is no such file" in refusal(job)


# ---- Python files

PYTHON = """\
from overlord.job.specs import Batch, Custom, Job, Source
import {neighbour}

SCALE = 2

def double(row):
    return {{"tokens": [SCALE * token for token in row["ids"]]}}

job = Job(
    sources=[Source("own", "own/*.parquet", sample=Custom(double, columns=["ids"]))],
    batch=Batch({neighbour}.LENGTH, global_samples=8),
)
mesh = {mesh}
"""


def test_python_job(tmp_path: Path) -> None:
    write(tmp_path / "lengths_of_mine.py", "LENGTH = 64\n")
    path_before = list(sys.path)
    text = PYTHON.format(neighbour="lengths_of_mine", mesh='"dp=2,tp=2"')
    found = load_job_file(write(tmp_path / "job.py", text))
    del sys.modules["lengths_of_mine"]
    assert sys.path == path_before
    assert found.launch.mesh == ClientPlaceTree(dp=2, tp=2)
    assert found.job.batch.context_length == 64
    assert found.job.sources[0].path == (f"{tmp_path}/own/*.parquet",)
    sample = cloudpickle.loads(cloudpickle.dumps(found.job)).sources[0].sample
    assert isinstance(sample, Custom) and sample.fn({"ids": [1, 2]}) == {"tokens": [2, 4]}


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ("x = 1\n\n1 / 0\n", ["job.py:3: ZeroDivisionError: division by zero", "could not be built"]),
        ("x = 1\njob = = 2\n", ["job.py:2: SyntaxError: invalid syntax"]),
        ("import nowhere_to_be_found\n", ["job.py:1: ModuleNotFoundError"]),
        ("raise SystemExit(3)\n", ["job.py:1: SystemExit: 3"]),
        (
            "from overlord.job.specs import *\n\nbatch = Batch(0, global_samples=1)\n",
            ["job.py:3: Batch: context_length is 0"],
        ),
        ("x = 1\n", ["job.py: the file has no `job`", "job = ol.Job(..)"]),
        ("job = {}\n", ["has a `job` that is a dict"]),
    ],
)
def test_python_refused(tmp_path: Path, contents: str, words: list[str]) -> None:
    text = refusal(write(tmp_path / "job.py", contents))
    for word in words:
        assert word in text


def test_python_mesh_refused(tmp_path: Path) -> None:
    write(tmp_path / "lengths_of_mine.py", "LENGTH = 64\n")
    text = PYTHON.format(neighbour="lengths_of_mine", mesh='{"dp": "x"}')
    assert "job.py: mesh: dp is 'x', not a whole number" in refusal(write(tmp_path / "job.py", text))
    del sys.modules["lengths_of_mine"]


# ---- writing

SOURCES = [
    Source("web", "/data/web/*.parquet", shuffle_bytes=0, lengths="sidecar", storage_options={"region": "x"}),
    Source("coyo", ["s3://b/x", "/y"], sample=ImageText("png", "alt", image_token=7), tolerance=0.5),
]


@pytest.mark.parametrize(
    "mixture",
    [
        None,
        Mixture({"web": 0.25, "coyo": 1e-7}, temperature=2, level="token"),
        Mixture.stages([(0, {"web": 1}), (10_000, {"web": 1, "coyo": 3})], stopping="first_exhausted"),
        Mixture.linear({"web": {0: 1.0, 1000.5: 0.1}}, granularity="substep"),
        Mixture.step({"web": {0: 1.0, 1000: 0.1}}, max_repetition=3),
    ],
)
def test_what_is_written_reads_back(tmp_path: Path, mixture: Mixture | None) -> None:
    job = Job(
        SOURCES,
        mixture,
        tokenizer="/t: #odd.json",
        batch=Batch(8192, global_tokens=2**20, microbatches=2),
        overlength="split",
        max_steps=30,
    )
    launch = LaunchOptions(mesh=ClientPlaceTree(dp=2, order="dp-pp-cp-tp"), prefetch=3, store="/s", steps=5)
    assert load_job_file(write(tmp_path / "a.yaml", dump_job_yaml(job, launch))) == JobFile(job, launch)
    assert load_job_file(write(tmp_path / "b.yaml", dump_job_yaml(job))) == JobFile(job, LaunchOptions())


def test_an_evaluation_reads_back(tmp_path: Path) -> None:
    job = Job(SOURCES, tokenizer="/t", batch=Batch(8192, global_samples=2)).evaluation()
    assert load_job_file(write(tmp_path / "a.yaml", dump_job_yaml(job))).job == job


def test_the_written_file_is_for_people() -> None:
    text = dump_job_yaml(Job(SOURCES, tokenizer="/t", batch=Batch(8192, global_samples=2)))
    assert "# Seed of the order; another seed is another stream.\nseed: 0\n" in text
    assert "  # Steps built ahead of each trainer.\n  prefetch: 2\n" in text
    assert "  mesh: {pp: 1, dp: 1, cp: 1, tp: 1}\n" in text
    assert max(map(len, text.splitlines())) <= 110
    assert set(yaml.safe_load(text)) == {*Job.model_fields, "launch"}


def test_functions_cannot_be_written() -> None:
    source = Source("own", "x", sample=Custom(lambda row: row, name="mine"))
    with pytest.raises(SpecError, match=r"source 'own': its sample is the Python function 'mine'.*Python file"):
        dump_job_yaml(Job([source], batch=Batch(8, global_samples=1)))


# ---- the schema


def test_the_schema_in_the_docs_is_current(tmp_path: Path) -> None:
    write_job_schema(tmp_path / "schema.json")
    assert SCHEMA.read_text() == (tmp_path / "schema.json").read_text(), (
        "docs/job.schema.json is old; write it again with overlord.job_files.write_job_schema"
    )


def test_the_schema_covers_the_whole_file() -> None:
    schema = job_file_schema()
    assert set(schema["properties"]) == {*Job.known_keys(), "launch"}
    assert set(schema["$defs"]["LaunchOptions"]["properties"]) == set(LaunchOptions.model_fields)
    assert [form.get("type") for form in schema["properties"]["sources"]["anyOf"]] == [
        "array",
        "object",
        "string",
    ]
    assert all(ref in schema["$defs"] for ref in _refs(schema))


def test_the_schema_knows_the_short_forms() -> None:
    forms = {
        one["required"][0]: set(one["properties"])
        for one in job_file_schema()["$defs"]["Source"]["properties"]["sample"]["anyOf"]
        if "required" in one
    }
    assert sorted(forms) == ["audio", "chat", "image_chat", "image_text", "interleaved", "text", "video"]
    assert {"chat", "messages", "template", "loss"} <= forms["chat"]
    assert "kind" not in forms["chat"]


def _refs(part: Any) -> list[str]:
    if isinstance(part, dict):
        own = [part["$ref"].removeprefix("#/$defs/")] if "$ref" in part else []
        return own + [ref for value in part.values() for ref in _refs(value)]
    return [ref for value in part for ref in _refs(value)] if isinstance(part, list) else []
