"""Set-up and clean-up of processes: their log, folders that are removed however their process ended."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import IO

from overlord.runtimes.transport.file_limits import raise_file_limit


def set_up_process() -> None:
    """Set up a process that roles run in: its log, and the limit on open files."""
    # A decoder that comes back from C waits for the interpreter; the default interval costs it up to 5 ms.
    sys.setswitchinterval(0.0005)
    logging.basicConfig(format="overlord: %(levelname)s: %(message)s", level=logging.WARNING)
    raise_file_limit()
    atexit.register(gc.freeze)  # the collections at exit look through all that imports made: half a second of a close
    wanted = os.environ.get("OVERLORD_LOG", "").upper()
    if wanted in logging.getLevelNamesMapping():
        logging.getLogger("overlord").setLevel(wanted)


_scratch: dict[str, tuple[int, IO[bytes]]] = {}
"""Scratch folders of services that live in this process; the process that made each, as a fork of it must not remove
what is in use; and the pipe whose end removes it."""


def scratch_folder() -> str:
    """Make a folder for a service in this process; it goes with `remove_scratch`, or however the process ends."""
    folder = Path(tempfile.gettempdir(), f"overlord-{uuid.uuid4().hex[:12]}")
    pipe = make_until_gone(folder)
    if pipe is None:
        folder.mkdir(0o700)  # it raises why the folder cannot be made
        pipe = remove_when_gone(folder)
    if not _scratch:
        atexit.register(_remove_all)
    _scratch[str(folder)] = os.getpid(), pipe
    return str(folder)


def remove_scratch(folder: str) -> None:
    """Remove a scratch folder, in the process that made it."""
    maker, pipe = _scratch.pop(folder, (0, None))
    if pipe is not None and maker == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        pipe.close()


def _remove_all() -> None:
    for folder in list(_scratch):
        remove_scratch(folder)


_WAIT_AND_REMOVE = (
    "exec 3<&0; ("
    'if [ -n "$2" ]; then mkdir -m 700 -- "$1" 2>/dev/null || exit 0; echo made; fi; exec 1>&-; read -r _ <&3; '
    'of_service="/${1##*/}[/]"; i=0; while [ $((i += 1)) -le 90 ]; do '
    'rm -rf -- "$1" 2>/dev/null && ! grep -qs -- "$of_service" /proc/[0-9]*/cmdline && exit; sleep 1; done) &'
)
"""The pipe ends with the process that holds its other side. Others may still write into the folder, or make it again:
Ray's agents live up to a minute longer than their cluster. They name the folder in their command lines (the brackets
keep grep from finding its own), and it is removed until none of them is left."""


def remove_when_gone(folder: Path) -> IO[bytes]:
    """Have a folder removed once this process is gone; a SIGKILL leaves it no chance to do it itself.

    A shell waits for the end of a pipe. It is no child of this process (Ray kills those of an actor with it), and in no
    process group that may be killed.

    Returns:
        The pipe: keep it as long as the folder is needed. Closing it removes the folder too.
    """
    pipe, _ = _wait_and_remove(folder, make=False)
    return pipe


def make_until_gone(folder: Path) -> IO[bytes] | None:
    """Make a folder that is removed once this process is gone; None where it could not be made.

    The shell makes it: a process that made it and was killed before the shell ran would leave it for ever.
    """
    pipe, made = _wait_and_remove(folder, make=True)
    if made:
        return pipe
    pipe.close()
    return None


def _wait_and_remove(folder: Path, *, make: bool) -> tuple[IO[bytes], bool]:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _WAIT_AND_REMOVE, "sh", str(folder), "make" if make else ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    assert shell.stdin is not None and shell.stdout is not None
    with shell.stdout:
        made = shell.stdout.read() == b"made\n"
    shell.wait()
    return shell.stdin, made
