"""Runs the scripts of deploy/ with stand-ins for the commands that only a cluster has."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"

# Records its arguments, one call per line, separated by tabs since some hold spaces. A reader of the line may stop the
# call at once, so the trap is set first.
_TOLD = r"""
tell() { (IFS=$'\t'; echo "$*" >>"$CALLS"); }
"""
_STOPPABLE = r"""
sleeper=
stopped() {
  if [ -n "$sleeper" ]; then kill "$sleeper"; fi
  tell "$(basename "$0")" stopped
  exit 0
}
trap stopped TERM
"""
_UNTIL_STOPPED = r"""
sleep 60 >/dev/null 2>&1 & sleeper=$!
wait $sleeper
"""
STAND_INS = {
    "overlord": _STOPPABLE
    + r"""
tell overlord "$@"
if [ "${SERVICE:-}" = fails ]; then exit 2; fi
while [ "$#" -gt 0 ]; do
  if [ "$1" = --address-file ]; then mkdir -p "$(dirname "$2")"; echo unix:///tmp/overlord-x >"$2"; fi
  shift
done
if [ "${SERVICE:-}" = dies ]; then until grep -q '^torchrun' "$CALLS"; do sleep 0.05; done; exit 1; fi
"""
    + _UNTIL_STOPPED,
    "torchrun": _STOPPABLE
    + r"""
tell torchrun "$@"
tell address "${OVERLORD_ADDRESS:-}"
case "${TRAINING:-}" in
  fails) exit 3 ;;
  waits) ;;
  *) exit 0 ;;
esac
"""
    + _UNTIL_STOPPED,
    "ray": _STOPPABLE
    + r"""
tell ray "$@"
tell token "${RAY_AUTH_TOKEN:-}"
"""
    + _UNTIL_STOPPED,
    # A step of Slurm is its command, run here: a signal to the step is one to the command.
    "srun": r"""
tell srun "$@"
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
""",
    "scontrol": r"""
tell scontrol "$@"
if [ "$1" = show ]; then for node in ${3//,/ }; do echo "$node"; done; fi
""",
    # Stands for the question how many trainer hosts Ray has: one more each time.
    "python": r"""
tell python
grep -c '^python' "$CALLS"
""",
}


class Stage:
    """A folder of stand-ins in front of PATH, and what they wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        self.calls_file.touch()
        self._started: list[subprocess.Popen[str]] = []
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, body in STAND_INS.items():
            path = bin_folder / name
            path.write_text(f"#!/usr/bin/env bash\n{_TOLD}{body}")
            path.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OVERLORD", "RAY"))}
        self.environment = kept | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "OVERLORD_LOOK_EVERY": "0.1",
            "OVERLORD_SHARED": str(folder / "shared"),
        }

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script in a process group of its own."""
        process = subprocess.Popen(
            ["bash", *command],
            env=self.environment | environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        """Run a script to its end and return (exit code, what it said)."""
        return self.finish(self.start(*command, **environment))

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        """Wait for the end of a script and return (exit code, what it said)."""
        said, _ = process.communicate(timeout=20)
        return process.returncode, said

    def calls(self, *beginning: str) -> list[list[str]]:
        """Return the calls so far that begin with these words."""
        told = [line.split("\t") for line in self.calls_file.read_text().splitlines()]
        return [call for call in told if call[: len(beginning)] == list(beginning)]

    def position(self, *beginning: str) -> int:
        """Return when such a call came first, by its place among all."""
        return self.calls().index(self.calls(*beginning)[0])

    def wait_for(self, *beginning: str) -> None:
        wait_until(lambda: bool(self.calls(*beginning)))

    def end_all(self) -> None:
        """End what still runs of the started groups."""
        for process in self._started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # all of it has ended by itself
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again, for ten seconds at most."""
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


@pytest.fixture
def stage(tmp_path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.end_all()
