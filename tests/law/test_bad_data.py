"""What goes wrong while running: a deterministic stand-in, a count, a log line with the id; or a clear stop."""

from __future__ import annotations

import gzip
import io
import json
import logging
import tarfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
from PIL import Image
from tests.conftest import write_ids

import overlord as ol
from overlord.testing import delivered_pieces, stream_digests

ONCE = ol.Mixture(stopping="all_exhausted_without_replacement")


def jpeg(height=64, width=64, seed=0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return simplejpeg.encode_jpeg(pixels, quality=80, colorspace="RGB")


def bomb() -> bytes:
    """A PNG with 50,000 x 50,000 pixels in its header."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    data = bytearray(out.getvalue())
    data[16:24] = (50_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.fixture
def tokenizer(demo_files) -> str:
    return str(demo_files.tokenizer)


def text_job(path, tokenizer, **source) -> ol.Job:
    source = {"sample": ol.Text("text"), "tolerance": 1.0, **source}
    return ol.Job(
        sources=[ol.Source("s", str(path), **source)],
        mixture=ONCE,
        tokenizer=tokenizer,
        batch=ol.Batch(256, global_samples=4),
    )


def run(job, cache, where=None):
    with ol.launch(job, **(where or {"runtime": "inline"}), cache=cache) as service:
        labels = [
            (ids, row)
            for step in service.client()
            for batch in step.microbatches
            for ids, row in zip(
                batch.meta.sample_ids,
                np.split(batch["labels"][0], batch["cu_seq_lens_q"][1:-1]),
                strict=True,
            )
        ]
        return dict(labels), service.status()["sources"]["s"]


@pytest.mark.slow_on_ray
def test_unparsable_and_non_utf8_rows_become_stand_ins(tmp_path, tokenizer, cache, caplog, capfd, where, monkeypatch):
    monkeypatch.setenv("OVERLORD_LOG", "INFO")
    good = [json.dumps({"text": f"hello world number {i}"}).encode() for i in range(6)]
    good[2] = b'{"text": "cut off'
    good[4] = b'{"text": "bad \xff\xfe bytes"}'
    (tmp_path / "s.jsonl").write_bytes(b"\n".join(good))
    job = text_job(tmp_path / "s.jsonl", tokenizer)
    with caplog.at_level(logging.INFO, "overlord"):
        labels, status = run(job, cache)
    assert len(labels) == 6
    assert status["bad"] == 2 and status["bad_ids"] == ["s:0:2@0", "s:0:4@0"]
    named = [f"s:0:{row}@0 (row {row} of {tmp_path / 's.jsonl'})" for row in (2, 4)]
    assert status["bad_rows"] == named
    assert all(f"({one.partition('(')[2]}; a stand-in takes its place" in caplog.text for one in named)
    for row in (2, 4):
        assert (labels[ol.SampleId("s", row, 0)] == -100).all()
        assert f"bad sample s:0:{row}@0" in caplog.text
    assert (labels[ol.SampleId("s", 0, 0)] != -100).any()
    assert stream_digests(job, steps=9, cache=cache) == stream_digests(job, steps=9, cache=cache, **where)
    if where["runtime"] != "inline":  # also from another process, or another host
        said = capfd.readouterr().err
        assert "bad sample s:0:4@0" in said and ("bad sample s:0:2@0" in said or where["runtime"] == "ray")


@pytest.mark.parametrize("name", ["s.jsonl", "s.jsonl.gz"])
@pytest.mark.slow
def test_bad_lines_are_told_alike_if_workers_parse_them(tmp_path, tokenizer, cache, caplog, capfd, monkeypatch, name):
    monkeypatch.setenv("OVERLORD_LOG", "INFO")
    bad = ["{oops", "[1]", "", '{"text": null}', '{"text": 5}', '{"text": "\\ud800"}', '{"txt": "a"}', '{"text": ""}']
    lines = [json.dumps({"text": f"hello world number {i}"}) for i in range(40)] + bad
    text = "\n".join(lines[at * 7 % len(lines)] for at in range(len(lines)))
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    job = text_job(tmp_path / name, tokenizer)
    with caplog.at_level(logging.INFO, "overlord"):
        labels, status = run(job, cache)
    capfd.readouterr()
    found, told = run(job, cache, {"threads": 4})
    assert list(found) == list(labels) and all((found[one] == labels[one]).all() for one in labels)
    assert [told[key] for key in ("bad", "bad_rows")] == [status[key] for key in ("bad", "bad_rows")]
    assert status["bad"] == 6
    said, err = [r.getMessage() for r in caplog.records if "bad sample" in r.getMessage()], capfd.readouterr().err
    assert len(said) == 6 and all(one.partition("; a stand-in")[0] in err for one in said)
    assert stream_digests(job, steps=9, cache=cache) == stream_digests(
        job, steps=9, cache=cache, runtime="local", threads=4
    )


def test_a_reason_is_a_warning_once_and_each_id_is_logged(tmp_path, tokenizer, cache, caplog):
    lines = ['{"text": "fine"}', "not json"] * 32 + ['{"txt": "another key"}'] * 3
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    with caplog.at_level(logging.INFO, "overlord"):
        _, status = run(text_job(tmp_path / "s.jsonl", tokenizer), cache)
    assert status["bad"] == 35 and status["rows_read"] == 67 and len(status["bad_ids"]) == 32
    said = [r for r in caplog.records if "bad sample" in r.getMessage()]
    assert len(said) == 35
    warnings = sorted(r.getMessage() for r in said if r.levelno == logging.WARNING)
    assert len(warnings) == 2
    assert "column 'text' is missing or null in this row" in " ".join(warnings)
    assert "(32 samples of source 's' so far)" in " ".join(warnings)


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (ol.Text("nothing"), "column 'nothing' is missing or null"),
        (ol.ImageText("text", "text"), "no image of an allowed format"),
        (ol.Chat("text"), "not JSON"),
    ],
)
def test_a_source_whose_first_rows_are_all_bad_is_refused_at_launch(tmp_path, tokenizer, cache, sample, reason, caplog):
    table = pa.table({"text": [f"hello world {i}" for i in range(64)], "nothing": pa.nulls(64, pa.string())})
    pq.write_table(table, tmp_path / "s.parquet")
    if isinstance(sample, ol.Chat):
        sample = sample.replace(template="chatml")
    job = text_job(tmp_path / "s.parquet", tokenizer, sample=sample, tolerance=0.5)
    with pytest.raises(ol.SourceError, match=r"all of the first .* rows that were read are bad") as caught:
        ol.launch(job, runtime="inline", cache=cache)
    assert reason in str(caught.value) and "'s'" in str(caught.value)
    assert len([r for r in caplog.records if "bad sample" in r.getMessage()]) == 1


def test_bad_rows_behind_a_good_one_are_judged_by_the_tolerance(tmp_path, tokenizer, cache):
    (tmp_path / "s.jsonl").write_text('{"text": "fine"}\n' + "not json\n" * 63)
    job = text_job(tmp_path / "s.jsonl", tokenizer, tolerance=0.99).replace(seed=5)
    _, status = run(job, cache)
    assert status["bad"] == 63


def test_tolerance_stops_the_run(tmp_path, tokenizer, cache):
    (tmp_path / "s.jsonl").write_text('{"text": "fine"}\nnot json\n' * 4)
    with pytest.raises(ol.ToleranceError, match=r"source 's' has 4 bad samples among 8 read.*tolerance of 0 allows 0"):
        run(text_job(tmp_path / "s.jsonl", tokenizer, tolerance=0.0), cache)


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_images_that_do_not_decode_or_are_bombs(tmp_path, tokenizer, cache, where, caplog):
    good = jpeg(96, 64)
    truncated = good[: len(good) // 3]
    images = [good, b"not an image", bomb(), truncated, jpeg(64, 64, 1)]
    pq.write_table(pa.table({"jpg": images, "txt": ["a picture"] * 5}), tmp_path / "s.parquet")
    sample = ol.ImageText("jpg", "txt", patch=16, merge=2)
    job = text_job(tmp_path / "s.parquet", tokenizer, sample=sample)
    labels, status = run(job, cache, where)
    assert status["bad"] == 3
    if where["runtime"] == "inline":  # the service process logs to its own standard error
        assert "bad sample s:0:1@0: the bytes are no image of an allowed format" in caplog.text
        assert "bad sample s:0:2@0" in caplog.text and "2500000000 pixels" in caplog.text
        assert "bad sample s:0:3@0: does not decode" in caplog.text
    for row in (1, 2, 3):
        assert (labels[ol.SampleId("s", row, 0)] == -100).all()
    for row in (0, 4):
        assert (labels[ol.SampleId("s", row, 0)] != -100).any()


def test_length_column_that_lies_is_cut_padded_and_counted(tmp_path, cache):
    rows = [{"ids": [7] * 10, "n": 10}, {"ids": [8] * 10, "n": 4}, {"ids": [9] * 4, "n": 10}]
    (tmp_path / "s.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    source = {"sample": ol.Text("ids", tokenized=True), "lengths": "n"}
    job = text_job(tmp_path / "s.jsonl", None, **source)
    labels, status = run(job, cache)
    assert status["wrong_length"] == 2
    assert [len(labels[ol.SampleId("s", row, 0)]) for row in range(3)] == [10, 4, 10]
    assert (labels[ol.SampleId("s", 2, 0)][4:] == -100).all()
    with pytest.raises(ol.ToleranceError, match="another length than promised"):
        run(text_job(tmp_path / "s.jsonl", None, **source, tolerance=0.0), cache)


@pytest.mark.parametrize("claim", [0, -3])
def test_a_length_of_nothing_leaves_text_out_and_is_counted(tmp_path, cache, caplog, claim):
    rows = [{"ids": [7] * 10, "n": 10}, {"ids": [8] * 10, "n": claim}, {"ids": [], "n": 0}, {"ids": [9] * 4, "n": 4}]
    (tmp_path / "s.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    source = {"sample": ol.Text("ids", tokenized=True), "lengths": "n"}
    with caplog.at_level(logging.WARNING, "overlord"):
        labels, status = run(text_job(tmp_path / "s.jsonl", None, **source), cache)
    assert sorted(sample.row for sample in labels) == [0, 3]
    assert (status["wrong_length"], status["bad"], status["skipped"]) == (1, 0, 2)
    assert caplog.text.count(f"its length column says {claim} tokens, so its text of 10 is left out") == 1
    with pytest.raises(ol.ToleranceError, match="another length than promised"):
        run(text_job(tmp_path / "s.jsonl", None, **source, tolerance=0.0), cache)


@pytest.mark.parametrize("claim", [2**31 - 1, 2**31 + 5, 2**32, 2**62])
def test_a_wild_length_is_one_lie_and_not_a_flood(tmp_path, cache, claim):
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps({"ids": [1, 2, 3], "n": n}) + "\n" for n in (3, claim, 3)))
    job = text_job(path, None, sample=ol.Text("ids", tokenized=True), lengths="n").replace(overlength="split")
    with ol.launch(job, runtime="inline", cache=cache) as service:
        (step,) = service.client()
        assert 9 <= step.global_tokens < 2000
        assert all(batch.meta.segment_lengths.min() > 0 for batch in step.microbatches)
        assert service.status()["sources"]["s"]["wrong_length"] == 1


def test_honest_length_column_gives_the_same_stream(tmp_path, cache):
    path = write_ids(tmp_path / "s.jsonl", range(1, 60))
    source = {"sample": ol.Text("ids", tokenized=True)}
    plain = text_job(path, None, **source)
    named = text_job(path, None, **source, lengths="n")
    assert stream_digests(plain, steps=99, cache=cache) == stream_digests(named, steps=99, cache=cache)


@pytest.mark.slow_on_ray
@pytest.mark.slow_but_inline
def test_a_file_that_vanishes_during_the_run_stops_it(tmp_path, cache, where):
    for number in range(40):
        write_ids(tmp_path / "s" / f"{number:02d}.jsonl", [9] * 300)
    job = ol.Job(
        sources=[
            ol.Source("s", str(tmp_path / "s"), sample=ol.Text("ids", tokenized=True), shuffle_bytes=4000, tolerance=1)
        ],
        batch=ol.Batch(64, global_samples=50),
    )
    with ol.launch(job, **where, cache=cache) as service:
        client = service.client()
        next(client)
        for path in (tmp_path / "s").iterdir():
            path.unlink()
        with pytest.raises(ol.OverlordError, match=r"source 's'|\.jsonl") as caught:
            for step in client:
                assert step.index < 300
        assert isinstance(caught.value, ol.ReaderError | ol.SourceError)


@pytest.mark.slow_on_ray
def test_custom_function_that_fails_is_a_bad_sample_and_none_filters(tmp_path, cache, where):
    path = write_ids(tmp_path / "s.jsonl", [5, 6, 7, 8])

    def odd(row):
        if row["n"] == 6:
            raise ValueError("no sixes")
        return None if row["n"] == 7 else {"tokens": row["ids"], "loss_mask": [0, 0] + [1] * (int(row["n"]) - 2)}

    job = text_job(path, None, sample=ol.Custom(odd, columns=["ids", "n"]))
    labels, status = run(job, cache, where)
    assert sorted(sample.row for sample in labels) == [0, 1, 3]
    assert (status["bad"], status["skipped"]) == (1, 1)
    assert (labels[ol.SampleId("s", 3, 0)] == [-100, -100, 1003, 1003, 1003, 1003, 1003, 1003]).all()


def test_global_loss_tokens_is_the_number_of_labels(mixed_job, ids_job, cache):
    for job in (mixed_job, ids_job):
        with ol.launch(job, mesh=ol.ClientPlaceTree(dp=2), runtime="inline", cache=cache) as service:
            for one, two in zip(service.client(0), service.client(1), strict=False):
                batches = [*one.microbatches, *two.microbatches]
                assert sum(int((b["labels"] != -100).sum()) for b in batches) == one.global_loss_tokens
                if one.index == 5:
                    break


@pytest.mark.parametrize("mask", [[0, 1, 1], [False, True, True], [0.0, 1.0, 1.0], np.array([0, 1, 1], np.int8)])
def test_a_loss_mask_of_any_type_says_which_tokens_count(tmp_path, cache, mask):
    path = write_ids(tmp_path / "s.jsonl", [5, 6])
    job = text_job(path, None, sample=ol.Custom(lambda row: {"tokens": [1, 2, 3], "loss_mask": mask}))
    with ol.launch(job, runtime="inline", cache=cache) as service:
        step = next(service.client())
        assert step.global_loss_tokens == sum(int((b["labels"] != -100).sum()) for b in step.microbatches) == 4


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"loss_mask": [0, 0.5, 1]}, "a loss_mask with 0.5 at token 1"),
        ({"loss_mask": [0, 1, 300]}, "a loss_mask with 300 at token 2"),
        ({"loss_mask": [0, 1, float("nan")]}, "a loss_mask with nan at token 2"),
        ({"loss_mask": ["0", "1", "1"]}, "a loss_mask with 0 at token 0"),
        ({"loss_masks": [0, 1, 1]}, "'loss_masks', which no batch would have.*Did you mean 'loss_mask'"),
        ({"embedding": [0.1]}, "'embedding', which no batch would have; return 'tokens' and 'loss_mask' only"),
    ],
)
def test_what_no_batch_would_have_of_a_custom_sample_is_refused(tmp_path, cache, more, words):
    path = write_ids(tmp_path / "s.jsonl", [5] * 40)
    job = text_job(path, None, sample=ol.Custom(lambda row: {"tokens": [1, 2, 3], **more}), tolerance=0.01)
    with pytest.raises(ol.OverlordError, match=f"the custom function returned .*{words}"):
        ol.launch(job, runtime="inline", cache=cache)


def _launch_error(job, cache, **options) -> str:
    with pytest.raises(ol.SpecError) as caught:
        ol.launch(job, **{"runtime": "inline", "cache": cache, **options})
    return str(caught.value)


@pytest.mark.slow_but_inline
def test_unusable_sources_are_refused_before_anything_runs(tmp_path, tokenizer, cache, where):
    missing = text_job(tmp_path / "nothing" / "*.parquet", tokenizer)
    assert "nothing" in _launch_error(missing, cache, **where)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert "has no rows" in _launch_error(text_job(tmp_path / "empty.jsonl", tokenizer), cache, **where)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is no footer PAR1")
    assert "broken.parquet" in _launch_error(text_job(tmp_path / "broken.parquet", tokenizer), cache, **where)
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "column.parquet")
    message = _launch_error(text_job(tmp_path / "column.parquet", tokenizer), cache, **where)
    assert "text" in message and "body" in message
    with tarfile.open(tmp_path / "cut.tar", "w") as tar:
        info = tarfile.TarInfo("a.text")
        info.size = 5000
        tar.addfile(info, io.BytesIO(b"x" * 5000))
    (tmp_path / "cut.tar").write_bytes((tmp_path / "cut.tar").read_bytes()[:3000])
    assert "cut.tar" in _launch_error(text_job(tmp_path / "cut.tar", tokenizer), cache, **where)


def test_launch_arguments_are_checked(ids_job, cache, tmp_path):
    assert "not a multiple of 6" in _launch_error(ids_job, cache, mesh=ol.ClientPlaceTree(cp=3))
    assert "lag is 16 and prefetch is 16" in _launch_error(ids_job, cache, prefetch=16)
    assert "prefetch is 0" in _launch_error(ids_job, cache, prefetch=0)
    assert "layout is 'x'" in _launch_error(ids_job, cache, layout="x")
    assert "runtime is 'x'" in _launch_error(ids_job, cache, runtime="x")
    assert "holds no snapshot" in _launch_error(ids_job, cache, store=tmp_path, state="latest")
    assert "neither a tokenizer.json" in _launch_error(
        text_job(tmp_path / "x.jsonl", str(tmp_path / "no-tokenizer.json")), cache
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer file" in _launch_error(text_job(tmp_path / "x.jsonl", str(tmp_path)), cache)
    with ol.launch(ids_job, cache=cache, runtime="inline") as service, pytest.raises(ol.SpecError, match="rank 1 is"):
        service.client(rank=1)
    with pytest.raises(ol.ServiceLost, match="no service answers"):
        ol.connect("unix:///tmp/there-is-no-such-socket", 0)
    with pytest.raises(ol.SpecError, match="is not one"):
        ol.connect("tcp://somewhere", 0)


def test_sidecar_must_be_written_first(tmp_path, cache):
    path = write_ids(tmp_path / "s.jsonl", [3, 4])
    job = text_job(path, None, sample=ol.Text("ids", tokenized=True), lengths="sidecar")
    assert "overlord sources measure" in _launch_error(job, cache)


def test_report_must_be_finite(ids_job, cache):
    with ol.launch(ids_job, cache=cache, runtime="inline") as service:
        client = service.client()
        with pytest.raises(ol.SpecError, match="loss/a at step 0 is nan"):
            client.report(0, {"loss/a": float("nan")})
        client.report(0, {"loss/a": 1.0})
        next(client)
        assert client.state_dict()["reports"] == {"0": {"loss/a": 1.0}}


def test_everything_delivered_is_accounted_for(tmp_path, tokenizer, cache):
    path = write_ids(tmp_path / "s.jsonl", [3, 4, 5])
    job = text_job(path, None, sample=ol.Text("ids", tokenized=True))
    with ol.launch(job, cache=cache, runtime="inline", mesh=ol.ClientPlaceTree(dp=2)) as service:
        assert len(delivered_pieces(service)) == 3


def test_an_image_without_a_caption_is_not_trained_on(tmp_path, tokenizer, cache):
    table = pa.table({"jpg": [jpeg(), jpeg(64, 64, 1)], "txt": ["", "a picture"]})
    pq.write_table(table, tmp_path / "s.parquet")
    job = text_job(tmp_path / "s.parquet", tokenizer, sample=ol.ImageText("jpg", "txt"))
    labels, status = run(job, cache)
    assert status["bad"] == 0
    assert (labels[ol.SampleId("s", 0, 0)] == -100).all()
    with ol.launch(job, runtime="inline", cache=cache) as service:
        step = next(service.client())
        assert sum(int((b["labels"] != -100).sum()) for b in step.microbatches) == step.global_loss_tokens


@pytest.mark.parametrize("rows_at_once", [1, 3, 8, 64])
@pytest.mark.parametrize("good", [3, 9])
def test_the_first_rows_decide_in_whatever_chunks_they_are_read(
    tmp_path, tokenizer, cache, rows_at_once, good, monkeypatch
):
    monkeypatch.setattr("overlord.roles.source_loader.CHUNK_ROWS", rows_at_once)
    lines = ['{"text": "fine"}' if n == good else "not json" for n in range(64)]
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    job = text_job(tmp_path / "s.jsonl", tokenizer, tolerance=0.99, shuffle_bytes=0)
    if good < 8:
        run(job, cache)
    else:
        with pytest.raises(ol.SourceError, match=r"all of the first .* rows that were read are bad"):
            run(job, cache)
