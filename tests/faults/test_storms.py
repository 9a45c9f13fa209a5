"""Random storms of whole services: digests hold, nothing is left behind, and the log names only what was done.

`benchmarks.storms` has many short lives, with changes of the job and faults during launch and close; `storm` has one
long run with trainers of its own, and faults in every kind of process.
"""

from __future__ import annotations

import pytest
from benchmarks.storms import weather, wrong_lines

from tests.faults.storm import HOWS, Outcome, run_storm


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


def check_storm(setting: str, seed: int, faults: int, demo_files) -> Outcome:
    outcome = run_storm(setting, seed, faults, demo_files.tokenizer.parent)
    assert outcome.wrong == []
    assert outcome.faults >= faults and outcome.steps > 0
    return outcome


@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", ["local", pytest.param("shadows", marks=pytest.mark.slow)])
def test_a_few_faults_in_every_kind_of_process(setting, demo_files):
    check_storm(setting, 1, 6, demo_files)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", ["local", "hosts", "shadows", pytest.param("ray", marks=pytest.mark.ray)])
def test_faults_in_every_kind_of_process(setting, demo_files):
    check_storm(setting, 2, 15 if setting == "ray" else 40, demo_files)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("setting", ["local", "hosts", "shadows", pytest.param("ray", marks=pytest.mark.ray)])
def test_500_faults_in_every_kind_of_process(setting, demo_files):
    outcome = check_storm(setting, 3, 100 if setting == "ray" else 500, demo_files)
    kinds = {kind.split()[1] for kind in outcome.by_kind}
    expected = {"launcher", "trainer", "page", "service", "template", "fork-server", "worker", "reader"}
    if setting != "local":
        expected |= {"role"} if setting == "ray" else {"planner", "constructor", "loader"}
    assert kinds >= expected and {kind.split()[0] for kind in outcome.by_kind} == set(HOWS)
