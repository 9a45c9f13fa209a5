"""A run compiles before it is launched, never while a trainer waits for a step."""

from __future__ import annotations

import os
import subprocess
import sys

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
