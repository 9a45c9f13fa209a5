"""Sample transforms in the pool: the same results as in the service; what becomes of a row that kills its worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import overlord as ol
from overlord.core.ragged import BAD_COLUMN, NOT_PARSED, Ragged, RowBatch, num_rows, take_rows
from overlord.core.samples import BAD
from overlord.readers.jsonl import ParseLines
from overlord.runtimes.hosts.prefetch import SerialWorkers
from overlord.runtimes.hosts.role_host import RoleEnvironment
from overlord.runtimes.launching import service_options
from overlord.runtimes.supervision.process_workers import ProcessWorkers
from overlord.runtimes.transport.shared_memory import Segment
from overlord.transforms.samples import pooled
from overlord.transforms.samples.per_sample import Measured, SampleTransform, decode_into, decode_media
from overlord.transforms.samples.pooled import pooled_transform
from overlord.transforms.samples.sample_kinds import make_transform
from overlord.transforms.samples.tokenize import TextTokenizer, TokenizerFile

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS = ["<unk>", "<image>", "a", "picture", "of", "words"]


@pytest.fixture(scope="module")
def pool():
    with ProcessWorkers(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return TextTokenizer(str(path))


def source_of(sample) -> ol.Source:
    return ol.Source("s", "s.parquet", sample=sample)


IMAGES = source_of(ol.ImageText("jpg", "text", patch=16, merge=2, size=64))
TEXTS = source_of(ol.Text("text"))


def both(source: ol.Source, tokenizer: TextTokenizer, isolate) -> tuple[SampleTransform, SampleTransform]:
    """Return the transform of a source, and the same one in the pool."""
    here = make_transform(source, tokenizer)
    return here, pooled_transform(source, here, TokenizerFile(tokenizer.path, tokenizer.reserved), isolate)


@pytest.mark.parametrize(
    "cpus, threads, of_texts, of_images",
    [(2, 1, False, False), (2, 2, True, False), (2, 3, True, True), (16, 1, False, False), (16, 2, True, True)],
)
def test_texts_are_tokenized_in_processes_on_two_cores_too(monkeypatch, cpus, threads, of_texts, of_images):
    monkeypatch.setattr(service_options, "usable_cpus", lambda: cpus)
    options = service_options.ServiceOptions(mesh=ol.ClientPlaceTree(), cache="", threads=threads)
    assert (options.pools(TEXTS), options.pools(IMAGES)) == (of_texts, of_images)
    assert options.pools(source_of(ol.Text("ids", tokenized=True))) == of_images  # ids are only copied


def test_a_tokenizer_in_the_service_has_as_many_threads_as_it_may(monkeypatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    with contextlib.ExitStack() as ends:
        RoleEnvironment().executors(3, 1, ends)
        assert os.environ["RAYON_NUM_THREADS"] == "5"  # as the user says
        monkeypatch.delenv("RAYON_NUM_THREADS")
        RoleEnvironment().executors(3, 1, ends)
        assert os.environ["RAYON_NUM_THREADS"] == "3"


def jpeg(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(20, 120)), int(rng.integers(20, 120)), 3)
    return simplejpeg.encode_jpeg(rng.integers(0, 255, shape, np.uint8), colorspace="RGB")


def rows_of(texts: list[str], images: list[bytes] | None = None) -> RowBatch:
    rows: RowBatch = {"text": Ragged.from_rows([text.encode() for text in texts])}
    if images is not None:
        rows["jpg"] = Ragged.from_rows(images)
    return rows | {BAD_COLUMN: np.zeros(len(texts), np.uint8)}


def seeds_of(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint64)


def same(one: Measured, other: Measured) -> bool:
    columns = ("tokens", "image_tokens", "images", "flags")
    assert all((getattr(one, name) == getattr(other, name)).all() for name in columns)
    assert one.margin == other.margin and sorted(one.faults) == sorted(other.faults)
    assert set(one.kept) == set(other.kept)
    for name, column in one.kept.items():
        there = other.kept[name]
        if isinstance(column, Ragged):
            assert (column.lengths == there.lengths).all()
            column, there = column.take(np.arange(len(column))).values, there.take(np.arange(len(there))).values
        assert (np.asarray(column) == np.asarray(there)).all(), name
    return True


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text("a picture of\n\0é", max_size=60), min_size=1, max_size=50), st.data())
def test_texts_and_images_are_as_in_the_service(pool, tokenizer, texts, data):
    images = [data.draw(st.sampled_from([jpeg(1), jpeg(2), b"junk", b"", jpeg(3)[:200]])) for _ in texts]
    for source, rows in ((TEXTS, rows_of(texts)), (IMAGES, rows_of(texts, images))):
        here, there = both(source, tokenizer, pool.isolate)
        measured = here.measure(dict(rows), None, seeds_of(len(texts)))
        assert same(measured, there.measure(dict(rows), None, seeds_of(len(texts))))
        if here.decoder is None:
            continue
        bad = (measured.flags & BAD) > 0
        done = here.finish(measured.kept, measured.tokens, bad, SerialWorkers())
        assert done.media is not None and there.decoder is not None
        expected, faults = decode_media(done.media, here.decoder, SerialWorkers())
        found, found_faults = decode_media(done.media, there.decoder, SerialWorkers())
        assert (expected.values == found.values).all() and faults == found_faults
        assert (expected.bad == found.bad).all()


def decoded_in_segment(media, decoder) -> tuple[bytes, list[tuple[int, str]]]:
    """Decode all items into places of shared memory with gaps between them, where a view would be."""
    sizes, gap = decoder.item_bytes(media.grids).tolist(), 5000
    segment = Segment(0, sum(sizes) + gap * (len(sizes) + 1))
    try:
        segment.memory[:] = 171
        at, places = gap, []
        for size in sizes:
            places.append(segment.memory[at : at + size].view(np.uint8).reshape(-1))
            at += size + gap
        faults = decode_into(media, np.arange(len(sizes)), decoder, places, SerialWorkers())
        found = b"".join(place.tobytes() for place in places)
        for place in places:
            place[:] = 171
        assert (segment.memory == 171).all(), "something was written beside the places"
        del places, place
        return found, faults
    finally:
        segment.close()


def test_workers_decode_straight_into_shared_memory(pool, tokenizer, monkeypatch):
    images = [jpeg(1), b"junk", jpeg(2) + b"words", jpeg(3), jpeg(4)[:-500]] * 8
    here, there = both(IMAGES, tokenizer, pool.isolate)
    measured = here.measure(rows_of(["a"] * len(images), images), None, seeds_of(len(images)))
    done = here.finish(measured.kept, measured.tokens, (measured.flags & BAD) > 0, SerialWorkers())
    assert done.media is not None and here.decoder is not None and there.decoder is not None
    expected, faults = decode_media(done.media, here.decoder, SerialWorkers())
    assert faults
    assert decoded_in_segment(done.media, there.decoder) == (expected.values.tobytes(), faults)
    decode = pooled.DecodeRows
    monkeypatch.setattr(pooled, "DecodeRows", lambda *given: Deadly(decode(*given)))
    _, deadly = both(IMAGES, tokenizer, pool.isolate)
    assert deadly.decoder is not None
    found, killed = decoded_in_segment(done.media, deadly.decoder)
    assert {item for item, reason in killed if "killed its worker" in reason} == set(range(2, len(images), 5))
    bounds = np.cumsum([0, *here.decoder.item_bytes(done.media.grids).tolist()])
    for item in range(len(images)):
        part, whole = (data[bounds[item] : bounds[item + 1]] for data in (found, expected.values.tobytes()))
        assert part == (bytes(len(whole)) if item % 5 == 2 else whole)


def test_texts_of_known_lengths_are_tokenized_behind_the_plan(pool, tokenizer):
    texts = ["a picture of words", "a", "of of of", ""] * 30
    here, there = both(TEXTS, tokenizer, pool.isolate)
    lengths = np.array([4, 1, 2, 0] * 30)  # the third is a lie
    measured = here.measure(rows_of(texts), lengths, seeds_of(len(texts)))
    assert same(measured, there.measure(rows_of(texts), lengths, seeds_of(len(texts))))
    assert "raw" in measured.kept
    bad = (measured.flags & BAD) > 0
    expected = here.finish(measured.kept, measured.tokens, bad, SerialWorkers())
    found = there.finish(measured.kept, measured.tokens, bad, SerialWorkers())
    assert (expected.tokens.values == found.tokens.values).all() and (expected.loss.values == found.loss.values).all()
    assert expected.wrong_lengths == found.wrong_lengths and expected.wrong_lengths
    assert expected.faults == found.faults


class Deadly:
    """A function of the pool that dies of rows with the word "words", as of a file that crashes a decoder."""

    only_reads = True

    def __init__(self, function, signum: int = signal.SIGSEGV) -> None:
        self.function = function
        self.signum = signum
        self.tokenizer = function.tokenizer

    def __call__(self, rows: RowBatch, *places) -> RowBatch:
        column = next(rows[name] for name in ("text", "data", "raw", "=lines") if name in rows)
        if any(b"words" in bytes(column[row]) for row in range(num_rows(rows))):
            os.kill(os.getpid(), self.signum)
        return self.function(rows, *places)


@pytest.mark.parametrize("texts", [["a", "words", "of"], ["words"]])
def test_a_line_that_kills_its_worker_is_one_that_could_not_be_read(pool, tokenizer, texts):
    _, there = both(TEXTS, tokenizer, lambda function, *more: pool.isolate(Deadly(function), *more))
    lines = Ragged.from_rows([json.dumps({"text": text}).encode() for text in texts])
    raw: RowBatch = {"=lines": lines, BAD_COLUMN: np.zeros(len(texts), np.int16)}
    found = there.parsing(ParseLines({"text": "bytes"})).measure(raw, None, seeds_of(len(texts)))
    assert same(found, there.measure(rows_of(texts), None, seeds_of(len(texts))))
    assert [row for row, _ in found.killed] == [texts.index("words")]


@pytest.mark.parametrize("texts", [["a", "words", "of"], ["words"], ["words", "words of", "a a a a"]])
def test_a_row_that_kills_its_worker_is_one_that_could_not_be_read(pool, tokenizer, texts):
    deadly = [row for row, text in enumerate(texts) if "words" in text]
    images = [jpeg(row) for row in range(len(texts))]
    for source, rows in ((TEXTS, rows_of(texts)), (IMAGES, rows_of(texts, images))):
        here, there = both(source, tokenizer, lambda function, *more: pool.isolate(Deadly(function), *more))
        measured = there.measure(dict(rows), None, seeds_of(len(texts)))
        assert [row for row, _ in measured.killed] == deadly
        assert all("killed its worker twice: signal 11" in reason for _, reason in measured.killed)
        others = [row for row in range(len(texts)) if row not in deadly]
        expected = here.measure(take_rows(rows, np.array(others, np.int64)), None, seeds_of(len(texts))[others])
        assert (measured.tokens[others] == expected.tokens).all()
        assert (measured.flags[deadly] & BAD > 0).all()
        # What a resume makes of the verdict, without running the row again, is the same.
        read = [text if row in others else "" for row, text in enumerate(texts)]
        seen = [image if row in others else b"" for row, image in enumerate(images)]
        blank = rows_of(read, seen if source is IMAGES else None)
        blank[BAD_COLUMN] = np.array([NOT_PARSED if row in deadly else 0 for row in range(len(texts))], np.uint8)
        known = here.measure(blank, None, seeds_of(len(texts)))
        assert (known.tokens == measured.tokens).all() and (known.flags == measured.flags).all()


def test_an_item_that_kills_its_worker_becomes_zeros(pool, tokenizer, monkeypatch):
    images = [jpeg(1), jpeg(2) + b"words", jpeg(3)]
    rows = rows_of(["a"] * 3, images)
    decode = pooled.DecodeRows
    monkeypatch.setattr(pooled, "DecodeRows", lambda *given: Deadly(decode(*given)))
    here, there = both(IMAGES, tokenizer, pool.isolate)
    measured = here.measure(dict(rows), None, seeds_of(3))
    done = here.finish(measured.kept, measured.tokens, np.zeros(3, np.bool_), SerialWorkers())
    expected, _ = decode_media(done.media, here.decoder, SerialWorkers())
    found, faults = decode_media(done.media, there.decoder, SerialWorkers())
    assert [item for item, _ in faults] == [1] and found.bad.tolist() == [False, True, False]
    begin, end = int(found.begin[1]), int(found.begin[2])
    assert not found.values[begin:end].any()
    assert (found.values[:begin] == expected.values[:begin]).all() and (
        found.values[end:] == expected.values[end:]
    ).all()


class KilledSometimes:
    """A function of the pool whose workers are killed from outside, as by the kernel, the first few times."""

    only_reads = True

    def __init__(self, function, folder: Path, times: int = 5) -> None:
        self.function = function
        self.folder = folder
        self.times = times
        self.tokenizer = function.tokenizer

    def __call__(self, rows: RowBatch, *places) -> RowBatch:
        if len(list(self.folder.iterdir())) < self.times:
            (self.folder / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.function(rows, *places)


def test_what_is_killed_from_outside_runs_again_and_is_never_judged(pool, tokenizer, tmp_path):
    """Before and after the plan: texts and pictures are as if no worker had been killed."""
    for number, (source, images) in enumerate([(TEXTS, None), (IMAGES, [jpeg(1), jpeg(2), jpeg(3)])]):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        here, there = both(source, tokenizer, lambda f, *more, at=folder: pool.isolate(KilledSometimes(f, at), *more))
        rows = rows_of(["a", "of words a", "of"], images)
        lengths = None if images else np.array([1, 3, 1])
        expected, found = (one.measure(dict(rows), lengths, seeds_of(3)) for one in (here, there))
        assert same(expected, found) and found.killed == []
        assert len(list(folder.iterdir())) >= 5
        for file in folder.iterdir():
            file.unlink()
        bad = np.zeros(3, np.bool_)
        done = [one.finish(expected.kept, expected.tokens, bad, SerialWorkers()) for one in (here, there)]
        assert done[0].tokens.values.tolist() == done[1].tokens.values.tolist()
        assert done[0].loss.values.tolist() == done[1].loss.values.tolist() and done[1].faults == []
        if images:
            made = [decode_media(done[0].media, one.decoder, SerialWorkers()) for one in (here, there)]
            assert (made[0][0].values == made[1][0].values).all() and made[0][1] == made[1][1] == []
        assert len(list(folder.iterdir())) >= 5


def test_a_tokenizer_that_changed_is_refused(pool, tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(Path(tokenizer.path).read_bytes())
    mine = TextTokenizer(str(path))
    file = TokenizerFile(mine.path, mine.reserved, mine.digest)
    path.write_text(path.read_text().replace("picture", "pictures"))
    changed = pooled_transform(TEXTS, make_transform(TEXTS, mine), file, pool.isolate)
    with pytest.raises(ol.SpecError, match=r"has changed since the job was launched.*Restore the file"):
        changed.measure(rows_of(["a"]), None, seeds_of(1))
