"""Folders that must be gone when their process is, however it went."""

from __future__ import annotations

import subprocess
from pathlib import Path

_WAIT_AND_REMOVE = 'read -r _; for i in 1 2 3 4 5; do rm -rf -- "$1" 2>/dev/null && exit; sleep 1; done'
"""The pipe ends with the process that holds its other side. Others may still write into the folder for a moment."""


def remove_when_gone(folder: Path) -> subprocess.Popen[bytes]:
    """Start a shell that removes a folder once this process is gone; a SIGKILL leaves it no chance to do it itself.

    Keep what is returned as long as the folder is needed.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", _WAIT_AND_REMOVE, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what ends the process group must not end it
        cwd="/",
    )
