"""`examples/train_vlm.py` under torchrun: the same losses, weights and samples on every mesh, and after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.demo.demo_data import DemoFiles
from pytest import FixtureRequest as Request

import overlord as ol
from overlord.job_files import LaunchOptions, dump_job_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_vlm.py"
STEPS, SAVED = 20, 10
LIMIT = 200
"""Seconds for one run: eight processes that import torch, on a machine that may be busy."""

pytestmark = pytest.mark.timeout(2 * LIMIT + 100)  # the first test of a module also waits for the run it compares with

# Eight processes import torch for every run: those that show least are for `make test-slow`.
MESHES = [
    pytest.param("dp=2,tp=2", "local", marks=pytest.mark.slow),
    pytest.param("dp=2,cp=2,tp=2", "local", marks=pytest.mark.nightly),
    pytest.param("dp=2,cp=2,pp=2", "local", marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2,pp=2", "local", marks=pytest.mark.nightly),
    pytest.param("dp=2,cp=2,tp=2", "ray", marks=[pytest.mark.ray, pytest.mark.slow]),
    pytest.param("dp=2,cp=2,pp=2", "ray", marks=[pytest.mark.ray, pytest.mark.nightly]),
]
RESUMES = [
    pytest.param("dp=2,cp=2,tp=2", "dp=4,cp=2", "local", marks=pytest.mark.nightly),
    pytest.param("dp=2,cp=2,pp=2", "cp=2,tp=2", "local", marks=pytest.mark.slow),
    pytest.param("dp=2,cp=2,tp=2", "dp=4,cp=2", "ray", marks=[pytest.mark.ray, pytest.mark.nightly]),
]


@dataclass(frozen=True)
class Run:
    """What one run left."""

    folder: Path
    steps: dict[int, dict[str, Any]]
    """By the number of the step: its loss, the loss of each source, its samples."""
    evaluation: float

    def whole(self, steps: int) -> dict[str, torch.Tensor]:
        """The whole tensors of a checkpoint, put together from those of all pipeline stages."""
        found: dict[str, torch.Tensor] = {}
        for file in sorted((self.folder / f"step-{steps:08d}").glob("stage-*.pt")):
            found |= torch.load(file)
        return found


class Runs:
    """Runs of the example, each done once."""

    def __init__(self, job: Path, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self._done: dict[tuple[str, tuple[str, ...], Path | None], Run] = {}

    def train(self, mesh: str, where: tuple[str, ...] = (), resume: Path | None = None) -> Run:
        """Train on a mesh until the last step, saving and evaluating."""
        key = (mesh, where, resume)
        if key not in self._done:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            options = ["--steps", STEPS, "--save", folder, "--save-every", SAVED, "--evaluate"]
            options += ["--json", folder / "log", *where, *(["--resume", resume] if resume else [])]
            self._torchrun(ol.ClientPlaceTree.parse(mesh).world_size, "--mesh", mesh, *options)
            lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
            (evaluation,) = (line["evaluation"] for line in lines if "evaluation" in line)
            self._done[key] = Run(folder, {line["step"]: line for line in lines if "step" in line}, evaluation)
        return self._done[key]

    def _torchrun(self, ranks: int, *options: object) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(EXAMPLE), str(self._job), *map(str, options)]
        # Indices of files go into the folder too, and eight processes on few cores need no threads.
        env = os.environ | {"OMP_NUM_THREADS": "1", "HOME": str(self._folder)}
        with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                output, _ = process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks
                output, _ = process.communicate()
        assert process.returncode == 0, output[-8000:]


@pytest.fixture(scope="module")
def runs(demo_files: DemoFiles, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Text and small images, of which some samples are cut; two microbatches or more where dp is 2."""
    folder = tmp_path_factory.mktemp("vlm")
    sizes: dict[str, Any] = {"patch": 8, "merge": 2, "min_pixels": 32 * 32}
    samples = {
        "forum": ol.Text("text"),
        "coyo": ol.ImageText("jpg", "caption", **sizes, max_pixels=48 * 48),
        "charts": ol.ImageText("image", "caption", **sizes, max_pixels=112 * 112),
    }
    weights = {"forum": 4, "coyo": 4, "charts": 2}
    job = ol.Job(
        sources=[ol.Source(n, demo_files.sources[n], sample=s, weight=weights[n]) for n, s in samples.items()],
        tokenizer=str(demo_files.tokenizer),
        batch=ol.Batch(64, global_samples=12, microbatch_tokens=256),
        overlength="split",
        seed=11,
    )
    (folder / "job.yaml").write_text(dump_job_yaml(job, LaunchOptions()))
    return Runs(folder / "job.yaml", folder)


def where(runtime: str, request: Request) -> tuple[str, ...]:
    """On which runtime the example takes its data, as its options say it."""
    return ("--runtime", "ray", "--address", request.getfixturevalue("ray_address")) if runtime == "ray" else ()


def assert_same_training(run: Run, one: Run, first: int = 0) -> None:
    """Losses to 1e-4 and samples as one process had them; weights and moments too, up to rounding."""
    assert sorted(run.steps) == list(range(first, STEPS))
    for number, step in run.steps.items():
        alone = one.steps[number]
        assert step["samples"] == alone["samples"]
        assert step["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert step["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert run.evaluation == pytest.approx(one.evaluation, abs=1e-4)
    # AdamW takes the same step whatever the scale of a gradient: its first moments tell a gradient that was summed or
    # divided once too often.
    found, expected = run.whole(STEPS), one.whole(STEPS)
    assert found.keys() == expected.keys()
    for name in (name for name in expected if name.endswith("/exp_avg")):
        off = (found[name] - expected[name]).norm() / expected[name].norm()
        assert off < 1e-3, name


@pytest.mark.slow
def test_one_process_learns_from_text_and_images(runs: Runs) -> None:
    one = runs.train("dp=1")
    assert sorted(one.steps) == list(range(STEPS))
    assert one.steps[STEPS - 1]["loss"] < one.steps[0]["loss"] - 0.5
    assert set(one.steps[0]["losses"]) == {"charts", "coyo", "forum"}
    pieces = [piece for step in one.steps.values() for piece in step["samples"]]
    assert any(not piece.endswith("+0") for piece in pieces)  # some samples are cut
    weights = one.whole(STEPS)
    moved = weights["encoder.patch/weight"] - one.whole(SAVED)["encoder.patch/weight"]
    assert moved.abs().max() > 0  # gradients reach the encoder's first weight


@pytest.mark.parametrize(("mesh", "runtime"), MESHES)
def test_ranks_train_as_one_process_does(mesh: str, runtime: str, runs: Runs, request: Request) -> None:
    assert_same_training(runs.train(mesh, where(runtime, request)), runs.train("dp=1"))


@pytest.mark.parametrize(("before", "after", "runtime"), RESUMES)
@pytest.mark.slow
def test_a_checkpoint_is_resumed_on_another_mesh(
    before: str, after: str, runtime: str, runs: Runs, request: Request
) -> None:
    saved = runs.train(before, where(runtime, request)).folder / f"step-{SAVED:08d}"
    assert_same_training(runs.train(after, where(runtime, request), saved), runs.train("dp=1"), first=SAVED)
