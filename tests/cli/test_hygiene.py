"""What all commands have in common: help at once and enough of it, --json, --version, completion, no long silence."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import overlord as ol
from overlord.cli import output
from overlord.cli.main import app
from overlord.cli.output import Screen
from overlord.job_files import LaunchOptions, dump_job_yaml
from overlord.reports.pages import Row, terminal_table
from overlord.version import VERSION

HEAVY = {"numpy", "numba", "pydantic", "pyarrow", "yaml", "msgspec", "tokenizers", "PIL", "jinja2", "torch", "ray"}
MOST_MODULES = 420
"""Of Python itself, typer and rich: what help needs."""
CODE = """
import json, sys
sys.argv = ["overlord", *json.loads(sys.argv[1])]
from overlord.__main__ import main
try:
    main()
finally:
    sys.stderr.write(json.dumps(sorted(sys.modules)))
"""


def early(*arguments: str, **environment: str) -> tuple[str, set[str]]:
    """Run the command as a user does; return what it printed, and the modules that it loaded."""
    command = [sys.executable, "-c", CODE, json.dumps(arguments)]
    told = {**os.environ, "COLUMNS": "100", "TERM": "dumb", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=told, timeout=60)
    return done.stdout, set(json.loads(done.stderr[done.stderr.index("[") :]))


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    for name, one in getattr(command, "commands", {}).items():
        yield from leaves(one, (*path, name))


ALL = dict(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("arguments", [("--help",), ()], ids=str)
def test_help_loads_nothing_large_and_is_that_of_the_commands(arguments, monkeypatch):
    shown, modules = early(*arguments)
    assert not modules & HEAVY
    assert len(modules) <= MOST_MODULES
    monkeypatch.setenv("TERM", "dumb")
    whole = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}, terminal_width=100).stdout
    assert shown.split() == whole.split(), "cli/__init__.py names other commands, or says another thing of them"


def test_version_at_once():
    shown, modules = early("--version")
    assert shown == f"overlord {VERSION}\n" and not modules & HEAVY
    assert CliRunner().invoke(app, ["--version"]).stdout == shown


def test_a_shell_completes_commands_and_options():
    line = {"_OVERLORD_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    shown, modules = early(**line, COMP_WORDS="overlord st")
    assert sorted(shown.split()) == ["status", "steps"]
    assert modules & HEAVY <= {"pydantic"}  # by typer itself, whatever is completed
    line["COMP_CWORD"] = "2"
    shown, _ = early(**line, COMP_WORDS="overlord top --in")
    assert shown.split() == ["--interval"]
    script, modules = early("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_OVERLORD_COMPLETE=complete_bash" in script
    assert modules & HEAVY <= {"pydantic"}


@pytest.mark.parametrize("name", ALL)
def test_every_command_tells_how_to_use_it(name):
    command = ALL[name]
    assert command.help and len(command.help) > 15
    options = {option for one in command.params for option in one.opts}
    assert "--json" in options
    for one in command.params:
        assert one.help, f"{name}: {one.name} has no help"
    shown = CliRunner().invoke(app, [*name.split(), "--help"], terminal_width=200).stdout
    start, _, example = (command.epilog or "").partition(f"overlord {name} ")
    assert start == "Example: ", f"{name}: EXAMPLES of cli/main.py has none"
    assert " ".join(command.epilog.split()) in " ".join(shown.split())
    command.make_context(name, shlex.split(example))  # it is one that the command takes


@pytest.mark.parametrize("name", ["", "sources", "import", "steps", *ALL])
def test_help_fits_a_hundred_columns_and_cuts_nothing(name):
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "100"}, terminal_width=100).stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100 and "…" not in shown and "..." not in "".join(lines[1:])
    command = ALL.get(name)
    for one in command.params if command else ():
        if not getattr(one, "hidden", False):
            assert one.help is not None and " ".join(one.help.split()) in " ".join(shown.split())


def test_names_are_not_cut_in_a_pipe(capsys):
    name = "a_source_whose_name_is_longer_than_any_terminal_is_wide_" * 3
    rows = [Row(name, tuple(str(10**at) for at in range(12)))]
    Screen().show(terminal_table("sources", ("source", *(f"figure {at}" for at in range(12))), rows))
    assert name in capsys.readouterr().out


WRONG = {
    "demo": ("--folder", "/dev/null/x", "--steps", "1"),
    "import energon": ("/nowhere/metadataset.yaml",),
    "schema": ("--out", "/dev/null/x"),
    "steps show": ("--store", "/nowhere"),
    "steps diff": ("/nowhere", "/nowhere"),
    "sources cache": None,
    "version": None,
} | dict.fromkeys(("status", "dashboard", "top", "trace"), ("unix:///nowhere",))


@pytest.mark.parametrize("name", ALL)
def test_every_command_answers_a_program_with_one_object_also_where_it_cannot_do_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = WRONG.get(name, ("/nowhere/job.yaml",))
    outcome = CliRunner().invoke(app, [*name.split(), *(wrong or ()), "--json"])
    told = json.loads(outcome.stdout)
    if wrong is None:
        assert outcome.exit_code == 0 and told
    else:
        assert outcome.exit_code in (1, 2) and outcome.stderr.startswith("error: ")
        assert set(told) == {"error"} and set(told["error"]) == {"kind", "message"}


def test_every_command_of_a_finished_run_answers_a_program_with_one_object(ids_job, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVERLORD_CACHE", cache)
    Path("job.yaml").write_text(dump_job_yaml(ids_job, LaunchOptions(mesh=ol.ClientPlaceTree(dp=2), steps=2)))
    run = ("run", "job.yaml", "--runtime", "inline", "--store", "run1")
    few = {"profile": ("job.yaml", "--samples", "2", "--seconds", "0.1"), "explain": ("job.yaml", "--steps", "1")}
    for words in (
        run,
        *((name, *options) for name, options in few.items()),
        *(("sources", name, "job.yaml") for name in ("list", "preview", "lint")),
        ("sources", "measure", "job.yaml", "a"),
        ("steps", "show", "--store", "run1"),
        ("steps", "diff", "run1", "run1"),
        ("schema",),
    ):
        outcome = CliRunner().invoke(app, [*words, "--json"])
        assert outcome.exit_code == 0, (words, outcome.stderr)
        assert isinstance(json.loads(outcome.stdout), dict), words


def test_no_long_silence(monkeypatch):
    monkeypatch.setattr(output, "_QUIET_S", 0.05)
    monkeypatch.setattr(output, "_LINE_EVERY_S", 0.2)
    screen = Screen()
    screen.err = Console(file=io.StringIO())
    with screen.progress() as tell:
        until = time.monotonic() + 10
        while " s so far)" not in screen.err.file.getvalue():  # type: ignore[attr-defined]
            assert time.monotonic() < until
            time.sleep(0.01)
        tell("reading", 3, 10)
        assert screen.err.file.getvalue().startswith("starting (")  # type: ignore[attr-defined]
        while "reading: 3 of 10" not in screen.err.file.getvalue():  # type: ignore[attr-defined]
            assert time.monotonic() < until
            time.sleep(0.01)
