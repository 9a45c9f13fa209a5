"""Sounds and clips beside text: one stream at every scale, features beside their tokens, damage that stays put."""

from __future__ import annotations

import logging
import tarfile

import numpy as np
import pyarrow.parquet as pq
import pytest
from examples.demo.demo_data import _draw_clip, media_job, write_media
from tokenizers import Tokenizer

import overlord as ol
from overlord.core.plan import Share
from overlord.job.specs import audio_tokens
from overlord.testing import assert_resumes_anywhere, stream_digests
from overlord.testing.digests import digest_service
from overlord.transforms.samples.audio import AudioDecoder
from overlord.transforms.samples.video import VideoDecoder

STEPS = 6
MEDIA = {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "input_features", "feature_attention_mask"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("media")
    write_media(path, clips=12, sounds=12)
    return path


@pytest.fixture(scope="module")
def job(folder) -> ol.Job:
    return media_job(folder)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> ol.Job:
    """The same media, but one clip and one sound have a body that does not decode."""
    path = tmp_path_factory.mktemp("damaged")
    write_media(path, clips=12, sounds=12, corrupt=1)
    return media_job(path)


@pytest.fixture(scope="module")
def reference(job, cache):
    return stream_digests(job, mesh=ol.ClientPlaceTree(dp=2), steps=STEPS, cache=cache)


def batches_of(job, cache, steps=STEPS):
    with ol.launch(job, runtime="inline", cache=cache) as service:
        for step, _ in zip(service.client(), range(steps), strict=False):
            yield from step.microbatches


def segments(batch, key):
    """Return (sample, values) of every segment of a packed row."""
    return list(zip(batch.meta.sample_ids, np.split(batch[key][0], batch["cu_seq_lens_q"][1:-1]), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"loaders_per_source": 3}, marks=pytest.mark.slow_but_inline),
        pytest.param({"prefetch": 4, "threads": 4}, marks=pytest.mark.slow_on_ray),
    ],
    ids=str,
)
def test_scale_and_runtime_change_nothing(job, cache, reference, options, where):
    assert reference.steps == STEPS
    options = {**options, **where}
    assert stream_digests(job, mesh=ol.ClientPlaceTree(dp=2), steps=STEPS, cache=cache, **options) == reference


def test_resumes_at_every_step(job, cache):
    assert_resumes_anywhere(job, steps=4, cache=cache)


def test_every_placeholder_has_its_features(job, cache):
    tokenizer = Tokenizer.from_file(job.tokenizer)
    heard, seen = (tokenizer.token_to_id(token) for token in ("<|AUDIO|>", "<|video_pad|>"))
    found: set[str] = set()
    for batch in batches_of(job, cache):
        ids = batch["input_ids"][0]
        found |= MEDIA & set(batch)
        mask = batch["feature_attention_mask"].sum(axis=1) if "feature_attention_mask" in batch else np.zeros(0)
        grid = batch["video_grid_thw"] if "video_grid_thw" in batch else np.zeros((0, 3), np.int64)
        assert (ids == heard).sum() == audio_tokens(mask).sum()
        assert (ids == seen).sum() == (grid.prod(axis=1) // 4).sum()
        if len(mask):
            assert batch["input_features"].shape == (len(mask), 80, 600)
        if len(grid):
            assert batch["pixel_values_videos"].shape == (grid.prod(axis=1).sum(), 3 * 2 * 14 * 14)
            assert (batch["second_per_grid_ts"] > 0).all()
        assert (batch["labels"][0][(ids == heard) | (ids == seen)] == -100).all()
    assert found == MEDIA


def encoded_rows(folder) -> dict[ol.SampleId, bytes]:
    """Return the encoded sounds and clips by their ids of the first epoch."""
    rows: dict[ol.SampleId, bytes] = {}
    for file, path in enumerate(sorted((folder / "sounds").iterdir())):
        with tarfile.open(path) as tar:
            members = [m for m in tar.getmembers() if m.name.endswith(".flac")]
            for row, member in enumerate(members):
                rows[ol.SampleId("sounds", (file << 32) + row, 0)] = tar.extractfile(member).read()
    for file, path in enumerate(sorted((folder / "clips").iterdir())):
        for row, clip in enumerate(pq.read_table(path)["mp4"].to_pylist()):
            rows[ol.SampleId("clips", (file << 32) + row, 0)] = clip
    return rows


def test_features_are_those_of_the_samples_they_stand_beside(job, folder, cache):
    encoded = encoded_rows(folder)
    specs = {source.name: source.sample for source in job.sources}
    checked = {"sounds": 0, "clips": 0}
    for batch in batches_of(job, cache, steps=3):
        samples = batch.meta.sample_ids
        sounds = [s for s in samples if s.source == "sounds"]
        clips = [s for s in samples if s.source == "clips"]
        patches = 0
        for number, sample in enumerate(sounds):
            place = np.empty(80 * 600 * 4, np.uint8)
            AudioDecoder(specs["sounds"]).decode(memoryview(encoded[sample]), np.array([0, 80, 600]), 0, place)
            np.testing.assert_array_equal(batch["input_features"][number], place.view(np.float32).reshape(80, 600))
        for number, sample in enumerate(clips):
            grid = batch["video_grid_thw"][number]
            rows = batch["pixel_values_videos"][patches : patches + int(grid.prod())]
            place = np.empty(rows.size, np.uint8)
            VideoDecoder(specs["clips"]).decode(memoryview(encoded[sample]), grid.astype(np.int32), 0, place)
            np.testing.assert_array_equal(rows.reshape(-1), place)
            patches += int(grid.prod())
        checked["sounds"] += len(sounds)
        checked["clips"] += len(clips)
    assert min(checked.values()) >= 3


def test_global_loss_tokens_is_the_number_of_labels(job, cache):
    for overlength, context in (("truncate", 128), ("split", 128)):
        short = job.replace(overlength=overlength, batch=ol.Batch(context, global_samples=8))
        with ol.launch(short, runtime="inline", cache=cache) as service:
            for step, _ in zip(service.client(), range(4), strict=False):
                labels = sum(int((batch["labels"] != -100).sum()) for batch in step.microbatches)
                assert labels == step.global_loss_tokens > 0


def test_damage_is_counted_named_once_and_stays_where_it_is(job, damaged, cache, caplog):
    broken = {ol.SampleId("clips", 3, 0), ol.SampleId("sounds", 3, 0)}
    met: set[ol.SampleId] = set()
    with caplog.at_level(logging.WARNING, "overlord"), ol.launch(damaged, runtime="inline", cache=cache) as service:
        spoilt = (b for step, _ in zip(service.client(), range(4), strict=False) for b in step.microbatches)
        for whole, found in zip(batches_of(job, cache, 4), spoilt, strict=True):
            np.testing.assert_array_equal(whole["input_ids"], found["input_ids"])
            assert whole.meta.sample_ids == found.meta.sample_ids
            both = zip(segments(whole, "labels"), segments(found, "labels"), strict=True)
            for (sample, expected), (_, labels) in both:
                if sample in broken:
                    met.add(sample)
                    assert (labels == -100).all() and (expected != -100).any()
                else:
                    np.testing.assert_array_equal(labels, expected)
            assert_same_media_but(whole, found, broken)
        status = service.status()["sources"]
    assert met == broken
    for source in ("clips", "sounds"):
        assert status[source]["bad"] == 1
        assert caplog.text.count(f"bad sample {source}:0:3@0: does not decode") == 1


def assert_same_media_but(whole, found, broken):
    """Check that the media of two batches are equal but for the broken samples', which are zeros."""
    samples = whole.meta.sample_ids
    for number, sample in enumerate(s for s in samples if s.source == "sounds"):
        expected = np.zeros((80, 600)) if sample in broken else whole["input_features"][number]
        np.testing.assert_array_equal(found["input_features"][number], expected)
    patches = 0
    for number, sample in enumerate(s for s in samples if s.source == "clips"):
        count = int(whole["video_grid_thw"][number].prod())
        here = slice(patches, patches + count)
        expected = 0 if sample in broken else whole["pixel_values_videos"][here]
        assert (found["pixel_values_videos"][here] == expected).all()
        patches += count
    for key in MEDIA - {"input_features", "pixel_values_videos"}:
        if key in whole:
            np.testing.assert_array_equal(whole[key], found[key])


def test_damage_does_not_change_the_stream(job, damaged, cache):
    # Only the bodies are damaged: every length is what it was, so order and plan are too.
    options = {"steps": 4, "cache": cache}
    clean, found = stream_digests(job, **options), stream_digests(damaged, **options)
    assert (clean.order, clean.plan) == (found.order, found.plan)
    assert clean.content != found.content
    assert found == stream_digests(damaged, runtime="local", threads=1, loaders_per_source=3, **options)


def test_broken_headers_are_stand_ins_too(tmp_path, cache):
    write_media(tmp_path, clips=6, sounds=6, corrupt=2)
    job = media_job(tmp_path)
    once = job.replace(mixture=ol.Mixture(stopping="all_exhausted_without_replacement"))
    with ol.launch(once, runtime="inline", cache=cache) as service:
        samples = {s for step in service.client() for b in step.microbatches for s in b.meta.sample_ids}
        status = service.status()["sources"]
    assert len([s for s in samples if s.source != "notes"]) == 12
    assert [status[source]["bad"] for source in ("clips", "sounds")] == [2, 2]


def test_numbers_that_make_no_media_are_refused(tmp_path):
    for numbers in ({"clips": 1, "sounds": 4}, {"clips": 4, "sounds": 4, "corrupt": 5}):
        with pytest.raises(ol.SpecError, match="clips="):
            write_media(tmp_path, **numbers)
    assert not list(tmp_path.iterdir())


def test_another_seed_gives_other_media_and_the_same_seed_the_same(tmp_path):
    written = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        files = write_media(tmp_path / name, clips=2, sounds=2, seed=seed)
        written.append({path.name: path.read_bytes() for path in files})
    assert written[0] == written[1]
    assert all(written[0][name] != written[2][name] for name in written[0])


@pytest.mark.slow
def test_a_clip_is_encoded_to_the_same_bytes_every_time():
    """An encoder that reads memory it has not written gives other bytes once in a while, as x264 does on x86."""
    clips = [_draw_clip(np.random.default_rng(number % 3)) for number in range(400)]
    assert len(set(clips)) == 3


def test_a_sample_with_a_sound_goes_on_in_the_next_step_behind_its_sound(job, cache):
    whole, parts = {}, {}
    small = job.replace(batch=ol.Batch(160, global_tokens=200), overlength="split")
    for found, one in ((whole, job), (parts, small)):
        with ol.launch(one, runtime="inline", cache=cache) as service:
            for step, _ in zip(service.client(), range(40), strict=False):
                for batch in step.microbatches:
                    ids = segments(batch, "input_ids")
                    sounds = {sample for (sample, _), begin in zip(ids, batch.meta.segment_offsets, strict=True)
                              if sample.source == "sounds" and begin == 0}  # fmt: skip
                    assert len(batch.get("input_features", ())) == len(sounds), "a sound is where its sample begins"
                    for (sample, tokens), begin in zip(ids, batch.meta.segment_offsets, strict=True):
                        found.setdefault(sample, {})[int(begin)] = tokens
    cut = [sample for sample in parts if sample.source == "sounds" and len(parts[sample]) > 1 and sample in whole]
    assert cut, "some are cut"
    for sample in cut:
        joined = np.concatenate([tokens for _, tokens in sorted(parts[sample].items())])
        expected = np.concatenate([tokens for _, tokens in sorted(whole[sample].items())])
        assert joined.tolist() == expected[: len(joined)].tolist()


# -- sounds that are encoded apart from their tokens -----------------------------------------------

OMNI = ol.strategies.vlm_hybrid(ol.costs.tokens, ol.costs.tokens, audio=ol.costs.tokens)


def exchanged(steps, outputs):
    """Return the rows that every rank receives, by an all-to-all of the rows that each has encoded."""
    splits = [np.cumsum([0, *step.audio_encoder["send_splits"]]) for step in steps]
    sent = [out[step.audio_encoder["send_rows"]] for step, out in zip(steps, outputs, strict=True)]
    return [
        np.concatenate([sent[by][splits[by][to] : splits[by][to + 1]] for by in range(len(steps))])
        for to in range(len(steps))
    ]


@pytest.mark.parametrize("tree", [ol.ClientPlaceTree(dp=4), ol.ClientPlaceTree(dp=2, cp=2)], ids=str)
def test_sounds_are_encoded_on_any_rank_and_reach_their_tokens(job, cache, tree):
    heard = Tokenizer.from_file(job.tokenizer).token_to_id("<|AUDIO|>")
    features, count = {}, 2 * STEPS
    for batch in batches_of(job, cache, count):
        sounds = [sample for sample in batch.meta.sample_ids if sample.source == "sounds"]
        features |= dict(zip(sounds, batch.get("input_features", ()), strict=True))
    spread, checked = set(), 0
    with ol.launch(job, runtime="inline", cache=cache, mesh=tree, strategy=OMNI) as service:
        clients = [service.client(rank) for rank in range(tree.world_size)]
        for number in range(count):
            steps, plan = [next(client) for client in clients], service.plan_raw(number)
            outputs = []
            for rank, step in enumerate(steps):
                inputs = step.audio_encoder
                if inputs["audio_ids"][0] >= 0:
                    spread.add(rank)
                mine = plan.audio_encoder.bin(rank, 0)
                for row, sample in enumerate(mine.sample.tolist()):
                    np.testing.assert_array_equal(inputs["input_features"][row], features[plan.draw.sample_id(sample)])
                assert audio_tokens(inputs["feature_attention_mask"].sum(axis=1))[: len(mine)].tolist() == (
                    inputs["audio_lengths"].tolist() if len(mine) else []
                )
                # An encoder whose output says of which sample a row is, and which of its tokens.
                rows = [(sample, at) for sample, n in zip(mine.sample, mine.length, strict=True) for at in range(n)]
                outputs.append(np.array(rows, np.int64).reshape(-1, 2))
            for step, received in zip(steps, exchanged(steps, outputs), strict=True):
                for batch in step.microbatches:
                    assert not {"input_features", "feature_attention_mask"} & set(batch)
                    ids = batch["input_ids"][0]
                    assert batch.meta.audio_positions.tolist() == np.flatnonzero(ids == heard).tolist()
                    arrived = received[batch.meta.audio_rows]
                    named = {str(plan.draw.sample_id(int(sample))) for sample in arrived[:, 0]}
                    assert named <= {str(sample) for sample in batch.meta.sample_ids}
                    if tree.cp == 1:
                        for sample in np.unique(arrived[:, 0]):
                            ordered = arrived[arrived[:, 0] == sample, 1]
                            assert ordered.tolist() == list(range(len(ordered)))
                    checked += len(arrived)
    assert checked > 100 and len(spread) == tree.world_size


def test_encoding_sounds_apart_is_the_same_at_every_scale(job, cache):
    def digests(strategy=OMNI, **options):
        options = {"runtime": "inline", "mesh": ol.ClientPlaceTree(dp=2, tp=2), "cache": cache} | options
        with ol.launch(job, strategy=strategy, **options) as service:
            return digest_service(service, steps=STEPS)

    expected = digests()
    assert expected != digests(ol.strategies.vlm_hybrid(ol.costs.tokens, ol.costs.tokens))
    assert digests(runtime="local", loaders_per_source=2, prefetch=3) == expected
    assert digests(placement="loader") == expected


def test_a_host_gets_the_sounds_that_its_ranks_encode(job, cache):
    tree = ol.ClientPlaceTree(dp=4)
    with ol.launch(job, runtime="inline", cache=cache, mesh=tree, strategy=OMNI) as service:
        plan = service.plan_raw(0)
    sounds = plan.draw.samples_with("audio")
    for rank in range(4):
        share = Share.of(plan.on(tree), {rank})
        encoded = plan.draw.media.sample[share.encoded]
        mine = plan.audio_encoder.bin(rank, 0).sample
        assert encoded[sounds[encoded]].tolist() == sorted(mine.tolist()) and share.samples[mine].all()
        assert not (share.media & sounds).any(), "where only their tokens are, no sound is needed"
        assert share.samples[plan.bin(rank, 0).sample].all()
    apart = ol.strategies.vlm_hybrid(ol.costs.tokens, ol.costs.tokens)
    with ol.launch(job, runtime="inline", cache=cache, mesh=tree, strategy=apart) as service:
        plan = service.plan_raw(0)
    for rank in range(4):
        held = [sample for at in range(plan.num_microbatches) for sample in plan.bin(rank, at).sample.tolist()]
        with_tokens = Share.of(plan.on(tree), {rank}).media & sounds
        assert np.flatnonzero(with_tokens).tolist() == sorted(set(held) & set(np.flatnonzero(sounds).tolist()))


def test_a_damaged_sound_that_is_encoded_apart_counts_nowhere(damaged, cache):
    options = {"runtime": "inline", "cache": cache, "mesh": ol.ClientPlaceTree(dp=2)}
    for strategy in (None, OMNI):
        with ol.launch(damaged, strategy=strategy, **options) as service:
            clients = [service.client(rank) for rank in range(2)]
            totals = []
            for _ in range(STEPS):
                steps = [next(client) for client in clients]
                labels = sum(int((batch["labels"] != -100).sum()) for step in steps for batch in step.microbatches)
                assert labels == steps[0].global_loss_tokens
                totals.append(labels)
        expected = totals if strategy is None else expected  # noqa: F821
        assert totals == expected, "the same labels, wherever sounds are encoded"
