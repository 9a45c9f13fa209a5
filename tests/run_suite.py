"""Runs pytest, and what failed in parallel once more, alone: `python -m tests.run_suite OPTIONS OF PYTEST`.

Some tests watch real processes, and fail on a busy machine where other tests run at the same time. Such a failure
counts if it happens again. Only tests that ran and failed are run again. A suite that cannot be collected ends here:
there is no list of failed tests then, and `pytest --last-failed` would run all tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

MOST_AGAIN = 50
"""More failures than this are not the machine's fault, and take too long one after the other."""


class Failures:
    """A plugin that notes which tests fail, and which modules or workers cannot be collected."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}
        self.uncollected: dict[str, None] = {}
        self._in_workers = False

    def pytest_configure(self, config: pytest.Config) -> None:
        """Note whether pytest-xdist collects and runs the tests in workers."""
        self._in_workers = bool(config.getoption("numprocesses", None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that failed in its setup, its call or its teardown, or whose worker crashed."""
        if report.failed:
            self.tests[report.nodeid] = None

    @pytest.hookimpl(trylast=True)  # once the error is among those that pytest prints at the end
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what cannot be collected; pytest-xdist reports a worker that collected other tests in the same way.

        Workers would run all tests that they could collect, and show the error after them. The run ends here instead.
        """
        if report.failed:
            self.uncollected[report.nodeid] = None
            if self._in_workers:
                pytest.exit("error during collection", int(pytest.ExitCode.INTERRUPTED))


def main(arguments: Sequence[str]) -> int:
    """Run the suite and return the exit code."""
    failures = Failures()
    code = int(pytest.main(list(arguments), plugins=[failures]))
    sys.stdout.flush()
    if failures.uncollected:
        say("the suite could not be collected, see the errors above:", *failures.uncollected)
        return code
    if code != pytest.ExitCode.TESTS_FAILED or not failures.tests:
        return code
    if len(failures.tests) > MOST_AGAIN:
        say(f"{len(failures.tests)} tests failed: too many to run them again")
        return code
    say(f"{len(failures.tests)} tests failed; now they run again, one after the other:", *failures.tests)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *failures.tests], check=False).returncode


def say(*lines: str) -> None:
    """Print lines after what pytest has printed."""
    print("\n  ".join(["", *lines])[1:], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
