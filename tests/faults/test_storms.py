"""Random storms of whole services: digests hold, nothing is left behind, and the log names only what was done."""

from __future__ import annotations

import pytest
from benchmarks.storms import weather, wrong_lines


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("setting", "seed"), [("local", 3), pytest.param("shadows", 14, marks=pytest.mark.slow)])
def test_a_storm(setting, seed):
    assert weather(seed, setting).wrong == []


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("setting", ["inline", "local", "hosts", "shadows"])
@pytest.mark.parametrize("seed", range(200, 208))
def test_many_storms(setting, seed):
    assert weather(seed, setting).wrong == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(700)
@pytest.mark.parametrize("seed", range(210, 213))
def test_storms_on_ray(seed):
    assert weather(seed, "ray").wrong == []


def test_a_warning_that_names_no_fault_is_found():
    restart = "overlord: WARNING: the service process 7 was killed by SIGKILL; it is started again (restart 1), and .."
    store = "overlord: WARNING: planning pauses at step 3: the store cannot be written"
    assert wrong_lines(f"{restart}\n{store}\n", {"kill service": 1}) == [f"logged: {store}"]
    assert wrong_lines(restart, {"kill role": 1}) == [f"logged: {restart}"]
