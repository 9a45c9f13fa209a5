"""`python -m overlord`, and the `overlord` command: Ctrl-C is heard while large modules are imported."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    try:
        from overlord.cli.main import app  # takes a second or more: numba, pyarrow

        app()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(130)  # an import that was broken off leaves modules that cannot be torn down in order


if __name__ == "__main__":
    main()
