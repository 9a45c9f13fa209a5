"""The suite itself: its tests have the same names in every process, and only what failed runs again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ADDRESS = re.compile(r"0x[0-9a-f]{3,}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_collect_the_same_tests():
    """An address, a time, a random number or the order of a set in a test's name would differ."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": seed}, **options) for seed in "12"]
    first, second = ([line for line in process.communicate()[0].splitlines() if "::" in line] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert len(first) > 1000 and len(set(first)) == len(first)
    assert first == second
    assert not [name for name in first if ADDRESS.search(name)]


def run_suite(folder: Path, *options: str) -> tuple[int, str]:
    """Run the tests of a folder as `make test` runs ours."""
    command = [sys.executable, "-m", "tests.run_suite", "-q", "-p", "no:cacheprovider", "-p", "xdist.plugin"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command += ["-c", os.devnull, f"--rootdir={folder}", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_what_failed_runs_once_more_also_when_the_time_of_the_run_is_over(tmp_path, monkeypatch):
    """A test that is skipped the second time would count as passed."""
    (tmp_path / "test_a.py").write_text(
        'import os\ndef test_fails():\n    assert "OVERLORD_TESTS_UNTIL" not in os.environ\n'
    )
    monkeypatch.setenv("OVERLORD_TESTS_UNTIL", "0")
    code, said = run_suite(tmp_path)
    assert code == 0 and "1 tests failed; now they run again" in said and "1 passed" in said


def test_what_failed_runs_once_more_and_nothing_else_does(tmp_path):
    (tmp_path / "test_it.py").write_text(
        f"""
from pathlib import Path
import pytest

def ran(name):
    seen = Path({str(tmp_path)!r}, name)
    seen.write_text("x" + (seen.read_text() if seen.exists() else ""))
    return len(seen.read_text())

def test_fine(): ran("fine")

@pytest.mark.parametrize("name", ["a name [with::brackets] and spaces"])
def test_busy(name): assert ran("busy") == 2
"""
    )
    code, said = run_suite(tmp_path)
    assert code == 0 and "1 tests failed; now they run again" in said, said
    assert [(tmp_path / name).read_text() for name in ("fine", "busy")] == ["x", "xx"]
    code, said = run_suite(tmp_path)
    assert code == 1 and said.count("1 failed") == 2, said


MISMATCH = "import os, pytest\n@pytest.mark.parametrize('x', [os.getpid()])\ndef test_it(x): print('it ran')\n"


@pytest.mark.parametrize(
    ("text", "options"),
    [("1 / 0\n", ()), ("1 / 0\n", ("-n", "2")), (MISMATCH, ("-n", "2", "--dist", "loadscope"))],
    ids=["import error", "import error in workers", "names that differ between workers"],
)
def test_a_suite_that_cannot_be_collected_ends_there(tmp_path, text, options):
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "test_other.py").write_text("def test_other(): assert False, 'it ran'\n")
    code, said = run_suite(tmp_path, "-rA", *options)
    assert code == pytest.ExitCode.INTERRUPTED and "the suite could not be collected" in said, said
    assert re.search("ZeroDivisionError|Different tests were collected", said), "the error is shown"
    assert "it ran" not in said and "run again" not in said


def test_an_option_that_pytest_does_not_know_is_an_error(tmp_path):
    code, said = run_suite(tmp_path, "--no-such-option")
    assert code == pytest.ExitCode.USAGE_ERROR and "run again" not in said
