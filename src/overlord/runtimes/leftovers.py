"""Folders that must be gone when their process is, however it went."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import IO

_WAIT_AND_REMOVE = (
    'exec 3<&0; (read -r _ <&3; for i in 1 2 3 4 5; do rm -rf -- "$1" 2>/dev/null && exit; sleep 1; done) &'
)
"""The pipe ends with the process that holds its other side. Others may still write into the folder for a moment."""


def remove_when_gone(folder: Path) -> IO[bytes]:
    """Have a folder removed once this process is gone; a SIGKILL leaves it no chance to do it itself.

    A shell waits for the end of a pipe. It is nobody's child (Ray kills those of an actor with it) and in no process
    group that somebody may end.

    Returns:
        The pipe: keep it as long as the folder is needed. Closing it removes the folder too.
    """
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _WAIT_AND_REMOVE, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    shell.wait()
    assert shell.stdin is not None
    return shell.stdin
