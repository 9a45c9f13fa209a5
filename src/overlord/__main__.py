"""`python -m overlord`, and the `overlord` command: Ctrl-C is heard while large modules are imported."""

from __future__ import annotations

import atexit
import gc
import os
import resource
import sys
import threading

LOADING_S = 1.5
"""After so many seconds of imports a person at a terminal is told."""


LEAST_ADDRESS_SPACE = 1 << 30
"""Bytes that this process must be allowed to map; numpy, pyarrow and numba alone take most of it."""


def main() -> None:
    """Run the command line."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        sys.stderr.write(
            f"error: this process may have {limit >> 20} MiB of address space (ulimit -v), and the libraries that "
            f"overlord loads need at least {LEAST_ADDRESS_SPACE >> 20} MiB; they could not be loaded. Raise the limit, "
            "for instance with `ulimit -v unlimited`; to bound memory itself, use a cgroup.\n"
        )
        sys.exit(2)
    try:
        from overlord.cli import answer_early, is_answered_early
        from overlord.runtimes.supervision.early_start import end_early, start_early

        if is_answered_early(sys.argv[1:]):
            answer_early()
            return
        # What imports make stays: to look through it every 700 objects is a tenth of a start, and to take it apart at
        # the end takes half a second.
        gc.set_threshold(50_000)
        atexit.register(gc.freeze)
        if sys.argv[1:2] in (["demo"], ["run"]) and not {"--help", "--runtime"} & set(sys.argv):
            start_early()
        slow = threading.Timer(LOADING_S, _say_loading)
        slow.daemon = True
        slow.start()
        from overlord.cli.main import app  # takes most of a second: numpy, pydantic

        slow.cancel()
        slow.join()  # no thread is left when a command forks
        try:
            app()
        finally:
            end_early()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # an import that was broken off leaves modules that cannot be torn down in order


def _say_loading() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("loading overlord\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main()
