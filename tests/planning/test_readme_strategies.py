"""The strategies of the paper's figure 9, one in the README and both in docs/strategies.md, run as written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import overlord as ol

ROOT = Path(__file__).parents[2]


def block_with(page: Path, words: str) -> str:
    return next(b for b in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if words in b)


def test_the_strategies_of_the_pages_run_as_written(mixed_job, cache):
    shown, block = (block_with(ROOT / page, "def llm_balance") for page in ("README.md", "docs/strategies.md"))
    assert shown.strip() in block and "def vlm_balance" in block
    lines = [line for line in shown.split("def llm_balance")[1].splitlines()[1:] if line.strip()]
    assert len(lines) <= 7, "seven lines, as the paper says"
    names: dict = {}
    exec(block, names)  # noqa: S102 - our own page
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
