"""A run compiles before it is launched, never while a trainer waits for a step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import sys
import numba.core.event as events
import overlord as ol

class Compiled(events.Listener):
    def __init__(self): self.names = []
    def on_start(self, event): self.names.append(str(event.data["dispatcher"]))
    def on_end(self, event): pass

job = ol.Job(
    sources=[ol.Source("a", sys.argv[1], sample=ol.Text("ids", tokenized=True))],
    batch=ol.Batch(32, global_samples=11), overlength="split",
)
with ol.launch(job, mesh=ol.ClientPlaceTree(dp=2, cp=2), runtime="inline", cache=sys.argv[2]) as service:
    seen = Compiled()
    with events.install_listener("numba:compile", seen):
        for rank in range(4):
            client = service.client(rank)
            for _ in range(5):
                list(next(client).microbatches)
print("compiled:", seen.names)
"""


@pytest.mark.slow
def test_no_step_waits_for_a_compiler(ids_job, tmp_path):
    path = ids_job.sources[0].path[0]
    fresh = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    command = [sys.executable, "-c", COUNT, path, str(tmp_path / "cache")]
    done = subprocess.run(command, env=fresh, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "compiled: []"
    assert done.stderr.count("kernels are being compiled") == 1, "a start that takes long must say why"
    done = subprocess.run(command, env=fresh, capture_output=True, text=True, check=True)
    assert "kernels" not in done.stderr, "they are in numba's cache now"


ROOT = Path(__file__).parents[2]
WARM = "from overlord.runtimes.launching.deployment import warm_everything; warm_everything()"
COMMANDS = """
demo --folder demo --scale 0.03 --steps 4
demo --folder demo --scale 0.03 --steps 6 --media
run demo/job.yaml --mesh dp=2 --steps 4 --store store
run demo/media/job.yaml --mesh dp=2 --steps 4
explain demo/job.yaml --mesh dp=4,cp=2
sources preview demo/media/job.yaml
sources lint demo/job.yaml
profile demo/media/job.yaml
simulate demo/job.yaml --gpus 64
steps show --store store --step 2
"""


def written(kernels: Path) -> set[tuple[Path, int]]:
    """Return the compiled kernels in a cache, and when each was written: one that is out of date is written again."""
    return {(file, file.stat().st_mtime_ns) for file in kernels.rglob("*.nbc")}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_compiled_after_an_install(tmp_path):
    """In no process: whatever is compiled is written to numba's cache."""
    kernels = tmp_path / "kernels"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"NUMBA_CACHE_DIR": str(kernels), "OVERLORD_CACHE": str(tmp_path / "cache"), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", WARM], env=os.environ | own, check=True)
    warm = written(kernels)
    commands = [["overlord", *line.split()] for line in COMMANDS.strip().splitlines()]
    compiled = {}
    for command in [["tests.runtimes.every_kind", "kinds"], *commands]:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, env=os.environ | own, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        new = written(kernels) - warm
        warm |= new
        compiled[" ".join(command)] = sorted(file.name for file, _ in new)
    assert not {command: names for command, names in compiled.items() if names}
