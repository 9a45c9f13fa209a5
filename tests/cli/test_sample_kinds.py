"""The commands on chats, interleaved images, sounds and clips: what is shown, found damaged, measured and explained."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples.demo.demo_data import write_media
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer
from typer.testing import CliRunner

import overlord as ol
from overlord.cli.main import app
from overlord.cli.preview import Preview, mel_picture, preview_source, show_previews
from overlord.cli.serving import status_tables
from overlord.cli.sources import choose_sources, open_each
from overlord.job_files import LaunchOptions, dump_job_yaml
from overlord.planning.balancing.evenness import encoder_loads
from overlord.transforms.samples.images import resize_image

NAMES = ["chats", "clips", "docs", "parts", "sounds"]
ROWS = 40


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def result_of(*arguments: object) -> dict[str, Any]:
    outcome = call(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    return json.loads(outcome.stdout)


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLORD_CACHE", cache)


def picture(number: int, width: int, height: int) -> bytes:
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([(x * number) % 256, (y + 40 * number) % 256, (x + y) % 256], -1).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def write_chats(path: Path) -> None:
    """Write conversations of five messages; the third has no content, the fourth no messages."""
    rows: list[dict[str, Any]] = []
    for n in range(ROWS):
        turns = [("system", "Be brief."), ("user", f"{n} + {n}?"), ("assistant", f"It is {2 * n}."), ("user", "Sure?")]
        turns.append(("assistant", "Quite sure."))
        rows.append({"messages": [{"role": role, "content": words} for role, words in turns]})
    rows[2], rows[3] = {"messages": [{"role": "user"}]}, {"messages": []}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_interleaved(path: Path) -> None:
    """Write rows of 0 to 3 images; the second image of row 7 has a whole header and half a body."""
    images = [[picture(n + k, 96 + 32 * k, 64) for k in range(n % 4)] for n in range(ROWS)]
    images[7][1] = images[7][1][: len(images[7][1]) // 2]
    texts = ["".join(f"figure {k}: <image> " for k in range(n % 4)) + "the end." for n in range(ROWS)]
    parts = [
        json.dumps(
            [p for k in range(n % 4) for p in ({"type": "text", "text": f"({k})"}, {"type": "image"})]
            + [{"type": "text", "text": "the end."}]
        )
        for n in range(ROWS)
    ]
    columns = {"images": pa.array(images, pa.list_(pa.binary())), "text": texts, "parts": parts}
    pq.write_table(pa.table(columns), path)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> ol.Job:
    folder = tmp_path_factory.mktemp("kinds")
    write_media(folder, clips=8, sounds=8, corrupt=2)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_chats(folder / "chat.jsonl")
    write_interleaved(folder / "docs.parquet")
    vision = {"patch": 14, "merge": 2, "temporal": 2}
    small = {"max_frames": 16, "min_pixels": 56 * 56, "max_pixels": 112 * 112}
    samples: dict[str, tuple[str, Any]] = {
        "chats": ("chat.jsonl", ol.Chat(template="chatml", process=False)),
        "clips": ("clips", ol.Video("mp4", "caption", before="<|vision_start|>", after="<|vision_end|>", **small)),
        "docs": ("docs.parquet", ol.Interleaved("images", "text", **vision)),
        "parts": ("docs.parquet", ol.Interleaved("images", parts="parts", **vision)),
        "sounds": ("sounds", ol.Audio("flac", "txt", seconds=6, before="<|audio_bos|>", after="<|audio_eos|>")),
    }
    sources = [ol.Source(n, str(folder / p), sample=sample, tolerance=1.0) for n, (p, sample) in samples.items()]
    return ol.Job(sources, tokenizer=str(folder / "tokenizer.json"), batch=ol.Batch(512, global_samples=16))


@pytest.fixture(scope="module")
def job_file(job: ol.Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text(dump_job_yaml(job, LaunchOptions(mesh=ol.ClientPlaceTree(dp=2), steps=4)))
    return path


@pytest.fixture(scope="module")
def shown(job_file: Path, cache: str) -> dict[str, list[dict[str, Any]]]:
    return result_of("sources", "preview", job_file, "--rows", 8, "--cache", cache)["sources"]


def previews_of(job: ol.Job, name: str, cache: str, rows: int = 8) -> list[Preview]:
    return preview_source(open_each(job, choose_sources(job, [name]), Path(cache), None)[0], rows)


# ---- preview


def test_chats_are_shown_as_they_are_rendered(shown: dict[str, list[dict[str, Any]]]) -> None:
    first, second, broken, empty = shown["chats"][:4]
    assert first["messages"] == 5
    assert first["text"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n0 + 0?")
    assert [second["text"][a:b] for a, b in second["loss_spans"]] == ["It is 2.<|im_end|>", "Quite sure.<|im_end|>"]
    assert 0 < first["loss_tokens"] < first["tokens"]
    assert broken["faults"] and "content" in broken["faults"][0]
    assert broken["text"] == '[{"role":"user"}]'  # what cannot be rendered is shown as it was read
    assert (empty["messages"], empty["skipped"]) == (0, True)


def test_interleaved_rows_show_all_their_images(shown: dict[str, list[dict[str, Any]]]) -> None:
    for name, text in (
        ("docs", "figure 0: [<image> x 6] figure 1: [<image> x 10] the end."),
        ("parts", "(0)[<image> x 6](1)[<image> x 10]the end."),
    ):
        row = shown[name][2]
        assert row["text"] == text
        assert row["media"] == [{"kind": "image", "size": [96, 64]}, {"kind": "image", "size": [128, 64]}]
        assert row["media_tokens"] == row["image_tokens"] > 0
        assert shown[name][0]["media"] == []
        assert [fault.split(":")[0] for fault in shown[name][7]["faults"]] == ["image 1"]


def test_clips_and_sounds_tell_what_their_headers_say(shown: dict[str, list[dict[str, Any]]]) -> None:
    (clip,) = shown["clips"][0]["media"]
    assert clip["kind"] == "video"
    assert clip["seconds"] == pytest.approx(clip["frames"] / clip["fps"], abs=0.01)
    assert 1 <= clip["sampled_frames"] <= min(16, clip["frames"])
    assert all(side % 28 == 0 for side in clip["sampled_size"])
    (sound,) = shown["sounds"][0]["media"]
    assert (sound["kind"], sound["mels"]) == ("audio", 80)
    assert sound["frames"] == pytest.approx(100 * sound["seconds"], abs=1)
    assert (shown["sounds"][0]["image_tokens"], shown["sounds"][0]["media_tokens"] > 0) == (0, True)
    for name in ("clips", "sounds"):
        faults = [row["faults"] for row in shown[name] if row["faults"]]
        assert len(faults) == 2
        assert any("does not decode" in f[0] for f in faults) and any("header" in f[0] for f in faults)


def test_the_picture_of_a_clip_is_its_first_frame(job: ol.Job, cache: str) -> None:
    files = sorted((Path(job.sources[1].path[0])).iterdir())
    encoded = pq.read_table(files[0])["mp4"].to_pylist()[0]
    with av.open(io.BytesIO(encoded)) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    found = previews_of(job, "clips", cache, 1)[0].media[0].picture
    assert found is not None
    np.testing.assert_array_equal(found, resize_image(frame, *found.shape[:2]))


def test_loud_bands_of_a_sound_are_bright_and_high_tones_on_top() -> None:
    mel = np.zeros((80, 50), np.float32)
    mel[70] = 1.0  # a high tone, all the time
    brightness = mel_picture(mel).astype(int).sum(axis=2)
    assert (brightness.argmax(axis=0) == 9).all()
    assert mel_picture(np.zeros((4, 3), np.float32)).shape == (4, 3, 3)  # silence is no division by zero


def test_the_page_has_every_picture_and_marks_the_loss(job_file: Path, tmp_path: Path) -> None:
    assert call("sources", "preview", job_file, "--rows", 4, "--html", tmp_path / "p.html").exit_code == 0
    page = (tmp_path / "p.html").read_text()
    # Four clips and four sounds, of each two damaged in one of two files; 0 + 1 + 2 + 3 images, twice.
    assert page.count("data:image/jpeg;base64,") == 3 + 3 + 2 * 6
    assert "<mark>It is 0.&lt;|im_end|&gt;</mark>" in page
    assert page.count('class="media many"') == 4


def test_the_terminal_shows_pictures_in_colour(job: ol.Job, cache: str) -> None:
    drawn: dict[str, str] = {}
    for name in NAMES:
        one = open_each(job, choose_sources(job, [name]), Path(cache), None)[0]
        console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=100)
        console.print(show_previews(one, preview_source(one, 3), pictures=True))
        drawn[name] = console.file.getvalue()  # type: ignore[attr-defined]
    for name in ("clips", "docs", "parts", "sounds"):
        assert drawn[name].count("▀") > 50
    green = re.findall(r"\x1b\[32m(.*?)\x1b", drawn["chats"])
    assert "".join(green).startswith("It is 0.<|im_end|>Quite sure.<|im_end|>It is 2.")  # what is in the loss
    assert "5 messages" in drawn["chats"]
    assert " in the loss" not in drawn["docs"]  # all of its text is


# ---- lint


def test_lint_decodes_every_medium(job_file: Path) -> None:
    findings = result_of("sources", "lint", job_file)["findings"]
    bad = [finding["message"].split(": ", 2) for finding in findings if finding["message"].startswith("bad: ")]
    reasons = {sample: reason for _, sample, reason in bad}
    assert sorted(reasons) == [
        "chats:0:2",
        "clips:0:2",
        "clips:1:2",
        "docs:0:7",
        "parts:0:7",
        "sounds:0:2",
        "sounds:1:2",
    ]
    assert reasons["clips:0:2"].startswith("does not decode") and reasons["sounds:0:2"].startswith("does not decode")
    assert reasons["docs:0:7"].startswith("image 1: does not decode")


def test_lint_tells_what_happens_to_transparency_long_sounds_and_clips_over_max_tokens(
    job: ol.Job, tmp_path: Path
) -> None:
    encoded: list[bytes] = []
    for mode, colour in (("RGB", (9, 9, 9)), ("RGBA", (9, 9, 9, 255)), ("RGBA", (9, 9, 9, 0))):
        out = io.BytesIO()
        Image.new(mode, (56, 56), colour).save(out, "PNG")
        encoded.append(out.getvalue())
    pq.write_table(pa.table({"png": encoded, "txt": ["a", "b", "c"]}), tmp_path / "icons.parquet")
    named = {source.name: source for source in job.sources}
    clips, sounds = named["clips"], named["sounds"]
    sources = [
        ol.Source("icons", str(tmp_path / "icons.parquet"), sample=ol.ImageText("png")),
        clips.replace(sample=clips.sample.replace(max_tokens=4)),
        sounds.replace(sample=sounds.sample.replace(seconds=2)),
    ]
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job.replace(sources=sources)))
    told = {(one["source"], one["message"]) for one in result_of("sources", "lint", path)["findings"]}
    assert ("icons", "1 of 3 images are transparent in places and are put on white") in told
    words = {name: [m for n, m in told if n == name and " of " in m] for name in ("clips", "sounds")}
    assert any("more than max_tokens: 4 tokens" in m and "min_pixels: 3136" in m for m in words["clips"])
    assert any("sounds are longer than seconds: 2 and are cut" in m for m in words["sounds"])


def test_lengths_that_nobody_would_read_are_refused(job: ol.Job) -> None:
    chats = next(source for source in job.sources if source.name == "chats")
    with pytest.raises(
        ol.SpecError, match=r"lengths.*'sidecar' would not be looked at: Chat is measured when it is read"
    ):
        chats.replace(lengths="sidecar")


def test_lint_holds_lengths_against_the_text_alone(job: ol.Job, tmp_path: Path) -> None:
    """Tokens around a clip are not its text's."""
    clips = job.sources[1]
    tokenizer = Tokenizer.from_file(str(job.tokenizer))
    table = pa.concat_tables([pq.read_table(path) for path in sorted(Path(clips.path[0]).iterdir())])
    lengths = [len(tokenizer.encode(text).ids) for text in table["caption"].to_pylist()]
    lengths[5] += 1
    pq.write_table(table.append_column("n", pa.array(lengths)), tmp_path / "clips.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job.replace(sources=[clips.replace(path="clips.parquet", lengths="n")])))
    found = [f["message"] for f in result_of("sources", "lint", path)["findings"] if "wrong length" in f["message"]]
    words = f"its length says {lengths[5]} tokens, the text has {lengths[5] - 1}"
    assert found == [f"wrong length: clips:0:5: {words} (row 5 of {tmp_path / 'clips.parquet'})"]


# ---- list and measure


def test_a_token_that_is_missing_is_the_fault_of_one_source(job: ol.Job, tmp_path: Path) -> None:
    sounds = job.sources[4].replace(sample=ol.Audio("flac", "txt", audio_token="<|odd|>"))
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job.replace(sources=[job.sources[0], sounds])))
    outcome = call("sources", "list", path)
    assert outcome.exit_code == 2
    assert (
        "job.yaml:9: source 'sounds': sample.audio_token: the token '<|odd|>' is not in the vocabulary"
        in outcome.stderr
    )
    assert "Chat" in outcome.stdout
    for command in ("run", "explain"):
        told = call(command, path).stderr
        assert "job.yaml:9: source 'sounds': sample.audio_token: the token '<|odd|>' is not in the vocabulary" in told


@pytest.mark.parametrize(
    ("name", "why"), [("chats", "once they are rendered"), ("parts", "once all text is tokenized")]
)
def test_lengths_that_no_sidecar_can_hold_are_refused(job_file: Path, name: str, why: str) -> None:
    outcome = call("sources", "measure", job_file, name)
    assert outcome.exit_code == 2
    assert f"source {name!r}: " in outcome.stderr
    assert why in outcome.stderr and "a sidecar would never be read" in outcome.stderr


@pytest.mark.slow
def test_sidecars_of_sounds_and_clips_change_nothing(job: ol.Job, job_file: Path, tmp_path: Path) -> None:
    changed = [s.replace(lengths="sidecar") if s.name in ("clips", "sounds") else s for s in job.sources]
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job.replace(sources=changed), LaunchOptions(mesh=ol.ClientPlaceTree(dp=2))))
    assert sorted(result_of("sources", "measure", path)["sources"]) == ["clips", "sounds"]
    options = ("--runtime", "inline", "--steps", 4)
    with_sidecar, without = (result_of("run", one, *options) for one in (path, job_file))
    assert with_sidecar["digests"] == without["digests"]
    assert not any("wrong" in note for note in with_sidecar["notes"])


@pytest.mark.slow
def test_what_a_processor_folder_says_holds_for_every_command(job: ol.Job, tmp_path: Path) -> None:
    """Else a preview would show other tokens than a run, and a run would not find the sidecars."""
    tokenizer = Tokenizer.from_file(str(job.tokenizer))
    tokenizer.add_special_tokens(["<|image_pad|>"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    config = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 784, "max_pixels": 100352}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(config))
    pairs = {"jpg": [picture(n, 56, 28) for n in range(ROWS)], "txt": ["some words"] * ROWS}
    pq.write_table(pa.table(pairs), tmp_path / "pairs.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(
        "sources: [{name: pairs, path: pairs.parquet, sample: {image: jpg, text: txt}, lengths: sidecar}]\n"
        "tokenizer: model\nbatch: {context_length: 128, global_samples: 4}\n"
    )
    (row,) = result_of("sources", "preview", path, "--rows", 1)["sources"]["pairs"]
    assert row["image_tokens"] == 2  # 56 x 28 pixels at 28 pixels a token
    assert result_of("sources", "measure", path)["sources"]["pairs"]["rows"] == ROWS
    ran = result_of("run", path, "--runtime", "inline", "--steps", 2)
    assert ran["tokens"] == 8 * row["tokens"]
    assert ran["sources"][0]["epochs"] == pytest.approx(8 / ROWS)


# ---- run, status, explain


@pytest.mark.slow
def test_placement_changes_what_travels_and_nothing_else(job_file: Path, tmp_path: Path) -> None:
    options = ("--runtime", "inline", "--steps", 4)
    found = {where: result_of("run", job_file, *options, "--placement", where) for where in ("loader", "constructor")}
    for where, one in found.items():
        assert [(media["name"], media["decoded_in"]) for media in one["media"]] == [(n, where) for n in NAMES[1:]]
    assert found["loader"]["digests"] == found["constructor"]["digests"]
    loader, constructor = ({m["name"]: m["handed_over_bytes"] for m in one["media"]} for one in found.values())
    assert all(loader[name] > constructor[name] > 0 for name in ("clips", "docs", "parts"))
    shown = call("run", job_file, *options, "--placement", "loader", "--report", tmp_path / "report.html")
    assert "decoded in" in shown.stdout and " decoded" in shown.stdout
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td>loader</td>") == 4 and page.count("<td>–</td><td>–</td></tr>") == 1


@pytest.mark.slow
def test_a_layout_of_the_command_line_wins_over_the_file(job: ol.Job, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job, LaunchOptions(layout=ol.Layout("torchtitan"))))
    options = ("--runtime", "inline", "--steps", 2)
    packed, full = (result_of("run", path, *options, *more) for more in ((), ("--layout", "{keys: hf, rows: full}")))
    assert (packed["layout"], full["layout"]) == ("torchtitan", "hf, rows=full")
    assert packed["digests"]["order"] == full["digests"]["order"]
    assert packed["padding"] == 0 < full["padding"]
    for wrong, words in (
        ("hff", "Did you mean 'hf'?"),
        ("megatrn", "batches would have unknown keys. Did you mean 'megatron'?\n"),
        ("foo", "batches would have unknown keys.\n"),
        ("{rows: flat}", "--layout.rows is 'flat'"),
    ):
        refused = call("run", path, "--layout", wrong)
        assert refused.exit_code == 2
        assert words in refused.stderr


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (
            (ol.Video("mp4", "caption", patch=14), ol.Video("mp4", "caption", patch=16)),
            "(patch=14, merge=2, temporal=2 in source 'a'; patch=16, merge=2, temporal=2 in source 'b')",
        ),
        (
            (ol.Audio("flac", "txt", mels=80), ol.Audio("flac", "txt", mels=128)),
            "(mels=80, seconds=30 in source 'a'; mels=128, seconds=30 in source 'b')",
        ),
    ],
)
def test_media_of_different_shapes_name_their_sources(
    samples: tuple[Any, Any], words: str, job: ol.Job, tmp_path: Path
) -> None:
    paths = {type(source.sample): source.path for source in job.sources}
    sources = [ol.Source(name, paths[type(sample)], sample=sample) for name, sample in zip("ab", samples, strict=True)]
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job.replace(sources=sources, batch=ol.Batch(4096, global_samples=4))))
    outcome = call("run", path)
    assert outcome.exit_code == 2
    assert words in outcome.stderr


@pytest.mark.slow
def test_clips_count_among_the_images(job: ol.Job, job_file: Path, tmp_path: Path) -> None:
    assert "tokens of images and clips" in call("explain", job_file, "--steps", 2).stdout
    path = tmp_path / "job.yaml"
    path.write_text(dump_job_yaml(job.replace(sources=[source for source in job.sources if source.name == "docs"])))
    told = call("explain", path, "--steps", 2).stdout
    assert "image tokens" in told and "images and clips" not in told


def test_status_tells_where_media_are_decoded(job: ol.Job, cache: str) -> None:
    with ol.launch(job, runtime="inline", cache=cache, placement="loader") as service:
        before = service.status()
        for _ in next(service.client()).microbatches:
            pass
        after = service.status()
    tables = [one for one in status_tables(before) if not isinstance(one, str)]  # lines name bad samples
    assert len(tables) == 1  # nothing was decoded yet
    console = Console(file=io.StringIO(), width=200)
    console.print(*status_tables(after))
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "chats: bad samples chats:0:2@0 (row 2 of " in written
    media = written[written.index("media") :]
    assert all(name in media for name in NAMES[1:])
    assert "loader" in media


@pytest.mark.slow
def test_explain_measures_the_decoding_wherever_it_is_done(job_file: Path) -> None:
    found = {}
    for where in ("loader", "constructor"):
        told = result_of("explain", job_file, "--steps", 2, "--placement", where)
        found[where] = {source["name"]: source for source in told["loaders"]["sources"]}
        assert found[where]["chats"]["decoded_in"] is None
        assert all(found[where][name]["decoded_in"] == where for name in NAMES[1:])
        assert all(found[where][name]["finish_cpu_s"] > 0 for name in NAMES)
    # Clips take long to decode and little to hand over; where they are decoded must not make them look cheap.
    loader, constructor = (found[where]["clips"] for where in ("loader", "constructor"))
    assert constructor["payload_bytes"] < loader["payload_bytes"]
    assert constructor["finish_cpu_s"] > 0.1 * loader["finish_cpu_s"]


@pytest.mark.slow
def test_explain_knows_the_padding_of_a_layout(job_file: Path) -> None:
    plans = {rows: result_of("explain", job_file, "--steps", 3, "--no-measure", "--layout", f"{{rows: {rows}}}")
             for rows in ("packed", "padded", "full")}  # fmt: skip
    padding = [plan["step"]["padding"] for plan in plans.values()]
    assert padding[0] == 0 == padding[1] < padding[2]  # padded: one row a microbatch here, as long as its sample
    bounds = {rows: {one["axis"]: one["bound"] for one in plan["balance"]} for rows, plan in plans.items()}
    assert bounds["padded"]["lockstep"] is None  # what a row costs there depends on its neighbours
    assert bounds["full"]["lockstep"] is not None


def test_every_image_is_encoded_where_its_tokens_are(job: ol.Job, cache: str) -> None:
    tree = ol.ClientPlaceTree(dp=2, tp=2)
    docs = job.replace(sources=[job.sources[2]], batch=ol.Batch(64, global_samples=12), overlength="split")
    loads = {}
    for strategy in (ol.strategies.backbone_balance(), ol.strategies.vlm_hybrid()):
        with ol.launch(docs, mesh=tree, strategy=strategy, runtime="inline", cache=cache) as service:
            plan = service.plan_raw(0)
            assert plan is not None
            loads[plan.encoder is not None] = encoder_loads(plan, tree, lambda patches: patches**2, 4)
            images = plan.draw.images
            total = int(((4 * images.length.astype(np.int64)) ** 2).sum())
            assert loads[plan.encoder is not None].sum() == pytest.approx(total)  # each image for itself, once
            where = {}
            for number in range(len(plan.pieces)):
                sample, begin = int(plan.pieces.sample[number]), int(plan.pieces.start[number])
                for token in range(begin, begin + int(plan.pieces.length[number])):
                    where[sample, token] = int(plan.buckets[number])
    by_hand = np.zeros(4)
    for sample, start, length in zip(
        images.sample.tolist(), images.start.tolist(), images.length.tolist(), strict=True
    ):
        by_hand[2 * where[sample, start]] += (4 * length) ** 2
    np.testing.assert_allclose(loads[False], by_hand)
    assert loads[True].max() < loads[False].max()
