"""Folders that must be gone when their process is, however it went."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

_scratch: dict[str, int] = {}
"""Scratch folders of services that live in this process, and the process that made each: a fork of it must not remove
what is in use."""


def scratch_folder(parent: str | None = None) -> str:
    """Make a folder for a service in this process; it goes with `remove_scratch`, or when the process exits."""
    folder = tempfile.mkdtemp(prefix="overlord-", dir=parent)
    if not _scratch:
        atexit.register(_remove_all)
    _scratch[folder] = os.getpid()
    return folder


def remove_scratch(folder: str) -> None:
    """Remove a scratch folder, in the process that made it."""
    if _scratch.pop(folder, None) == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def _remove_all() -> None:
    for folder in list(_scratch):
        remove_scratch(folder)


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
