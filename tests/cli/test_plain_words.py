"""What a newcomer gets wrong is answered with the reason and the remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import overlord as ol
from overlord.errors import SourceError, SpecError, shortened
from overlord.job_files import load_job
from overlord.readers.files import list_files
from overlord.stores.places import store_path


@pytest.mark.parametrize("name", ["data.parquet", "rows.jsonl", "shard-0.tar", "table.csv"])
def test_a_file_of_data_in_place_of_a_job_is_told_how_a_job_names_it(name: str, tmp_path: Path):
    (tmp_path / name).touch()
    with pytest.raises(SpecError) as refused:
        load_job(tmp_path / name)
    assert "a file of data by its name, and a job file" in str(refused.value)
    written = str(refused.value).split("`")[1::2]
    (tmp_path / "job.yaml").write_text("\n".join(written))  # what the message shows is a job
    assert load_job(tmp_path / "job.yaml").sources[0].path == (str(tmp_path / name),)


def test_a_folder_in_place_of_a_job_is_told_how_a_job_names_it(tmp_path: Path):
    with pytest.raises(SpecError, match="this is a folder, and a job file"):
        load_job(tmp_path)


def test_an_address_in_place_of_a_job_is_told_which_commands_take_one(tmp_path: Path):
    (tmp_path / "service.address").write_text("unix:///tmp/overlord-x\n")
    for given in (tmp_path / "service.address", "unix:///tmp/overlord-x"):
        with pytest.raises(SpecError, match=r"address of a service, and a job file .*overlord steps show --store"):
            load_job(given)


def test_a_misspelt_argument_of_launch_is_told_which_one_was_meant():
    with pytest.raises(SpecError, match=r"launch: unknown argument 'mseh'.* Did you mean 'mesh'\?"):
        ol.launch("job.yaml", mseh="dp=2")  # type: ignore[call-arg]
    with pytest.raises(SpecError, match=r"connect: unknown argument 'stpe'.* Did you mean 'step'\?"):
        ol.connect("address", 0, stpe=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("path", ["$DATA/web", "${DATA}/*.jsonl"])
def test_a_variable_in_a_path_is_said_to_stay_as_it_is(path: str):
    with pytest.raises(SourceError, match=r"variables of the environment are not replaced. Write the path itself"):
        list_files([path])
    with pytest.raises(SpecError, match=r"store: there is no folder.*are not replaced"):
        store_path(path)
    with pytest.raises(SpecError, match=r"tokenizer: .*are not replaced"):
        ol.launch(
            ol.Job([ol.Source("a", "a.jsonl")], tokenizer=path, batch=ol.Batch(64, global_samples=4)), runtime="inline"
        )


def test_one_empty_file_is_one_file(tmp_path: Path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(SourceError, match=r"the only file of .* is empty; .* Write it again"):
        list_files([str(tmp_path / "a.jsonl")])
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(SourceError, match=r"all 2 files of .* are empty; .* Write them again"):
        list_files([str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (
            "Could not connect to server; Details: refused " + "x" * 160,
            "Could not connect to server",
        ),
        ("First sentence here. " + "Second sentence which is long " * 10, "First sentence here"),
        ("word " * 100, ("word " * 31).strip() + " ..."),
        ("Disk on fire.", "Disk on fire"),
    ],
)
def test_a_foreign_message_is_never_cut_in_the_middle_of_a_word(text: str, short: str):
    assert shortened(text) == short
    assert len(shortened(text)) <= 160


def test_reasons_that_differ_in_a_url_only_are_counted_as_one(tmp_path: Path):
    rows = [{"image": f"http://127.0.0.1:1/{n}.jpg", "text": "a"} for n in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def refuse(row: dict[str, bytes]) -> None:
        raise ValueError(f"cannot fetch {row['image'].decode()}")

    source = ol.Source("a", tmp_path / "a.jsonl", sample=ol.Custom(refuse, columns=["image"]))
    job = ol.Job([source], batch=ol.Batch(64, global_samples=4))
    with pytest.raises(
        SourceError, match=r"\((\d+) times: for instance, .*http://127.0.0.1:1/\d+.jpg[^;]*\)\. The"
    ) as told:
        ol.launch(job, runtime="inline", cache=tmp_path / "cache")
    assert "and other reasons" not in str(told.value)


def test_a_token_that_the_tokenizer_does_not_have_is_told_which_ones_it_has(tmp_path: Path):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 20)
    source = ol.Source("a", tmp_path / "a.jsonl", sample=ol.Text("text", eos="<|end_of_text|>"))
    job = ol.Job([source], tokenizer=tmp_path / "tokenizer.json", batch=ol.Batch(64, global_samples=4))
    with pytest.raises(SpecError, match=r"Did you mean '<\|endoftext\|>'\?.*its special tokens: '<\|endoftext\|>'"):
        ol.launch(job, runtime="inline", cache=tmp_path / "cache")


def test_a_state_of_a_data_loader_is_told_where_it_belongs():
    state = {"stream": json.dumps({"version": 1, "step": 7})}
    with pytest.raises(SpecError, match=r"step is what state_dict\(\) of a DataLoader returned.*load_state_dict"):
        ol.connect("address", 0, step=state)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"state is what state_dict\(\) of a DataLoader.*json.loads\(state"):
        ol.connect("address", 0, state=state)
    with pytest.raises(SpecError, match=r'is a whole state, not a number of steps. Pass step=state\["step"\]'):
        ol.connect("address", 0, step={"step": 7, "version": 1})  # type: ignore[arg-type]


def test_too_little_address_space_is_said_before_libraries_are_loaded():
    limited = [sys.executable, "-m", "overlord", "explain", "job.yaml"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -v 65536; exec "$@"', "bash", *limited], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "may have 64 MiB of address space (ulimit -v)" in done.stderr
    assert "Traceback" not in done.stderr
