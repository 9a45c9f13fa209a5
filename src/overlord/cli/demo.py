"""The demo: its data, the job file it runs, and a report of the run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from overlord.cli.output import Screen, Tell, write_text
from overlord.cli.running import run_job
from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError
from overlord.job.layout_specs import Runtime
from overlord.job_files import JobFile, LaunchOptions, dump_job_yaml, load_job_file
from overlord.reports.run_report import render_report
from overlord.reports.summary import RunSummary

JOB_NAME = "job.yaml"
_GENERATOR = "demo_data.py"
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
        options = loaded.call({"runtime": runtime, "cache": cache})
        summary = run_job(loaded.job, str(job_path), options, steps, tell, screen.note)
    report, numbers = folder / "report.html", folder / "summary.json"
    write_text(report, render_report(summary))
    write_text(numbers, json.dumps(dataclasses.asdict(summary), indent=1) + "\n")
    return DemoResult(summary, job_path, report, numbers)


def load_generator() -> Any:
    """Load the module that writes the demo's data, which is no part of the package.

    A wheel carries it as data in the package's folder `_demo`; a checkout has it in `examples/demo`.

    Raises:
        SpecError: It is in neither place.
    """
    package = Path(__file__).parents[1]
    places = [package / "_demo" / _GENERATOR, package.parents[1] / "examples" / "demo" / _GENERATOR]
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise SpecError(
            f"the demo's data generator is neither {places[0]} nor {places[1]}; the demo has no data. Install "
            "overlord again, or run `overlord demo` from a checkout."
        )
    spec = importlib.util.spec_from_file_location("overlord_demo_data", path)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def prepare_demo(
    folder: Path, launch: LaunchOptions, screen: Screen, tell: Tell, scale: float = 1.0, *, media: bool = False
) -> Path:
    """Write the demo's data, unless it is there, and the job file; return the path of the job file."""
    generator = load_generator()
    try:
        if media:
            count = max(8, round(MEDIA * scale))
            if not (folder / "tokenizer.json").exists():  # the last file that is written
                tell("writing sounds and clips", 0, 1)
                generator.write_media(folder, clips=count, sounds=count, corrupt=max(1, count // 40))
            job = generator.media_job(Path())
        else:
            files = generator.write_demo(
                folder, scale=scale, progress=lambda what, done, of: tell(f"writing {what}", done, of)
            )
            job = generator.demo_job(files.relative())
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
