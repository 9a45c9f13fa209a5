"""Small generated media: sounds in tar shards, clips in Parquet, notes in JSONL, and the job that reads them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from overlord.cli.demo_data import train_tokenizer
from overlord.cli.demo_text import Writer
from overlord.errors import SpecError
from overlord.job.specs import Audio, Batch, Job, Mixture, Source, Text, Video
from overlord.transforms.samples.media_text import media_library

SPECIAL_TOKENS = (
    "<unk>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip
VOCABULARY = 1024
NOTES_PER_ITEM = 2
_RATES = (16000, 16000, 8000, 44100)
_SHARDS = 2


def write_media(folder: Path, *, clips: int, sounds: int, seed: int = 0, corrupt: int = 0) -> list[Path]:
    """Write sounds, clips, notes and a tokenizer into a folder and return the files.

    Args:
        folder: Created if missing; files of the same names are written again.
        clips: How many clips.
        sounds: How many sounds.
        seed: Another seed gives other media.
        corrupt: How many of the clips, and how many of the sounds, are damaged: in turn in the body, which is found
            when they are decoded, and in the header, which is found when they are measured.

    Raises:
        SpecError: when a number makes no sense, or the libraries for media are not installed.
    """
    if clips < _SHARDS or sounds < _SHARDS or not 0 <= corrupt <= min(clips, sounds):
        raise SpecError(
            f"clips={clips}, sounds={sounds}, corrupt={corrupt}: there must be at least {_SHARDS} of each for as many "
            "files, and not more damaged ones than there are. Raise clips and sounds, or lower corrupt."
        )
    writer = Writer(np.random.default_rng([seed, 0]))
    lengths = np.random.default_rng([seed, 1]).integers(6, 40, clips + sounds)
    captions = writer.captions(lengths)
    notes = writer.articles(np.random.default_rng([seed, 2]).integers(20, 300, NOTES_PER_ITEM * (clips + sounds)))
    heard = [_draw_sound(np.random.default_rng([seed, 3, row]), row) for row in range(sounds)]
    seen = [_draw_clip(np.random.default_rng([seed, 4, row])) for row in range(clips)]
    for row in range(corrupt):
        # The middle of each shard rather than its first rows: a run begins well and meets them later.
        heard[(row + sounds // 2) % sounds] = _damage(heard[(row + sounds // 2) % sounds], in_header=row % 2 > 0)
        seen[(row + clips // 2) % clips] = _damage(seen[(row + clips // 2) % clips], in_header=row % 2 > 0)
    files = [
        *_write_sounds(folder / "sounds", heard, captions[clips:]),
        *_write_clips(folder / "clips", seen, captions[:clips]),
        _write_notes(folder / "notes", notes),
    ]
    train_tokenizer([*captions, *notes], VOCABULARY, SPECIAL_TOKENS).save(str(folder / "tokenizer.json"))
    return [*files, folder / "tokenizer.json"]


def media_job(folder: Path) -> Job:
    """Return the job that reads what `write_media` wrote: sounds, clips and notes in turn."""
    audio = Audio("flac", "txt", seconds=6, before="<|audio_bos|>", after="<|audio_eos|>")
    video = Video(
        "mp4", "caption", max_frames=16, min_pixels=56 * 56, max_pixels=112 * 112, before="<|vision_start|>",
        after="<|vision_end|>",
    )  # fmt: skip
    return Job(
        sources=[
            Source("sounds", str(folder / "sounds" / "*.tar"), sample=audio, tolerance=1.0),
            Source("clips", str(folder / "clips" / "*.parquet"), sample=video, tolerance=1.0),
            Source("notes", str(folder / "notes" / "*.jsonl"), sample=Text("text")),
        ],
        mixture=Mixture({"sounds": 0.3, "clips": 0.3, "notes": 0.4}),
        tokenizer=str(folder / "tokenizer.json"),
        batch=Batch(context_length=512, global_samples=8),
        seed=0,
    )


def _draw_sound(rng: np.random.Generator, row: int) -> bytes:
    """Return a gliding tone with noise as FLAC; every fourth sound has two channels."""
    rate = _RATES[row % len(_RATES)]
    count = int(rate * rng.uniform(0.3, 5.0))
    low, high = rng.uniform(80, 0.4 * rate, 2)
    glide = np.cumsum(np.linspace(low, high, count)) / rate
    sound = 0.4 * np.sin(2 * np.pi * glide) + 0.02 * rng.standard_normal(count)
    channels = np.stack([sound, 0.5 * sound], axis=1) if row % 4 == 3 else sound
    out = io.BytesIO()
    media_library("soundfile").write(out, channels.astype(np.float32), rate, format="FLAC")
    return out.getvalue()


def _draw_clip(rng: np.random.Generator) -> bytes:
    """Return a square that moves over a gradient as MP4."""
    av = media_library("av")
    width, height = (int(side) * 16 for side in rng.integers(5, 11, 2))
    frames, rate = int(rng.integers(6, 49)), int(rng.choice([8, 12, 24]))
    out = io.BytesIO()
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=rate, options={"g": "12"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # encoders write other bytes on other numbers of threads
        for pixels in _move_square(rng, frames, height, width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def _move_square(rng: np.random.Generator, frames: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[:height, :width]
    ground = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)
    film = np.repeat(ground[None], frames, axis=0)
    side, colour = height // 4, rng.integers(0, 256, 3).astype(np.uint8)
    start, stop = rng.uniform(0, [height - side, width - side], (2, 2))
    for number, (top, left) in enumerate(np.linspace(start, stop, frames).astype(np.int64)):
        film[number, top : top + side, left : left + side] = colour
    return film


def _damage(data: bytes, *, in_header: bool) -> bytes:
    if in_header:
        return data[:24]
    # An MP4 describes itself behind its body, a FLAC file in front of it.
    begin, end = (data.index(b"mdat") + 4, data.rindex(b"moov") - 4) if b"moov" in data else (len(data) // 2, len(data))
    return data[:begin] + b"\xff" * (end - begin) + data[end:]


def _write_sounds(folder: Path, sounds: Sequence[bytes], captions: Sequence[str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"sounds-{number:03d}.tar" for number in range(_SHARDS)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for row in range(number, len(sounds), _SHARDS):
                for suffix, data in (("flac", sounds[row]), ("txt", captions[row].encode())):
                    member = tarfile.TarInfo(f"{row:06d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


def _write_clips(folder: Path, clips: Sequence[bytes], captions: Sequence[str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"clips-{number:03d}.parquet" for number in range(_SHARDS)]
    for number, path in enumerate(paths):
        clip = pa.array(clips[number::_SHARDS], pa.binary())
        table = cast("Any", pa.table({"mp4": clip, "caption": captions[number::_SHARDS]}))
        pq.write_table(table, path, row_group_size=8, compression="none", use_dictionary=False)
    return paths


def _write_notes(folder: Path, notes: Sequence[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "notes-000.jsonl"
    path.write_text("".join(json.dumps({"text": note}) + "\n" for note in notes))
    return path
