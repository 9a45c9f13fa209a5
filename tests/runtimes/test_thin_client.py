"""What a trainer pays for its data: a process that attaches and reads loads no library of the service."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import overlord as ol

HEAVY = ("pyarrow", "numba", "tokenizers", "PIL", "jinja2", "pydantic", "yaml", "cloudpickle")
MOST_MB = 25.0
"""Memory of its own that a process may grow by over python and numpy."""

READ = {
    "connect": """
import overlord as ol
client = ol.connect(sys.argv[1], 0)
step = next(client)
""",
    "DataLoader": """
from overlord.integrations.torch_loader import DataLoader
loader = DataLoader(sys.argv[1], mesh="dp=1")
step = next(iter(loader))
""",
}
PROGRAM = """
import gc, json, sys
import numpy
{imports}
def pss():
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024
before = pss()
{read}
[dict(batch) for batch in step.microbatches]
print(json.dumps({{"grown": pss() - before, "loaded": sorted(set({heavy!r}) & set(sys.modules)), "step": step.index}}))
"""


@pytest.mark.parametrize("way", list(READ))
def test_a_trainer_that_reads_loads_no_library_of_the_service(way, ids_job, cache):
    if way == "DataLoader":
        pytest.importorskip("torch")
    imports = "import torch, torch.distributed" if way == "DataLoader" else ""
    with ol.launch(ids_job, cache=cache) as service:
        program = PROGRAM.format(imports=imports, read=READ[way], heavy=HEAVY)
        done = subprocess.run(
            [sys.executable, "-c", program, service.address], capture_output=True, text=True, check=True
        )
    found = json.loads(done.stdout)
    assert found["loaded"] == [] and found["step"] == 0
    assert found["grown"] <= MOST_MB
