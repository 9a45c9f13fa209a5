"""Random storms of whole services: digests hold, nothing is left behind, and the log names only what was done.

`benchmarks.storms` has many short lives, with changes of the job and faults during launch and close; `storm` has one
long run with trainers of its own, and faults in every kind of process.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from benchmarks.storms import weather, wrong_lines

from tests.faults.storm import HOWS, Outcome, Ranks, Storm, run_storm


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("setting", "seed"),
    [pytest.param("local", 3, marks=pytest.mark.slow), pytest.param("shadows", 14, marks=pytest.mark.slow)],
)
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


def test_trainers_of_a_storm_end_together(tmp_path):
    """One looks whether it should end a moment before another does; it must not wait for the other's next step."""
    ranks = [Ranks(tmp_path / "ranks", rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.end_with(3, ends=False), ranks)) == [False, False]
        assert list(pool.map(lambda one: one.end_with(4, ends=one is ranks[1]), ranks)) == [True, True]


def test_a_launcher_that_is_paused_at_the_end_of_a_storm_ends(tmp_path, monkeypatch):
    storm = Storm("local", 0, tmp_path, tmp_path)
    launcher = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    launcher.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(storm, "_launcher", launcher)
    monkeypatch.setattr(storm, "_due", [(time.monotonic() + 0.5, psutil.Process(launcher.pid), signal.SIGCONT)])
    monkeypatch.setattr(storm, "_hung_s", 5.0)
    monkeypatch.setattr(storm, "wait_for_steps", lambda further: None)  # it has none
    monkeypatch.setattr(storm, "_await_page", lambda: None)
    try:
        storm.finish()
    finally:
        storm.close()


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
