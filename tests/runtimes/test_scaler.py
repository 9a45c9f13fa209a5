"""What the scaler makes of what it sees."""

from __future__ import annotations

import numpy as np
import pytest

from overlord.runtimes.autoscaling.scaler import Scaler
from overlord.scaling.autoscaler import Scaling
from overlord.scaling.pressure import HostCounters
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
            "cpu_s": busy,
            "waited_s": 0.0,
            "workers": self._workers,
            "buffer_bytes": 0,
        }
        samples = [10 * self.now]
        return {"step": self.now, "trained": self.now, "machines": {}, "names": ["a"], "samples": samples,
                "tokens": samples, "weights": [1.0], "level": "sample", "coming": [], "waited_s": 0.0,
                "sources": {"a": source}}  # fmt: skip


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


class Trained:
    """A service of one slow source; its host and its trainers do as they are told."""

    def __init__(self):
        self.now, self.trained, self.waited_s, self.source_s, self.busy_s, self.cpus = 0.0, 0, 0.0, 0.0, 0.0, 8.0
        self.scaler = Scaler(self.watch, None, Scaling(interval_s=2.0), cpus=8, memory=1 << 40, clock=lambda: self.now)

    def watch(self, ahead):
        busy = {"samples_prepared": int(self.now), "busy_s": self.now, "cpu_s": self.now, "workers": 1}
        source = busy | {"waited_s": self.source_s, "buffer_bytes": 0}
        host = HostCounters(machine="here", at=self.now, cpus=self.cpus, busy_s=self.busy_s, load=33.0)
        return {"step": self.trained, "trained": self.trained, "machines": {"here": host}, "names": ["a"],
                "samples": [self.trained], "tokens": [100 * self.trained], "weights": [1.0], "level": "sample",
                "coming": [], "waited_s": self.waited_s, "sources": {"a": source}}  # fmt: skip

    def go_on(self, looks: int, *, steps: int, waiting: float, busy: float) -> dict:
        for _ in range(looks):
            self.now += 2.0
            self.trained += steps
            self.waited_s += 2.0 * waiting
            self.source_s += 2.0 * waiting
            self.busy_s += 2.0 * busy * self.cpus
            self.scaler.look()
        return self.scaler.describe()


def test_a_source_is_the_bottleneck_on_a_host_that_has_room_and_on_a_full_one_the_host_is():
    seen = Trained().go_on(8, steps=1, waiting=0.8, busy=0.3)
    assert seen["scaling"]["needs"] == {"a": 5} and seen["pressure"]["here"]["short_of"] == []
    assert seen["rates"]["wait_share"] == pytest.approx(0.8) and seen["rates"]["steps_per_s"] == pytest.approx(0.5)
    seen = Trained().go_on(8, steps=1, waiting=0.8, busy=1.0)
    assert seen["scaling"]["bottleneck"] is None and not seen["scaling"]["needs"]
    assert [one["resource"] for one in seen["pressure"]["here"]["short_of"]] == ["cpu"]


def test_rates_of_slow_steps_are_taken_over_several_of_them():
    service = Trained()
    for _ in range(4):
        seen = service.go_on(1, steps=1, waiting=1.0, busy=0.5)
        seen = service.go_on(14, steps=0, waiting=1.0, busy=0.5)  # a step of half a minute
    assert 0.02 < seen["rates"]["steps_per_s"] < 0.1 and seen["rates"]["since_step_s"] == 28.0
    assert seen["rates"]["wait_share"] == 1.0
    assert service.scaler.describe()["rates"] is not None
    service.now += 60.0  # what was seen long ago is not the present
    assert service.scaler.describe()["rates"] is None
