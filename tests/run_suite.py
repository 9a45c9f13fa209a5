"""Runs pytest, and what failed in parallel once more, alone: `python -m tests.run_suite OPTIONS OF PYTEST`.

Some tests watch real processes, and fail on a busy machine where other tests run at the same time. Such a failure
counts if it happens again. Only tests that ran and failed are run again. A suite that cannot be collected ends here:
there is no list of failed tests then, and `pytest --last-failed` would run all tests.

Every worker of pytest-xdist collects all tests, and would rewrite the assertions of every module for itself, which is
more than a third of what collecting costs. They are rewritten once here, before the workers start.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

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


class RewrittenOnce:
    """A plugin that writes the rewritten test modules into pytest's cache before workers collect them."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Rewrite the modules on all cores; pytest-xdist starts its workers after this."""
        loader = session.config.pluginmanager.rewrite_hook  # another object with --assert=plain
        if session.config.getoption("numprocesses", None) and isinstance(loader, importlib.abc.Loader):
            asked = [Path(argument.partition("::")[0]).absolute() for argument in session.config.args]
            files = sorted({file for path in asked for file in ([path] if path.is_file() else path.rglob("test_*.py"))})
            cores = os.cpu_count() or 1
            new = multiprocessing.get_context("fork").Process
            parts = [new(target=rewrite, args=(loader, files[first::cores])) for first in range(cores)]
            for part in parts:
                part.start()
            for part in parts:
                part.join()


def rewrite(loader: importlib.abc.Loader, files: Iterable[Path]) -> None:
    """Have modules rewritten and written into the cache, without running them."""
    for file in files:
        spec = importlib.util.spec_from_file_location(file.stem, file, loader=loader)
        assert spec is not None
        module = ModuleType(file.stem)
        module.__spec__ = spec
        # It is written before it runs, and without builtins it ends at its first import. What is wrong with a file is
        # told by the workers, which read it again.
        module.__dict__["__builtins__"] = {}
        with contextlib.suppress(ImportError, SyntaxError):
            loader.exec_module(module)


def main(arguments: Sequence[str]) -> int:
    """Run the suite and return the exit code."""
    failures = Failures()
    # The environment may say otherwise (PYTHONDONTWRITEBYTECODE): what this process imports would then be rewritten in
    # every worker. The workers and the processes that tests start do as the environment says.
    sys.dont_write_bytecode = False
    code = int(pytest.main(list(arguments), plugins=[failures, RewrittenOnce()]))
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
    # Without the end of the time of this run: tests that are skipped would count as passed.
    environment = {name: value for name, value in os.environ.items() if name != "OVERLORD_TESTS_UNTIL"}
    again = [sys.executable, "-m", "pytest", "-q", *failures.tests]
    return subprocess.run(again, env=environment, check=False).returncode


def say(*lines: str) -> None:
    """Print lines after what pytest has printed."""
    print("\n  ".join(["", *lines])[1:], flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
