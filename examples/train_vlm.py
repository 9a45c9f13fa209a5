"""A small vision-language model trained under torchrun on DP x CP x TP x PP ranks: the loop to copy.

Images are encoded data-parallel over all ranks and sent to the ranks that hold their tokens. The losses are the same
on every mesh, and a checkpoint of one mesh is resumed on any other. The model is in vlm_model.py.

    torchrun --nproc-per-node 8 examples/train_vlm.py --demo vlm-demo --mesh dp=2,cp=2,tp=2 --save checkpoints
    torchrun --nproc-per-node 8 examples/train_vlm.py --demo vlm-demo --mesh dp=4,pp=2 --resume checkpoints --steps 40

A service that is running already must know the mesh, and what this loop expects of batches:

    overlord serve job.yaml --mesh dp=2,pp=2 --strategy vlm_hybrid --layout torchtitan
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from demo.demo_data import demo_job, write_demo
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from vlm_model import Encoder, Shape, Stage, cut_part, make_whole, token_segments

import overlord as ol
from overlord.integrations.torch_loader import DataLoader, TorchBatch, TorchStep, exchange_images

MOMENTS = ("exp_avg", "exp_avg_sq")


class Trainer:
    """The model of this rank, its optimizer, and what is done with both."""

    def __init__(self, shape: Shape, mesh: DeviceMesh, device: torch.device, rate: float) -> None:
        self.mesh, self.device, self.width = mesh, device, shape.width
        self.at = {axis: mesh.get_local_rank(axis) for axis in ("pp", "dp", "cp", "tp")}
        self.encoder, self.stage = Encoder(shape).to(device), Stage(shape, mesh).to(device)
        self.model = nn.ModuleDict({"encoder": self.encoder, "backbone": self.stage})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def run(self, step: TorchStep, batches: list[TorchBatch], *, train: bool = True) -> Tensor:
        """Run one step; return the summed loss and the number of labels of each source, in the whole global batch."""
        if step.encoder is None:
            raise SystemExit("the service does not plan images by themselves; start it with --strategy vlm_hybrid")
        sums = torch.zeros(len(step.source_names), 2, dtype=torch.float64, device=self.device)
        with torch.set_grad_enabled(train):
            # One pass of the encoder and one all-to-all serve all microbatches of the step.
            inputs = step.encoder.to(self.device)
            arrived = exchange_images(self.encoder(inputs), inputs)
            # The graph is cut here: gradients of all microbatches gather in `images`, and go back once.
            images = arrived.detach().requires_grad_(train)
            passed = [self.forward(batch, images, sums) for batch in batches]
        if train:
            for x, out in passed:  # GPipe: all forward, then all backward
                self.backward(x, out, max(1, step.global_loss_tokens))  # 0 where all samples of a step are broken
            # Every tensor-parallel rank has a copy of the images and its whole gradient, so it sends a share of that.
            # Ranks without images take part in the all-to-all too.
            gradient = torch.zeros_like(images) if images.grad is None else images.grad
            arrived.backward(gradient / self.mesh["tp"].size())
            self.sum_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.all_reduce(sums)
        return sums

    def forward(self, batch: TorchBatch, images: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Run a microbatch through this stage; return what came in and what went out (of the last stage, the loss)."""
        if self.stage.is_first:
            x = self.stage.embed(batch, images)
        else:
            x = torch.empty(len(batch["positions"]), self.width, device=self.device)
            dist.recv(x, self.neighbour(-1), group=self.mesh.get_group("pp"))
            x.requires_grad_(torch.is_grad_enabled())
        out = self.stage(x, batch)
        if not self.stage.is_last:
            dist.send(out.detach().contiguous(), self.neighbour(1), group=self.mesh.get_group("pp"))
            return x, out
        losses = functional.cross_entropy(out, batch["labels"], ignore_index=-100, reduction="none")
        if self.at["tp"] == 0:  # tensor-parallel ranks have the same losses: one of them counts
            add_by_source(sums, batch, losses.detach())
        return x, losses.sum()

    def backward(self, x: Tensor, out: Tensor, global_loss_tokens: int) -> None:
        """Run a microbatch back through this stage."""
        if self.stage.is_last:
            # Every rank divides by the same number, so it does not matter who got which sample.
            (out / global_loss_tokens).backward()
        else:
            gradient = torch.empty_like(out)
            dist.recv(gradient, self.neighbour(1), group=self.mesh.get_group("pp"))
            out.backward(gradient)
        if not self.stage.is_first:
            dist.send(x.grad.contiguous(), self.neighbour(-1), group=self.mesh.get_group("pp"))

    def neighbour(self, by: int) -> int:
        """Return the rank of the next stage (1), or of the one before (-1)."""
        return int(self.mesh["pp"].mesh[self.at["pp"] + by])

    def sum_gradients(self) -> None:
        """Sum gradients over ranks that saw other samples (DP) or tokens (CP); of the encoder, over all ranks."""
        everybody = [dist.group.WORLD]
        sharing = [self.mesh.get_group(axis) for axis in ("dp", "cp")]
        for module, groups in ((self.encoder, everybody), (self.stage, sharing)):
            gradients = [weight.grad for weight in module.parameters()]
            flat = torch.cat([gradient.flatten() for gradient in gradients])  # one message instead of many
            for group in groups:
                dist.all_reduce(flat, group=group)
            for gradient, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def evaluate(self, job: ol.Job, **options: Any) -> float:
        """Return the mean loss over every sample of a job, each taken once; dummies keep the ranks even."""
        with DataLoader(job.evaluation(), **options) as loader:
            sums = [self.run(step, batches, train=False).sum(0) for step, batches, _ in fetch(loader, self.device)]
            dist.barrier()  # rank 0 ends the service when all are done
        loss, labels = torch.stack(sums).sum(0).tolist()
        return loss / labels

    def save(self, folder: Path, steps: int, data: dict[str, Any]) -> None:
        """Write weights, moments and the state of the data; the folder gets its name when all of it is there."""
        final = folder / f"step-{steps:08d}"
        part = final.with_suffix(".part")
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)  # of a run that died while it saved
            part.mkdir(parents=True)
            (part / "state.json").write_text(json.dumps({"steps": steps, "data": data}))
        dist.barrier()
        if self.at["dp"] == self.at["cp"] == 0:  # other ranks have the same weights
            whole: dict[str, Tensor] = {}
            for name, weight in self.model.named_parameters():
                tensors = {"weight": weight, **{key: self.optimizer.state[weight][key] for key in MOMENTS}}
                whole |= {f"{name}/{key}": make_whole(one, weight.cut, weight.tp) for key, one in tensors.items()}
            if self.at["tp"] == 0:
                torch.save(whole, part / f"stage-{self.at['pp']}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed from an earlier step
            part.rename(final)

    def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """Read a checkpoint of any mesh (in a folder of several the newest); return its steps and the data's state."""
        folder = max(folder.glob("step-*[0-9]"), default=folder)
        if not (folder / "state.json").exists():
            raise SystemExit(f"--resume {folder}: no checkpoint is there; --save writes step-N folders")
        state = json.loads((folder / "state.json").read_text())
        whole: dict[str, Tensor] = {}
        for file in sorted(folder.glob("stage-*.pt")):
            whole |= torch.load(file, map_location="cpu", mmap=True)  # only what this rank takes is read
        for name, weight in self.model.named_parameters():
            mine = {key: cut_part(whole[f"{name}/{key}"], weight.cut, weight.tp) for key in ("weight", *MOMENTS)}
            weight.data.copy_(mine["weight"])
            moments = {key: mine[key].to(self.device, copy=True) for key in MOMENTS}
            self.optimizer.state[weight] = {"step": torch.tensor(float(state["steps"])), **moments}
        return state["steps"], state["data"]


def add_by_source(sums: Tensor, batch: TorchBatch, losses: Tensor) -> None:
    """Add every label's loss, and 1 for the label, to its source."""
    counts = batch["labels"] != -100  # nowhere in a dummy, whose source is -1
    sources = torch.as_tensor(batch.meta.source_ids, device=losses.device)[token_segments(batch)[counts]]
    sums.index_add_(0, sources, torch.stack([losses[counts], torch.ones_like(losses[counts])], 1).double())


def fetch(loader: Iterable[TorchStep], device: torch.device) -> Iterator[tuple[TorchStep, list[TorchBatch], float]]:
    """Yield every step, its microbatches on the device, and how many seconds this rank waited for them."""
    begun = time.perf_counter()
    for step in loader:
        batches = [batch.to(device) for batch in step.microbatches]
        yield step, batches, time.perf_counter() - begun
        begun = time.perf_counter()


def samples_of(batches: list[TorchBatch], at: dict[str, int]) -> list[str]:
    """Return the samples of the whole global batch as they were delivered, with the first token of each piece."""
    mine = []
    if at["pp"] == at["cp"] == at["tp"] == 0:  # the others have parts of the same samples
        for batch in batches:
            pieces = zip(batch.meta.sample_ids, batch.meta.segment_offsets.tolist(), strict=True)
            mine += [f"{sample}+{offset}" for sample, offset in pieces if sample.source]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return sorted(piece for pieces in found for piece in pieces)


def train(trainer: Trainer, job: ol.Job, options: argparse.Namespace) -> None:
    """Train from the beginning or from a checkpoint; report, evaluate and save on the way."""
    # torchtitan's batches are simple: ids, positions, and labels that are shifted also where ranks share a sequence.
    how: dict[str, Any] = {"mesh": trainer.mesh, "strategy": ol.strategies.vlm_hybrid(), "layout": "torchtitan"}
    how |= {"runtime": options.runtime, "address": options.address}
    loader = DataLoader(options.service, mesh=trainer.mesh) if options.service else DataLoader(job, **how)
    done = 0
    if options.resume:
        done, data = trainer.load(options.resume)
        loader.load_state_dict(data)  # a running service must have been started from it: `overlord serve --resume`
    with loader:
        stream = fetch(loader, trainer.device)
        while done < options.steps and (fetched := next(stream, None)):
            step, batches, waited = fetched
            sums = trainer.run(step, batches)
            done = step.index + 1
            loss = sums[:, 0].sum().item() / max(1, step.global_loss_tokens)
            # A source that the step took nothing of has no loss.
            losses = {name: a / b for name, (a, b) in zip(step.source_names, sums.tolist(), strict=True) if b}
            shown = " ".join(f"{name} {mean:.2f}" for name, mean in losses.items())
            line: dict[str, Any] = {"step": step.index, "loss": loss, "losses": losses}
            if options.json:
                line["samples"] = samples_of(batches, trainer.at)
            if dist.get_rank() == 0:
                loader.report(step.index, {f"loss/{name}": mean for name, mean in losses.items()})
                waits = f"waited {1000 * waited:.0f} ms for data"
                tell(
                    f"step {step.index:4d}  loss {loss:.4f}  {step.global_tokens} tokens, {waits}  {shown}",
                    line,
                    options,
                )
            if options.save and (done % options.save_every == 0 or done == options.steps):
                trainer.save(options.save, done, loader.state_dict())
            if options.eval_every and done % options.eval_every == 0 and done < options.steps:
                evaluate(trainer, job, how, done, options)
        dist.barrier()  # rank 0 ends the service when all are done
    if options.eval_every or options.evaluate is not None:
        evaluate(trainer, job, how, done, options)


def evaluate(trainer: Trainer, job: ol.Job, how: dict[str, Any], done: int, options: argparse.Namespace) -> None:
    """Evaluate and tell the result."""
    mean = trainer.evaluate(ol.load_job(options.evaluate) if options.evaluate else job, **how)
    if dist.get_rank() == 0:
        tell(f"evaluation after {done} steps: loss {mean:.4f}", {"steps": done, "evaluation": mean}, options)


def tell(text: str, line: dict[str, Any], options: argparse.Namespace) -> None:
    print(text, flush=True)
    if options.json:
        with options.json.open("a") as log:
            log.write(json.dumps(line) + "\n")


def shape_of(job: ol.Job) -> Shape:
    """Return the sizes that follow from a job: the vocabulary of its tokenizer, the patches of its images."""
    pictures = [one.sample for one in job.sources if isinstance(one.sample, ol.ImageText | ol.Interleaved)]
    if not pictures or job.tokenizer is None:
        raise SystemExit("this example trains on text and images: the job needs a tokenizer, and a source with images")
    file = Path(job.tokenizer)
    file = file / "tokenizer.json" if file.is_dir() else file
    patch_values = 3 * pictures[0].temporal * pictures[0].patch ** 2
    return Shape(Tokenizer.from_file(str(file)).get_vocab_size(), patch_values, pictures[0].merge)


def read_job(options: argparse.Namespace) -> ol.Job:
    """Return the job of a file, or that of the demo with steps that a few CPU cores can train on."""
    if options.job:
        return ol.load_job(options.job)
    if not options.demo:
        raise SystemExit("give a job file, or --demo FOLDER to write its data")
    if dist.get_rank() == 0:
        write_demo(Path(options.demo), scale=0.1)
    dist.barrier()
    return demo_job(write_demo(Path(options.demo), scale=0.1)).replace(batch=ol.Batch(512, global_tokens=4096))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", help="a job file with text and images")
    parser.add_argument("--demo", metavar="FOLDER", help="write the demo's data and train on that")
    parser.add_argument("--mesh", type=ol.ClientPlaceTree.parse, help="such as dp=2,cp=2,tp=2 (default: only dp)")
    parser.add_argument("--steps", type=int, default=20, help="train until so many steps are done")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--runtime", default="local", choices=("local", "ray"), help="where the data service runs")
    parser.add_argument("--address", help="with --runtime ray: a cluster that is running")
    parser.add_argument("--service", metavar="ADDRESS", help="take the data from a running `overlord serve`")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="for checkpoints; all hosts must see it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from a checkpoint of any mesh")
    parser.add_argument("--evaluate", nargs="?", const="", metavar="JOB", help="evaluate at the end (on another job)")
    parser.add_argument("--eval-every", type=int, metavar="STEPS", help="evaluate on the way too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line for each step and evaluation")
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    on_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    tree = options.mesh or ol.ClientPlaceTree(dp=dist.get_world_size())
    tree.check_world_size(dist.get_world_size())
    # The axes in the order in which a ClientPlaceTree counts ranks: pp is outermost, tp innermost.
    mesh = init_device_mesh(device.type, (tree.pp, tree.dp, tree.cp, tree.tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    job = read_job(options)
    train(Trainer(shape_of(job), mesh, device, options.rate), job, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
