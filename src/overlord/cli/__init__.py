"""The command line. Here is what it answers before anything large is loaded: its help, its version, command names."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from overlord.version import VERSION

if TYPE_CHECKING:
    import typer

HELP_WIDTH = 100
"""Columns of help at most; a narrower terminal has narrower help."""
COMMANDS = {
    "demo": "Write eight small sources, run a VLM-shaped job on them, and show what came out.",
    "explain": "Show what a job would do on a mesh, without running it: balance, padding, epochs, CPU and memory.",
    "profile": "Measure what each source costs on real samples: latency, hand-over, memory, bytes; and keep it beside "
    "the job.",
    "simulate": "Simulate a job on any number of GPUs: step time by strategy, waits, workers, memory, plan latency, "
    "traffic.",
    "run": "Run a job with every rank of its mesh in this process, and show what came out.",
    "serve": "Serve a job to trainers in other processes, of this host or of a cluster's, until Ctrl-C or SIGTERM.",
    "status": "Show what a running service is doing: mixture, buffers, bad samples, clients, and the hosts of a "
    "cluster.",
    "dashboard": "Serve a live page of a running service: waits, sources, balance, hosts, samples.",
    "top": "Watch a running service: what it waits for, steps/s, sources, hosts, reports and faults, until Ctrl-C.",
    "trace": "Record which roles of a running service waited for which, by step, as a trace for Perfetto.",
    "schema": "Print the JSON Schema of job files, for editors.",
    "version": "Print the version.",
}
"""The first line of the help of every command; a test compares it with the commands themselves."""
GROUPS = {
    "sources": "Look at the sources of a job.",
    "import": "Write the sources of a job from what another loader reads.",
    "steps": "Look at the steps of a run: what was in them, and where two runs differ.",
}
"""The same of groups of commands."""


def make_app(**options: Any) -> typer.Typer:
    """Return the command line without its commands."""
    import typer

    app = typer.Typer(
        name="overlord",
        help="A data loader for large-model training from many sources.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Plain pages of options: panels with a column for each of flag, opposite and type leave a quarter of the width
        # for what an option does.
        rich_markup_mode=None,
        context_settings={"max_content_width": HELP_WIDTH},
        **options,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"overlord {VERSION}")
            raise typer.Exit

    # Evaluated here: the types of a callback are looked up in its module, which must not load typer.
    asked = Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ]

    def overlord(version: Any = False) -> None:
        pass

    overlord.__annotations__["version"] = asked
    app.callback()(overlord)
    return app


def is_answered_early(arguments: Sequence[str]) -> bool:
    """Whether a command line needs no command: it asks for help, the version, or the names of commands.

    Example:
        >>> is_answered_early(["--help"]), is_answered_early(["run", "--help"])
        (True, False)
    """
    if "_OVERLORD_COMPLETE" in os.environ:  # a shell asks how to complete a line
        line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")  # bash has words instead
        words = int(os.environ.get("COMP_CWORD", "0")) + 1 if "COMP_CWORD" in os.environ else 0
        return max(len(line.split()) + line.endswith(" "), words) <= 2
    return list(arguments) in ([], ["--help"], ["--version"]) or "-completion" in "".join(arguments[:1])


def answer_early() -> None:
    """Answer such a command line."""
    import typer

    app = make_app()
    for name, words in COMMANDS.items():
        app.command(name, help=words, short_help=words)(lambda: None)
    for name, words in GROUPS.items():
        group = typer.Typer(help=words, short_help=words)
        group.command("all")(lambda: None)
        app.add_typer(group, name=name)
    app(sys.argv[1:] or ["--help"])
