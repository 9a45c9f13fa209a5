"""The demo: its data, the job file it runs, and a report of the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from overlord.cli.demo_data import DemoFiles, demo_job, write_demo
from overlord.cli.demo_media import media_job, write_media
from overlord.cli.output import Screen, Tell, check_writable
from overlord.cli.running import DEFAULT_STRATEGY, RunOptions, Where, run_job
from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.job.launch_words import Runtime
from overlord.job_files import JobFile, LaunchOptions, dump_job_yaml, load_job_file
from overlord.reports.run_report import render_report
from overlord.reports.summary import RunSummary

JOB_NAME = "job.yaml"
MEDIA = 80
"""Sounds, and clips, of the media demo."""


@dataclasses.dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo left behind."""

    summary: RunSummary
    job: Path
    report: Path
    summary_file: Path


def run_demo(
    folder: Path,
    mesh: ClientPlaceTree,
    runtime: Runtime,
    steps: int,
    cache: str,
    screen: Screen,
    scale: float = 1.0,
    *,
    media: bool = False,
) -> DemoResult:
    """Write the demo's data and job file into a folder, run it, and write the report beside them.

    With `media` these are sounds and clips, in a folder `media` of their own; some of them are corrupt.
    """
    folder = folder / "media" if media else folder
    with screen.progress() as tell:
        launch = LaunchOptions(mesh=mesh, steps=steps)
        job_path = prepare_demo(folder, launch, screen, tell, scale, media=media)
        loaded: JobFile = load_job_file(job_path)
        options = RunOptions(
            mesh=mesh,
            where=Where(runtime=runtime),
            steps=steps,
            cache=cache,
            prefetch=loaded.launch.prefetch,
            layout=loaded.launch.layout,
            placement=loaded.launch.placement,
            strategy=loaded.strategy,
            strategy_name=loaded.strategy_name or DEFAULT_STRATEGY,
        )
        summary = run_job(loaded.job, str(job_path), options, tell)
    report, numbers = folder / "report.html", folder / "summary.json"
    write_report(summary, report)
    write_text(numbers, json.dumps(dataclasses.asdict(summary), indent=1) + "\n")
    return DemoResult(summary, job_path, report, numbers)


def prepare_demo(
    folder: Path, launch: LaunchOptions, screen: Screen, tell: Tell, scale: float = 1.0, *, media: bool = False
) -> Path:
    """Write the demo's data, unless it is there, and the job file; return the path of the job file."""
    try:
        if media:
            count = max(8, round(MEDIA * scale))
            if not (folder / "tokenizer.json").exists():  # the last file that is written
                tell("writing sounds and clips", 0, 1)
                write_media(folder, clips=count, sounds=count, corrupt=max(1, count // 40))
            job = media_job(Path())
        else:
            files = write_demo(folder, scale=scale, progress=lambda what, done, of: tell(f"writing {what}", done, of))
            job = demo_job(_seen_from_folder(files))
    except OSError as error:
        raise SpecError(
            f"--folder {folder}: the demo's data cannot be written there ({error.strerror or error}). Name a folder on "
            "a disk with about 60 MB free."
        ) from error
    text = dump_job_yaml(job, launch)
    path = folder / JOB_NAME
    if path.exists() and path.read_text(encoding="utf-8") != text:
        kept = path.with_suffix(".yaml.old")
        path.replace(kept)
        screen.note(f"{path} was changed since the demo wrote it; your version is now {kept}")
    write_text(path, text)
    return path


def write_report(summary: RunSummary, path: Path) -> None:
    """Write the HTML report of a run."""
    write_text(path, render_report(summary))


def write_text(path: Path, text: str) -> None:
    """Write a file that the user asked for."""
    check_writable("the file", path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: it cannot be written ({error.strerror}). Name another file.") from error


def _seen_from_folder(files: DemoFiles) -> DemoFiles:
    """Return the files with paths relative to their folder, so that the folder can be moved."""
    sources = {name: Path(path).relative_to(files.folder).as_posix() for name, path in files.sources.items()}
    return dataclasses.replace(files, sources=sources, tokenizer=files.tokenizer.relative_to(files.folder))
