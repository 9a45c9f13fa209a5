"""Runs every kind of sample on several meshes, layouts and strategies: `python -m tests.runtimes.every_kind FOLDER`."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from examples.demo.demo_data import write_media
from PIL import Image
from tokenizers import Tokenizer

import overlord as ol
from overlord.planning.balancing.packing import PackMethod

ROWS = 24
VISION = {"patch": 14, "merge": 2, "temporal": 2}
HALF = ol.ClientPlaceTree(dp=2)
FOUR = ol.ClientPlaceTree(dp=2, cp=2)


def counted(row: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens of a custom sample."""
    return {"tokens": [1, 2, 3] * (1 + int(row["n"]) % 5)}


def picture(number: int, width: int, height: int) -> bytes:
    """Return a JPEG file."""
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([(x * number) % 256, (y + 40 * number) % 256, (x + y) % 256], -1).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


def write_sources(folder: Path) -> list[ol.Source]:
    """Write files of every kind of sample and return their sources."""
    write_media(folder, clips=8, sounds=8)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = [picture(n, 30 + 60 * (n % 4), 64) for n in range(ROWS)]
    urls = ["data:image/jpeg;base64," + base64.b64encode(file).decode() for file in files]
    lines: dict[str, list[dict[str, Any]]] = {
        "chats": [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]}
                  for n in range(ROWS)],
        "ids": [{"ids": [n] * (1 + 7 * n % 90)} for n in range(ROWS)],
        "numbers": [{"n": n} for n in range(ROWS)],
        "paths": [{"image": f"{n}.jpg", "text": "a picture"} for n in range(ROWS)],
        "urls": [{"image": url, "text": "a picture"} for url in urls],
        "links": [{"image": "https://example.org/a.jpg", "text": "a picture"} for _ in range(ROWS)],
    }  # fmt: skip
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "files").mkdir()
    for number, file in enumerate(files):
        (folder / "files" / f"{number}.jpg").write_bytes(file)
    pq.write_table(pa.table({"image": files, "text": ["a picture"] * ROWS}), folder / "pictures.parquet")
    images = [files[: n % 4] for n in range(ROWS)]
    texts = ["<image> " * (n % 4) + "the end." for n in range(ROWS)]
    pq.write_table(pa.table({"images": images, "text": texts}), folder / "docs.parquet")
    clip = {"max_frames": 16, "min_pixels": 56 * 56, "max_pixels": 112 * 112}
    samples: dict[str, Any] = {
        "notes": ol.Text("text"),
        "ids.jsonl": ol.Text("ids", tokenized=True),
        "chats.jsonl": ol.Chat(template="chatml"),
        "pictures.parquet": ol.ImageText("image", "text", **VISION),
        "paths.jsonl": ol.ImageText("image", "text", folder=str(folder / "files"), **VISION),
        "urls.jsonl": ol.ImageText("image", "text", **VISION),
        "links.jsonl": ol.ImageText("image", "text", **VISION),  # which are not downloaded: bad samples
        "docs.parquet": ol.Interleaved("images", "text", **VISION),
        "sounds": ol.Audio("flac", "txt", seconds=6, before="<|audio_bos|>", after="<|audio_eos|>"),
        "clips": ol.Video("mp4", "caption", before="<|vision_start|>", after="<|vision_end|>", **clip),
        "numbers.jsonl": ol.Custom(counted, columns=["n"]),
    }
    return [
        ol.Source(path.split(".")[0], str(folder / path), sample=sample, tolerance=1.0)
        for path, sample in samples.items()
    ]


def run(job: ol.Job, folder: Path, steps: int = 3, **options: Any) -> None:
    """Take some steps on every rank."""
    options = {"mesh": FOUR, "runtime": "inline", "cache": str(folder / "cache")} | options
    with ol.launch(job, **options) as service:
        clients = [service.client(rank) for rank in range(options["mesh"].world_size)]
        for _ in range(steps):
            for client in clients:
                for batch in next(client).microbatches:
                    batch.digest()


def main(folder: Path) -> None:
    """Run everything."""
    sources = write_sources(folder)
    job = ol.Job(sources, tokenizer=str(folder / "tokenizer.json"), batch=ol.Batch(512, global_samples=24))
    for source in sources:
        run(job.replace(sources=[source]), folder, mesh=ol.ClientPlaceTree())
    for hosts in ({}, {"threads": 3}, {"loader_hosts": 2}):
        run(job, folder, runtime="local", mesh=HALF, **hosts)
    layouts = [ol.Layout(name) for name in ("hf", "megatron", "torchtitan")]
    layouts += [ol.Layout(rows="padded"), ol.Layout(pixels="float32"), ol.Layout(positions="mrope")]
    layouts += [ol.Layout(slicing=slicing) for slicing in ("whole", "whole_zigzag", "contiguous")]
    for layout in layouts:
        run(job, folder, layout=layout)
    omni = ol.strategies.vlm_hybrid(ol.costs.tokens, ol.costs.tokens, audio=ol.costs.tokens, split=True)
    hybrid = [ol.strategies.hdp(), ol.strategies.hdp(equal_counts=True)]
    packed = [ol.strategies.packed(method=method) for method in get_args(PackMethod)]
    for strategy in (ol.strategies.vanilla(), omni, *hybrid, *packed):
        run(job, folder, strategy=strategy)
    for overlength in ("split", "truncate", "drop"):
        run(job.replace(overlength=overlength, batch=ol.Batch(300, global_tokens=2000)), folder, mesh=HALF)
    run(job.replace(mixture=ol.Mixture(level="token")), folder, placement="loader")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
