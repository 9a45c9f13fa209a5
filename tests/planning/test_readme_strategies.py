"""The two strategies of the paper's figure 9 stand in the README and run as written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import overlord as ol

README = Path(__file__).parents[2] / "README.md"


def test_the_strategies_of_the_readme_run_as_written(mixed_job, cache):
    block = next(b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "def llm_balance" in b)
    assert block.index("def vlm_balance") > 0
    lines = [line for line in block.split("def vlm_balance")[0].splitlines()[1:] if line.strip()]
    assert len(lines) <= 7, "seven lines, as the paper says"
    names: dict = {"ol": ol}
    exec(compile(block, str(README), "exec"), names)  # noqa: S102 - our own README
    mesh = ol.ClientPlaceTree(dp=2, cp=2, tp=2)
    for name in ("llm_balance", "vlm_balance"):
        with ol.launch(mixed_job, mesh=mesh, strategy=names[name], runtime="inline", cache=cache) as service:
            plan = service.plan_raw(0)
            step = next(service.client(rank=0))
            assert step.plan_digest == plan.digest
            assert not next(service.client(rank=1)).fetches
            assert len(step.microbatches) == plan.num_microbatches
    assert plan.encoder is not None and plan.routing is not None
    assert np.array_equal(plan.routing.send_splits(0), [plan.routing.recv_splits(r)[0] for r in range(8)])
