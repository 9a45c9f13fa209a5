"""How long a GPU waits for its batches, with a model that takes 80 % of what bare decoding processes make.

The pictures and the job are those of `benchmarks.feed`. First as many bare processes as there are workers decode them;
then a transformer over their patches gets as many layers as let it take 80 % of that rate, forward and backward. It is
fed by a `local` service twice: through `DataLoader`, which copies the next microbatch out of pinned memory
while the last one is computed, and by hand, with a plain copy of each microbatch before it is used. The GPU waits from
the end of one microbatch's kernels to the beginning of the next one's, by its own clock. As in `benchmarks.feed`, a
round begins when the service is warm; what the GPU waits in those first seconds is told too.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import overlord as ol
from benchmarks.feed import WARM_UP_S, bare_processes, image_job, write_images
from benchmarks.measuring import arguments, publish
from overlord.integrations.torch_loader import DataLoader
from overlord.runtimes.supervision.child import usable_cpus

PATCHES = 196
"""Of a picture of 224 x 224."""
SHARE = 0.8
"""Of what the bare processes make: what the model takes."""
WIDTH = 1024
DEVICE = torch.device("cuda")


class Model(nn.Module):
    """A vision transformer that is trained to predict nothing in particular."""

    def __init__(self, layers: int, inputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, WIDTH)
        layer = [nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, 0.0, batch_first=True) for _ in range(layers)]
        self.layers = nn.Sequential(*layer)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        hidden: torch.Tensor = self.layers(self.embed(pixels.view(-1, PATCHES, pixels.shape[-1]).bfloat16() / 255))
        return hidden.float().square().mean()


def train(model: Model, pixels: torch.Tensor) -> None:
    """Do one microbatch, forward and backward."""
    model(pixels).backward()
    for parameter in model.parameters():
        parameter.grad = None


def samples_per_s(layers: int, inputs: int, samples: int) -> float:
    """Return what a model of so many layers takes, with its input on the device."""
    model = Model(layers, inputs).to(DEVICE, torch.bfloat16)
    pixels = torch.zeros(samples * PATCHES, inputs, dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        train(model, pixels)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        train(model, pixels)
    torch.cuda.synchronize()
    return 10 * samples / (time.perf_counter() - began)


def sized_model(rate: float, inputs: int, samples: int) -> tuple[Model, float]:
    """Return a model that takes about so many samples a second, and what it takes."""
    few, more = (1 / samples_per_s(layers, inputs, samples) for layers in (4, 12))
    each = (more - few) / 8
    layers = max(1, round((1 / rate - (few - 4 * each)) / each))
    return Model(layers, inputs).to(DEVICE, torch.bfloat16), samples_per_s(layers, inputs, samples)


def copied_ahead(job: ol.Job, **options: Any) -> Iterator[torch.Tensor]:
    """Yield the pixels of microbatches that were copied while the ones before were computed."""
    with DataLoader(job, device=DEVICE, **options) as loader:
        for step in loader:
            for batch in step.microbatches:
                yield batch["pixel_values"]


def copied_when_used(job: ol.Job, **options: Any) -> Iterator[torch.Tensor]:
    """Yield the pixels of microbatches, each copied when it is asked for."""
    with ol.launch(job, **options) as service, service.client() as client:
        for step in client:
            for batch in step.microbatches:
                yield torch.from_numpy(batch["pixel_values"].copy()).to(DEVICE)


def waiting(model: Model, batches: Iterator[torch.Tensor], seconds: float) -> dict[str, float]:
    """Train for a while; return the shares of the time in which the GPU waited, the longest wait, and samples/s."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    sizes: list[int] = []
    cold, began = 0, 0.0
    for pixels in batches:
        began = began or time.perf_counter()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        train(model, pixels)
        last.record()
        marks.append((first, last))
        sizes.append(len(pixels) // PATCHES)
        if len(marks) > 2:
            marks[-3][1].synchronize()  # a trainer does not run further ahead: its optimizer step waits
        past = time.perf_counter() - began
        cold = len(marks) if past < WARM_UP_S else cold
        if past > WARM_UP_S + seconds:
            break
    torch.cuda.synchronize()
    waits = [max(0.0, one[1].elapsed_time(two[0])) for one, two in itertools.pairwise(marks)]
    whole = marks[cold][0].elapsed_time(marks[-1][1])
    return {
        "waits": sum(waits[cold:]) / whole,
        "longest_ms": max(waits[cold:]),
        "waits_at_first": sum(waits[:cold]) / marks[0][0].elapsed_time(marks[cold][0]),
        "samples_per_s": sum(sizes[cold:]) / (whole / 1000),
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    parser.add_argument("--workers", type=int, default=usable_cpus(), help="of the service (default: all cores)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU, and torch finds none; `python -m benchmarks.feed` needs none.")
    folder = Path(tempfile.mkdtemp(prefix="overlord-gpu-feed-"))
    try:
        write_images(folder, 2048)
        job = image_job(folder, 32 * options.workers)
        bare = bare_processes("image", folder, options.workers, min(options.seconds, 4.0))
        given: dict[str, Any] = {"threads": options.workers, "prefetch": 4, "cache": str(folder / "cache")}
        pixels = next(first := copied_ahead(job, **given))
        first.close()
        model, takes = sized_model(SHARE * bare, pixels.shape[-1], len(pixels) // PATCHES)
        ahead = waiting(model, copied_ahead(job, **given), options.seconds)
        by_hand = waiting(model, copied_when_used(job, **given), options.seconds)
    finally:
        shutil.rmtree(folder)
    publish(
        "gpu_feed",
        {
            "gpu": torch.cuda.get_device_name(),
            "workers": options.workers,
            "bare_samples_per_s": bare,
            "model_takes_samples_per_s": takes,
            "layers": len(model.layers),
            "gpu_waits": ahead["waits"],
            "longest_wait_ms": ahead["longest_ms"],
            "gpu_waits_in_the_first_seconds": ahead["waits_at_first"],
            "samples_per_s": ahead["samples_per_s"],
            "gpu_waits_without_copy_ahead": by_hand["waits"],
            "samples_per_s_without_copy_ahead": by_hand["samples_per_s"],
            "bar": 0.01,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
