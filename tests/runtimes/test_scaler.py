"""What the scaler makes of what it sees."""

from __future__ import annotations

import numpy as np
import pytest

from overlord.runtimes.autoscaling.scaler import Scaler
from overlord.scaling.autoscaler import Scaling
from overlord.scaling.profiles import SourceCost

COST_S = 0.03


class Service:
    """A source whose workers are always busy, and end their stretches a few times a second, all at once."""

    def __init__(self, workers: int, every: int) -> None:
        self.now, self._workers, self._every = 0, workers, every

    def watch(self, ahead):
        self.now += 1
        busy = 0.1 * self._workers * self.now
        ended = 0.1 * self._workers * (self.now - self.now % self._every)
        source = {
            "samples_prepared": int(ended / COST_S),
            "busy_s": busy,
            "waited_s": 0.0,
            "workers": self._workers,
            "buffer_bytes": 0,
        }
        samples = [10 * self.now]
        return {"step": self.now, "names": ["a"], "samples": samples, "tokens": samples, "weights": [1.0],
                "level": "sample", "coming": [], "waited_s": 0.0, "sources": {"a": source}}  # fmt: skip


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("known", [{}, {"a": SourceCost(name="a", transform_s=0.06)}], ids=["unknown", "known"])
def test_a_cost_is_not_mistaken_when_stretches_end_at_once(every, known):
    service = Service(workers=12, every=every)
    scaler = Scaler(service.watch, None, Scaling(interval_s=0.1), cpus=16, memory=1 << 40, known=known,
                    clock=lambda: 0.1 * service.now)  # fmt: skip
    found = []
    for _ in range(80):
        scaler.look()
        found.append(scaler.costs["a"].transform_s if scaler.costs else np.nan)
    settled = np.array(found[30:])
    assert settled.mean() == pytest.approx(COST_S, rel=0.25)
    assert settled.max() < 2 * COST_S and settled.min() > COST_S / 2


def test_a_cost_that_changes_is_noticed():
    service = Service(workers=12, every=1)
    scaler = Scaler(service.watch, None, Scaling(interval_s=0.1), cpus=16, memory=1 << 40,
                    known={"a": SourceCost(name="a", transform_s=3.0)}, clock=lambda: 0.1 * service.now)  # fmt: skip
    for _ in range(60):
        scaler.look()
    assert scaler.costs["a"].transform_s == pytest.approx(COST_S, rel=0.1)
