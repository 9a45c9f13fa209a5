"""How commands speak: results on standard output (tables or one JSON object), all the rest on standard error."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from overlord.errors import OverlordError, SpecError

Tell = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, of how much); threads may share it."""

_PLAIN_WIDTH = 110
"""Columns of running text that goes into a file or a pipe; a table there is as wide as what it holds."""
_WIDEST = 10_000
_LINE_EVERY_S = 10.0
_QUIET_S = 2.0
"""No command begins with a longer silence. A terminal has bars that move, a log gets a line now and then."""


class Screen:
    """Where one command writes. With `as_json` standard output holds one JSON object and nothing else."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._stdout = sys.stdout
        self.out = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _WIDEST)
        self.err = Console(file=sys.stderr, highlight=False)

    def show(self, *parts: RenderableType) -> None:
        """Print for a person; JSON output leaves it out."""
        if not self.as_json:
            for part in parts:
                self.out.print(part, soft_wrap=isinstance(part, str), width=self._width_of(part))

    def _width_of(self, part: RenderableType) -> int | None:
        """Return in how many columns to print: in a pipe a name must not be cut, as a program looks for it."""
        if self.out.is_terminal or isinstance(part, str):
            return None
        widest = Measurement.get(self.out, self.out.options, part).maximum if isinstance(part, (Group, Table)) else 0
        return max(_PLAIN_WIDTH, widest)

    def give(self, result: Mapping[str, Any]) -> None:
        """Print the result for a program, if JSON was asked for."""
        if self.as_json:
            print(json.dumps(result, ensure_ascii=False, allow_nan=False), file=self._stdout, flush=True)

    def write_page(self, label: str, path: Path | None, render: Callable[[], str]) -> str | None:
        """Write a file if a path was given for it, and show the path; return the path for a program."""
        if path is None:
            return None
        write_text(path, render())
        self.show(labelled(label, path))
        return str(path)

    def note(self, message: str) -> None:
        """Say something beside the result."""
        self.err.print(message, style="dim", markup=False, soft_wrap=True)

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Run a user's Python: what it prints must not end up inside the result."""
        with redirect_stdout(sys.stderr):
            yield

    @contextmanager
    def progress(self) -> Iterator[Tell]:
        """Show bars on a terminal, and a line now and then elsewhere."""
        if not self.err.is_terminal:
            lines = _Lines(self.err)
            try:
                yield lines
            finally:
                lines.end()
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.err, transient=True) as bars:
            yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._begin: TaskID | None = bars.add_task("starting", total=None)
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, of: int) -> None:
        with self._lock:
            if self._begin is not None:
                self._bars.remove_task(self._begin)
                self._begin = None
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what, total=of)
        self._bars.update(self._tasks[what], completed=done, total=of)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._since_s = time.monotonic()
        self._next_s = self._since_s + _QUIET_S
        self._ended: set[str] = set()
        self._lock = threading.Lock()
        self._newest = "starting"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="overlord-progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say nothing more."""
        self._over.set()
        self._thread.join()

    def _speak(self) -> None:
        """Say what is under way where nothing is told for long, such as one long file."""
        while not self._over.wait(max(self._next_s - time.monotonic(), 0.1)):
            with self._lock:
                late = time.monotonic() >= self._next_s
                if late:
                    self._next_s = time.monotonic() + _LINE_EVERY_S
                    said = f"{self._newest} ({time.monotonic() - self._since_s:.0f} s so far)"
            if late:
                self._console.print(said, markup=False, soft_wrap=True)

    def __call__(self, what: str, done: int, of: int) -> None:
        with self._lock:
            now = time.monotonic()
            line = f"{what}: {done:,} of {of:,}" if of > 1 else what
            if line != self._newest:
                self._newest, self._since_s = line, now
            ends = done >= of and what not in self._ended
            if not ends and now < self._next_s:
                return
            self._next_s = now + _LINE_EVERY_S
            if ends:
                self._ended.add(what)
        self._console.print(line, markup=False, soft_wrap=True)


def show_error(error: OverlordError, *, as_json: bool) -> int:
    """Tell of an error, one paragraph for each mistake; return the exit code it asks for."""
    console = Console(file=sys.stderr, highlight=False)
    for line in str(error).splitlines():
        # A terminal gets whole words; a log gets one line for each mistake, which can be searched.
        message = Text.assemble(("error: ", "bold red"), " ".join(line.split()))
        console.print(message, soft_wrap=not console.is_terminal)
    if as_json:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}, ensure_ascii=False))
    return 2 if isinstance(error, SpecError) else 1


def labelled(label: str, words: object) -> Text:
    """Return a path, or another short result, behind what it is."""
    return Text.assemble((label, "dim"), str(words))


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written, before the work whose result it would hold."""
    if path is None:
        return
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        reason = "it is a folder" if path.is_dir() else f"{folder} is not a folder that can be written"
        raise SpecError(f"{option} {path}: nothing can be written there, since {reason}. Name another file.")


def default_report(job: Path, screen: Screen) -> Path | None:
    """Return where the report of a run goes if the command line does not say: beside the job file, if it can be."""
    path = job.with_name(f"{job.stem}.report.html")
    try:
        check_writable("the report", path)
    except SpecError as error:
        screen.note(f"{error} --report FILE does that, --no-report writes none.")
        return None
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file that the user asked for."""
    check_writable("the file", path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: it cannot be written ({error.strerror}). Name another file.") from error


_commands: list[ExitStack] = []


@contextmanager
def command() -> Iterator[None]:
    """Run a command: what `current_command` was given to end, ends with it."""
    with ExitStack() as ends:
        _commands.append(ends)
        try:
            yield
        finally:
            _commands.remove(ends)


def current_command() -> ExitStack | None:
    """Return what ends with the command under way; None outside of one."""
    return _commands[-1] if _commands else None
