"""What the documents show must be true: examples load, fields are described as they are, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest
import yaml

import overlord as ol
from overlord.job.spec_model import Spec, as_bytes
from overlord.job_files import LaunchOptions, load_job_file, read_manifest
from overlord.storage import filesystem_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
JOB_FILES = ROOT / "docs" / "job-files.md"
BATCHES = ROOT / "docs" / "batches.md"

# What a block of docs/job-files.md that shows only a part of a job is completed with.
REST = {
    "sources": "sources: [{name: web, path: web/}, {name: code, path: code/}]",
    "tokenizer": "tokenizer: tokenizer.json",
    "batch": "batch: {context_length: 512, global_samples: 8}",
}
SECTIONS: dict[str, type[Spec]] = {
    "Job": ol.Job,
    "Source": ol.Source,
    "Join": ol.Join,
    "Text": ol.Text,
    "Chat": ol.Chat,
    "Chat with images": ol.ImageChat,
    "Image and text": ol.ImageText,
    "Interleaved": ol.Interleaved,
    "Augment": ol.Augment,
    "Audio": ol.Audio,
    "Video": ol.Video,
    "Custom": ol.Custom,
    "Mixture": ol.Mixture,
    "Batch": ol.Batch,
    "Launch": LaunchOptions,
    "Layout": ol.Layout,
}
DESCRIBED = {
    "equal": [ol.Mixture()],
    "{text: text}": [ol.Text()],
    "one rank": [ol.ClientPlaceTree()],
    "–": [None, "", {}, ()],
    "hf": ["hf", ol.Layout()],
    "images": [("images",)],
    "4/3": [4 / 3],
    "CLIP's": [ol.Layout().mean, ol.Layout().std],
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def section(page: Path, title: str) -> str:
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{page.name} has no section {title!r}"
    return found[1]


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of the first table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [line.removesuffix("|").removeprefix("|").split(" |") for line in lines[2:]]
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]


def in_folder(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.fixture
def demo_folder(demo_files, tmp_path) -> Path:
    """A folder like the one that `make demo` writes."""
    return Path(shutil.copytree(demo_files.folder, tmp_path / "overlord-demo"))


@pytest.mark.parametrize("text", [text for page in PAGES for text in blocks(page, "yaml")])
def test_yaml_examples_load(text, tmp_path):
    given = yaml.safe_load(text)
    rest = "\n".join(line for key, line in REST.items() if key not in given)
    loaded = load_job_file(in_folder(tmp_path, "job.yaml", f"{text}\n{rest}\n"))
    for source in loaded.job.sources:
        for path in source.path:
            if path.startswith("hf://"):
                continue  # it would ask the Hub
            filesystem_of(path, source.storage_options)  # a wrong storage option is refused here


def run_steps(path: Path, cache: str) -> list[int]:
    with ol.launch(path, runtime="inline", cache=cache) as service:
        client = service.client(0)
        return [next(client).index for _ in range(2)]


def test_the_whole_job_runs_on_the_demos_data(demo_folder, cache):
    whole = blocks(JOB_FILES, "yaml")[0]
    assert run_steps(in_folder(demo_folder, "my-job.yaml", whole), cache) == [0, 1]
    schema = re.search(r"\$schema=(\S+)", whole)
    assert schema and (ROOT / "overlord-demo" / schema[1]).resolve().is_file()


def test_the_job_in_python_runs_on_the_demos_data(demo_folder, cache):
    assert run_steps(in_folder(demo_folder, "my_job.py", blocks(JOB_FILES, "python")[0]), cache) == [0, 1]


@pytest.mark.parametrize("language", ["jsonl", "csv"])
def test_manifests_load(language, tmp_path):
    (text,) = blocks(JOB_FILES, language)
    assert [source.name for source in read_manifest(in_folder(tmp_path, f"sources.{language}", text))] == [
        "web",
        "coyo",
    ]


def test_the_job_of_a_trainer_without_torch_can_be_built(tmp_path):
    """Building a job reads nothing, so the data need not be there."""
    tree = ast.parse(blocks(ROOT / "docs" / "trainers.md", "python")[0])
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.Assign)]
    loaded = load_job_file(in_folder(tmp_path, "job.py", ast.unparse(tree)))
    assert loaded.job.names == ["web", "coyo"]


@pytest.mark.parametrize(("title", "spec"), SECTIONS.items(), ids=SECTIONS)
def test_every_field_is_described_with_its_default(title, spec):
    rows = rows_of(section(BATCHES if spec is ol.Layout else JOB_FILES, title))
    fields = {field.alias or name: field for name, field in spec.model_fields.items() if name != "kind"}
    described = [row[0].strip("`") for row in rows]
    # What two kinds share is described once; the other lists the names and says where.
    shared = [name.strip("` ") for row in rows if ", " in row[0] for name in row[0].split(",")]
    own = {row[0].strip("`"): row for row in rows if ", " not in row[0]}
    assert sorted([*own, *shared]) == sorted(fields), described
    assert set(shared) <= set(ol.ImageText.model_fields)
    for name, (_, default, meaning) in own.items():
        field = fields[name]
        assert meaning
        if field.is_required():
            assert default == "required"
            continue
        shown, value = default.strip("`"), field.get_default()
        if shown in DESCRIBED:
            assert value in DESCRIBED[shown]
        else:
            assert value == (as_bytes(shown) if shown.endswith("iB") else yaml.safe_load(shown))


def test_every_key_of_every_layout_is_described(mixed_job, cache):
    text = BATCHES.read_text()
    for keys in ("hf", "megatron", "torchtitan"):
        for rows in ("packed", "padded"):
            job = mixed_job.replace(batch=ol.Batch(2048, global_samples=8))
            with ol.launch(job, runtime="inline", cache=cache, layout=ol.Layout(keys, rows=rows)) as service:
                found = {key for batch in next(service.client()).microbatches for key in batch}
            assert [key for key in found if f"`{key}`" not in text] == []


def test_the_table_of_temperatures_is_right():
    text = section(JOB_FILES, "Weights")
    table = rows_of(text[text.index("| T |") :])
    names, sizes = ["web", "code", "wiki"], {"web": 90.0, "code": 9.0, "wiki": 1.0}
    assert len(table) == 4
    for temperature, *shares in table:
        weights = ol.Mixture(temperature=float(temperature)).weights_at(0, names, sizes)
        assert [float(share.strip("% ")) for share in shares] == pytest.approx(
            [100 * weight / sum(weights) for weight in weights], abs=0.051
        )


def test_the_table_of_schedules_is_right():
    text = section(JOB_FILES, "Schedules")
    forms = [yaml.safe_load(block)["mixture"] for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    mixtures = [ol.Mixture.model_validate(form) for form in forms]
    assert [mixture.schedule for mixture in mixtures] == ["stages", "linear", "step"]
    for step, *cells in rows_of(text):
        for mixture, cell in zip(mixtures, cells, strict=True):
            assert mixture.weights_at(float(step), ["web", "code"], {}) == pytest.approx(yaml.safe_load(f"[{cell}]"))


def test_the_table_of_stopping_is_right(tmp_path, cache):
    for name, count in (("a", 4), ("b", 2)):
        in_folder(tmp_path, f"{name}.jsonl", '{"ids": [1, 2, 3]}\n' * count)
    sample = ol.Text("ids", tokenized=True)
    sources = [ol.Source(name, str(tmp_path / f"{name}.jsonl"), sample=sample) for name in "ab"]
    for stopping, drawn, _ in rows_of(section(JOB_FILES, "Stopping")):
        mixture = ol.Mixture(stopping=stopping.strip("`"))
        job = ol.Job(sources, mixture, batch=ol.Batch(8, global_samples=1), max_steps=10)
        with ol.launch(job, runtime="inline", cache=cache) as service:
            found = [b.meta.sample_ids[0].source for step in service.client() for b in step.microbatches]
        assert " ".join(found) == drawn.removesuffix(" ..")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_documents_exist(page):
    if page.name == "CHANGELOG.md":  # it names files of its time
        return
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())
    assert named or page.name != "architecture.md"
    assert [path for path in named if not any((at / path).is_file() for at in (ROOT, ROOT / "src" / "overlord"))] == []
