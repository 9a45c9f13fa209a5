"""A tiny language model and image encoder, and how a trainer reads the batches of every layout into them.

Everything is float64, so that two ways of computing the same loss differ by rounding only. Sequences that ranks share
are computed side by side: `gather` brings the keys and values of all of them together, in one process or in many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from examples.demo.demo_data import VOCABULARY, DemoFiles
from tests.conftest import slice_indices
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

import overlord as ol
from overlord.integrations.torch_loader import normalize_pixels
from overlord.roles.client import BatchMeta

IGNORE = -100
HIDDEN, HEADS, LAYERS = 16, 2, 2
PATCH, MERGE = 8, 2
STEPS, RATE = 4, 0.2

Trained = tuple[list[float], Tensor]
"""The loss of each step, and the weights in the end."""

Gather = Callable[[list[Tensor]], Tensor]
"""Takes one tensor of every rank computed here; returns those of all ranks that share, one behind the other."""


@dataclass(frozen=True)
class Part:
    """The tokens that one rank has of a microbatch."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    """The label of what follows each token; -100 where there is none."""
    segment: Tensor
    """The sequence that each token belongs to."""
    index: Tensor
    """Where each token stands in the whole microbatch."""
    seen: Tensor
    """Whether others may attend to it."""
    places: Tensor | None = None
    """Where image tokens stand in this part."""
    rows: Tensor | None = None
    """What the encoder made of them."""


@dataclass(frozen=True)
class Patches:
    """The patches that one rank encodes."""

    pixels: Tensor
    image: Tensor
    """The image of each patch."""
    place: Tensor
    """Where the patch stands in its image."""

    @staticmethod
    def of(pixels: Any, lengths: Any, layout: ol.Layout, ids: Any = None, offsets: Any = None) -> Patches:
        """Read patch rows of images (or runs of one), with their numbers and first patches if given."""
        lengths = torch.as_tensor(np.asarray(lengths)).long()
        count = len(lengths)
        first = torch.zeros(count).long() if offsets is None else torch.as_tensor(np.asarray(offsets))
        ids = torch.arange(count) if ids is None else torch.as_tensor(np.asarray(ids))
        within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        values = torch.tensor(np.asarray(pixels))
        if values.dtype == torch.uint8:
            values = normalize_pixels(values, layout.mean, layout.std)
        return Patches(values.double(), ids.repeat_interleave(lengths), within + first.repeat_interleave(lengths))


class Attention(nn.Module):  # type: ignore[misc]
    """Rotary attention over the tokens of all ranks, of which each rank computes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, xs: list[Tensor], positions: list[Tensor], masks: list[Tensor | None], gather: Gather
    ) -> list[Tensor]:
        queries, both = [], []
        for x, position in zip(xs, positions, strict=True):
            q, k, v = self.qkv(functional.rms_norm(x, (HIDDEN,))).view(len(x), 3, HEADS, -1).unbind(1)
            queries.append(rotate(q, position))
            both.append(torch.stack([rotate(k, position), v], dim=1))
        keys, values = gather(both).unbind(1)
        made = []
        for x, q, mask in zip(xs, queries, masks, strict=True):
            q, k, v = (t.transpose(0, 1) for t in (q, keys, values))
            found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
            made.append(x + self.out(found.transpose(0, 1).flatten(1)))
        return made


class TinyLM(nn.Module):  # type: ignore[misc]
    """A causal transformer of two layers."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, HIDDEN)
        self.attention = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, vocabulary)

    def forward(self, parts: Sequence[Part], gather: Gather = torch.cat, *, alone: bool = False) -> Tensor:
        """Return the summed loss of the parts: of one rank, or of several that share their sequences.

        With `alone` the part is one sequence by itself, and nothing but the causal order is looked at.
        """
        masks: list[Tensor | None] = [None] if alone else list(visible(parts, gather))
        positions = [part.positions for part in parts]
        xs = [self._embed(part) for part in parts]
        for attention, mlp in zip(self.attention, self.mlp, strict=True):
            xs = [x + mlp(functional.rms_norm(x, (HIDDEN,))) for x in attention(xs, positions, masks, gather)]
        return sum_of(
            functional.cross_entropy(self.head(x), part.targets, ignore_index=IGNORE, reduction="sum")
            for x, part in zip(xs, parts, strict=True)
        )

    def _embed(self, part: Part) -> Tensor:
        x = self.embedding(part.ids)
        return x if part.places is None or part.rows is None else x.index_copy(0, part.places, part.rows)


class TinyEncoder(nn.Module):  # type: ignore[misc]
    """Patches, one attention layer over those of an image, and merge x merge of them into a token."""

    def __init__(self, patch_bytes: int, merge: int) -> None:
        super().__init__()
        self.patch = nn.Linear(patch_bytes, HIDDEN)
        self.attention = Attention()
        self.merger = nn.Linear(merge**2 * HIDDEN, HIDDEN)

    def forward(self, parts: Sequence[Patches], gather: Gather = torch.cat) -> list[Tensor]:
        """Return the tokens of each rank's patches; the patches of one image may lie on several ranks."""
        image = gather([part.image for part in parts])
        masks: list[Tensor | None] = [part.image[:, None] == image for part in parts]
        xs = self.attention([self.patch(p.pixels) for p in parts], [p.place for p in parts], masks, gather)
        return [self.merger(x.view(-1, self.merger.in_features)) for x in xs]


class TinyVLM(nn.Module):  # type: ignore[misc]
    """Both, begun from a seed."""

    def __init__(self, vocabulary: int, patch_bytes: int = 3, merge: int = 1, seed: int = 0) -> None:
        super().__init__()
        self.encoder = TinyEncoder(patch_bytes, merge)
        self.language = TinyLM(vocabulary)
        generator = torch.Generator().manual_seed(seed)
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn [tokens, heads, size] by their positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half).double() / half)
    a, b = x.unflatten(-1, (2, half)).unbind(-2)
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def visible(parts: Sequence[Part], gather: Gather) -> Iterable[Tensor]:
    """Yield what each part's tokens may attend to: themselves, and what came before in their own sequence."""
    segment, index, seen = (gather([getattr(part, name) for part in parts]) for name in ("segment", "index", "seen"))
    for part in parts:
        before = (part.segment[:, None] == segment) & (part.index[:, None] > index) & seen
        yield before | (part.index[:, None] == index)


def sum_of(losses: Iterable[Tensor]) -> Tensor:
    """Return the sum; zero for none."""
    return sum(losses, torch.zeros((), dtype=torch.float64))


def read_batch(batch: Mapping[str, Any], meta: Any, layout: ol.Layout, part: int) -> Part:
    """Read one rank's microbatch as a trainer of its layout does.

    Args:
        batch: The arrays.
        meta: `batch.meta`; only what a trainer of the layout has no key for is taken from here.
        layout: The layout.
        part: The rank's number among those that share the microbatch.
    """
    names = {
        "hf": ("input_ids", "position_ids"),
        "megatron": ("tokens", "position_ids"),
        "torchtitan": ("input", "positions"),
    }
    ids, positions = (torch.tensor(np.asarray(batch[name])) for name in names[layout.keys])
    of, rows = meta.local_cp_size, layout.rows != "packed"
    boundaries = {"hf": "cu_seq_lens_q", "megatron": "cu_seqlens_padded"}.get(layout.keys)
    width = of if layout.slicing != "whole" else 1
    if rows:
        cu = np.arange(len(ids) + 1) * ids.shape[1] * width
    else:
        cu = np.asarray(batch[boundaries]) if boundaries else meta.cu_seqlens
    slicing = "zigzag" if layout.slicing == "whole" else layout.slicing
    index = slice_indices(cu, of, part, slicing, rows=rows)
    mask = (
        torch.tensor(np.asarray(batch["attention_mask"])).flatten()
        if "attention_mask" in batch
        else torch.ones(ids.numel())
    )
    mine = torch.as_tensor(index) if layout.slicing == "whole" else slice(None)  # the trainer's own cut
    return Part(
        ids=ids.flatten()[mine],
        positions=positions.flatten()[mine],
        targets=targets_of(batch, layout)[mine],
        segment=torch.as_tensor(np.searchsorted(cu, index, side="right") - 1),
        index=torch.as_tensor(index),
        seen=mask.bool()[mine],
    )


def targets_of(batch: Mapping[str, Any], layout: ol.Layout) -> Tensor:
    """Return the label of what follows each token, as the loss of the layout's trainer finds it."""
    labels = torch.tensor(np.asarray(batch["shift_labels" if "shift_labels" in batch else "labels"]))
    if layout.keys == "hf" and "shift_labels" not in batch:
        labels = functional.pad(labels, (0, 1), value=IGNORE)[..., 1:]
    if layout.keys == "megatron":
        labels = labels.where(torch.tensor(np.asarray(batch["loss_mask"])) > 0, IGNORE)
    return labels.flatten()


def put_images(parts: Sequence[Part], made: Tensor, image_token: int) -> list[Part]:
    """Put the tokens of a microbatch's images at its placeholders, of which every rank sees its own only."""
    order = torch.argsort(torch.cat([part.index for part in parts]))
    held = torch.cat([part.ids for part in parts])[order] == image_token
    assert int(held.sum()) == len(made)
    ordinal = held.cumsum(0) - 1
    placed = []
    for part in parts:
        places = torch.nonzero(part.ids == image_token).flatten()
        placed.append(replace(part, places=places, rows=made[ordinal[part.index[places]]]))
    return placed


def job_with_pictures(demo_files: DemoFiles) -> ol.Job:
    """Text and images of the demo, with images of a few tokens, and now and then one of many."""
    sizes: dict[str, Any] = {"patch": PATCH, "merge": MERGE, "min_pixels": 32 * 32}
    samples = {
        "forum": ol.Text("text"),
        "coyo": ol.ImageText("jpg", "caption", **sizes, max_pixels=48 * 48),
        "charts": ol.ImageText("image", "caption", **sizes, max_pixels=112 * 112),
    }
    weights = {"forum": 4, "coyo": 4, "charts": 1}
    return ol.Job(
        sources=[ol.Source(n, demo_files.sources[n], sample=s, weight=weights[n]) for n, s in samples.items()],
        tokenizer=str(demo_files.tokenizer),
        batch=ol.Batch(64, global_samples=9, microbatch_tokens=128),
        overlength="split",
        seed=11,
    )


@dataclass
class Group:
    """Ranks that share one microbatch: each one's batch, in the order of their parts."""

    batches: list[Mapping[str, Any]]
    metas: list[BatchMeta]
    ranks: list[int]

    def parts(self, layout: ol.Layout) -> list[Part]:
        return [read_batch(b, m, layout, n) for n, (b, m) in enumerate(zip(self.batches, self.metas, strict=True))]


@dataclass
class Seen:
    """One step on all ranks of a mesh."""

    index: int
    global_loss_tokens: int
    groups: list[Group]
    encoders: list[Any]
    """`step.encoder` of every rank."""

    def pieces(self) -> Counter[tuple[ol.SampleId, int, int]]:
        """(sample, offset, length) of every piece, and how often it came."""
        metas = [group.metas[0] for group in self.groups]
        return Counter(
            (sample, offset, length)
            for meta in metas
            for sample, offset, length in zip(
                meta.sample_ids, meta.segment_offsets.tolist(), meta.segment_lengths.tolist(), strict=True
            )
            if sample.source
        )


def deliver(
    job: ol.Job,
    cache: str,
    mesh: ol.ClientPlaceTree | None = None,
    strategy: Any = None,
    layout: ol.Layout | None = None,
    steps: int = STEPS,
) -> Iterator[Seen]:
    """Yield what all ranks of a mesh get, ranks that share a microbatch side by side."""
    mesh, layout = mesh or ol.ClientPlaceTree(), layout or ol.Layout()
    with ol.launch(job, mesh=mesh, strategy=strategy, layout=layout, runtime="inline", cache=cache) as service:
        clients = [service.client(rank) for rank in range(mesh.world_size)]
        for _ in range(steps):
            opened = [next(client) for client in clients]
            shared: dict[tuple[int, int, int], dict[int, Any]] = defaultdict(dict)
            for bucket in range(mesh.dp * mesh.cp):
                at = dict(zip(("dp", "cp"), divmod(bucket, mesh.cp), strict=True))
                first, last = (opened[mesh.rank(**at, pp=pp)] for pp in (0, mesh.pp - 1))
                for number, batch in enumerate(first.microbatches):
                    if not first.fetches:
                        continue
                    of = batch.meta.local_cp_size
                    # Ranks that share lie in aligned blocks, and meet in the same microbatch.
                    whole = {**batch, **last.microbatches[number]}
                    shared[number, bucket // of, of][bucket % of] = (whole, batch.meta, mesh.rank(**at))
            groups = []
            for (_, _, of), found in shared.items():
                assert len(found) == of
                batches, metas, ranks = zip(*(found[part] for part in sorted(found)), strict=True)
                assert all(meta.sample_ids == metas[0].sample_ids for meta in metas)
                groups.append(Group(list(batches), list(metas), list(ranks)))
            assert len({step.global_loss_tokens for step in opened}) == 1
            yield Seen(opened[0].index, opened[0].global_loss_tokens, groups, [step.encoder for step in opened])


def alone(buffer: Any, tree: ol.ClientPlaceTree) -> Any:
    """Every piece in a microbatch of its own, on one rank."""
    lengths = buffer.meta["tokens"].astype(int)
    pieces = int((-(-lengths // buffer.limits.context_length)).sum())
    return ol.plan_raw(buffer, tree, bucket=np.zeros(pieces, int), microbatch=np.arange(pieces))


def one_sequence(ids: Any, targets: Any, **images: Tensor) -> Part:
    """One piece by itself."""
    ids = torch.as_tensor(ids)
    order = torch.arange(len(ids))
    return Part(ids, order, torch.as_tensor(targets), order * 0, order, order >= 0, **images)


def train(model: nn.Module, step_losses: Iterable[Callable[[], Tensor]]) -> Trained:
    """Run SGD on the losses, each made when the model is where the step before left it; return them and the weights."""
    losses: list[float] = []
    weights = list(model.parameters())
    for loss_of in step_losses:
        loss = loss_of()
        descend(weights, torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))
        losses.append(float(loss.detach()))
    return losses, torch.cat([weight.detach().flatten() for weight in weights])


def descend(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Take one step of SGD."""
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= RATE * gradient


def model_with_pictures() -> TinyVLM:
    """Return a model for the job of `job_with_pictures`."""
    return TinyVLM(VOCABULARY, patch_bytes=3 * PATCH**2, merge=MERGE)


def train_pictures(steps: Iterable[Seen], loss_of: Callable[[TinyVLM, Seen], Tensor]) -> Trained:
    """Train on text and images, by a function that gives a step's summed loss."""
    model = model_with_pictures()
    return train(model, [partial(_mean_loss, model, loss_of, seen) for seen in steps])


def _mean_loss(model: TinyVLM, loss_of: Callable[[TinyVLM, Seen], Tensor], seen: Seen) -> Tensor:
    return loss_of(model, seen) / seen.global_loss_tokens


def image_token(job: ol.Job) -> int:
    """Return the placeholder of images."""
    found = Tokenizer.from_file(str(job.tokenizer)).token_to_id("<image>")
    assert found is not None
    return found


def apart(job: ol.Job, layout: ol.Layout) -> Callable[[TinyVLM, Seen], Tensor]:
    """Return the loss of pieces one by one, and their images one by one."""
    token = image_token(job)

    def loss(model: TinyVLM, seen: Seen) -> Tensor:
        losses = []
        for group in seen.groups:
            (batch,), (part,) = group.batches, group.parts(layout)
            images = {}
            if "pixel_values" in batch:
                assert len(batch["image_grid_thw"]) == 1
                patches = Patches.of(batch["pixel_values"], [len(batch["pixel_values"])], layout)
                images = {"places": torch.nonzero(part.ids == token).flatten(), "rows": model.encoder([patches])[0]}
            losses.append(model.language([one_sequence(part.ids, part.targets, **images)], alone=True))
        return sum_of(losses)

    return loss
