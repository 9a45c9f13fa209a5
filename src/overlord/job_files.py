"""Job files: a job read from YAML or Python, and a job written as YAML for a person to edit; and manifests of sources.

Relative paths are taken from the file they stand in; URLs stay as they are. YAML is data only: no tags, no code.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import re
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import yaml

from overlord.core.spec_errors import MOST_PROBLEMS, Loc, Locate, did_you_mean, follow, in_yaml, nearest
from overlord.errors import OverlordError, SpecError, joined
from overlord.job.hook_specs import HOOK_KINDS, JOB_FILE_MODULE, search_beside
from overlord.job.plain_yaml import SafeLoader, TooMuchYaml, build_yaml, check_yaml
from overlord.job.spec_model import Spec, describe_schema, field_docs
from overlord.job.specs import (
    Audio,
    Chat,
    Custom,
    ImageChat,
    ImageSpec,
    ImageText,
    Interleaved,
    Job,
    Source,
    Text,
    Video,
)
from overlord.launch_spec import Launch, LaunchOptions
from overlord.planning.strategies import written_strategy

__all__ = [
    "JobFile",
    "LaunchOptions",
    "dump_job_yaml",
    "job_file_schema",
    "load_job",
    "load_job_file",
    "read_kept_job",
    "read_manifest",
    "refuse_kept_code",
    "write_job_schema",
]

SUFFIXES = (".yaml", ".yml", ".json", ".py")
"""How the names of job files end."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """What a job file says."""

    job: Job
    launch: LaunchOptions = dataclasses.field(default_factory=LaunchOptions)
    path: Path | None = dataclasses.field(default=None, compare=False)
    """The file; None for a job that was built in Python."""
    places: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], compare=False)
    """File and line of each source, and of the tokenizer, by what a message about it begins with; of YAML only."""
    code: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str], compare=False)
    """Of a job that a store keeps: the hooks and readers of the run, by where they are named; none is imported."""

    def call(self, given: Mapping[str, Any], locate: Locate | None = None) -> Launch:
        """Return all options of a launch: what was given (not None), else what the file says.

        Raises:
            SpecError: An option is unknown or cannot be.
        """
        return self.launch.call(given, self.path, locate)

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Let the errors that are raised inside about a source, or the tokenizer, begin with its file and line."""
        try:
            yield
        except OverlordError as error:
            error.args = (self.locate(str(error)),)
            raise

    def locate(self, message: str) -> str:
        """Return a message with file and line before what is said of a source or the tokenizer."""
        lines = [
            next((f"{at}: {in_yaml(line)}" for start, at in self.places.items() if line.startswith(start)), line)
            for line in message.splitlines()
        ]
        return "\n".join(lines)


def load_job(path: str | os.PathLike[str]) -> Job:
    """Return the job of a job file: YAML (.yaml, .yml, .json), or Python (.py) with a module-level `job`.

    Relative paths in it are taken from its folder. Its `launch` section is used by `ol.launch(path)`, not here.

    Raises:
        SpecError: The file is missing or wrong; the message says where in it.
    """
    return load_job_file(path).job


def load_job_file(path: str | os.PathLike[str]) -> JobFile:
    """Read a job file with its launch section, as `load_job` reads the job.

    Raises:
        SpecError: The file is missing or wrong; the message says where in it.
    """
    file = Path(path)
    if file.suffix == ".py":
        found = _load_python(file)
    elif file.suffix in SUFFIXES:
        found = _load_yaml(file)
    else:
        raise _no_job_file(file)
    if found.launch.prefetch >= found.job.lag:
        raise SpecError(
            f"{file}: launch.prefetch is {found.launch.prefetch}, but the job's lag is {found.job.lag}; a "
            "step would be asked for before the feedback it depends on can exist. Write a lag larger than "
            "prefetch."
        )
    return dataclasses.replace(found, path=file)


def _no_job_file(file: Path) -> SpecError:
    """Return the error for a file that is no job by its name; a file or folder of data needs a job that names it."""
    from overlord.readers.files import format_of_name  # with pyarrow, which a launcher need not load

    written = (
        "Write a job.yaml of three lines beside it, and correct what a row is and the paths: "
        f"`sources: [{{name: {re.sub(r'[^A-Za-z0-9_-]+', '-', file.stem).strip('-') or 'data'}, path: {file}, sample: "
        "{text: text}}]`, `tokenizer: tokenizer.json`, `batch: {context_length: 2048, global_samples: 64}`; then run "
        "that."
    )
    if format_of_name(file.name) is not None or file.is_dir() or file.suffix in (".csv", ".tsv"):
        what = "a folder" if file.is_dir() else "a file of data by its name"
        return SpecError(f"{file}: this is {what}, and a job file (.yaml, .yml, .json or .py) is expected. {written}")
    if _is_address(file):
        return SpecError(
            f"{file}: this is the address of a service, and a job file (.yaml, .yml, .json or .py) is expected. A "
            "running service is shown by `overlord status`, `overlord top` and `overlord dashboard`; the steps of its "
            "run by `overlord steps show --store STORE`."
        )
    return SpecError(
        f"{file}: a job file ends in .yaml, .yml, .json or .py, not {file.suffix!r}; its language cannot be told. "
        f"Rename it if it is one.{'' if file.exists() else ' There is no such file.'}"
    )


def _is_address(file: Path) -> bool:
    """Return whether a path is the address of a service, or a file that `overlord serve --address-file` wrote."""
    if file.parts[:1] == ("unix:",):
        return True
    if not file.is_file():  # neither a pipe nor a device is opened
        return False
    with file.open("rb") as text:
        return text.read(7) == b"unix://"


def read_kept_job(text: bytes) -> JobFile:
    """Read the job that a store keeps of its run. A store holds no code: modules that it names are not imported.

    Raises:
        SpecError: It is no job.
    """
    with TemporaryDirectory(prefix="overlord-") as folder:
        file = Path(folder) / "job.yaml"
        file.write_bytes(text)
        try:
            return _load_yaml(file, imports=False)
        except OverlordError as error:
            error.args = (str(error).replace(str(file), "the job.yaml of the store"),)
            raise


def refuse_kept_code(kept: JobFile, given: Collection[str] = ()) -> None:
    """Refuse the job of a store that needs hooks or readers of the user's which are not given.

    Args:
        kept: The job, as `read_kept_job` returned it.
        given: Those that are given, by where the job names them.

    Raises:
        SpecError: The message names them.
    """
    missing = [f"{at}: {name}" for at, name in kept.code.items() if at not in given]
    if missing:
        raise SpecError(
            f"the run used Python code of its own ({', '.join(missing)}), and code is not taken from a store: whatever "
            "wrote the store would decide what runs here. Give the job of the run: JOB on the command line, job= in "
            "Python."
        )


def _load_yaml(file: Path, *, imports: bool = True) -> JobFile:
    data, root = _parse_yaml(file)
    known = [*Job.known_keys(), "launch"]
    unknown = [
        SpecError(
            f"{file}:{_line_of(root, (key,))}: {key}: unknown key; it would be ignored and the job "
            f"would not do what you asked.{did_you_mean(key, known)} Known keys: {', '.join(known)}."
        )
        for key in data
        if key not in known
    ]
    problems: list[OverlordError] = [*unknown[:MOST_PROBLEMS]]
    # A key that is misspelt is checked as what it was meant to be: it must not be told as missing too.
    meant = {key: key if key in known else nearest(key, known) for key in data}
    data = {name: data[key] for key, name in meant.items() if name in known and (name == key or name not in data)}
    launch_data = data.pop("launch", None)
    code = {} if imports else _take_code(data, launch_data)
    manifest = _manifest_of(data.get("sources"), file, root)
    if manifest is not None and not imports:  # its readers would not be in `code`, and it may lie in the store
        raise SpecError(
            f"{file}: sources names a manifest, {str(manifest)!r}, and no store keeps its sources so; another file "
            "would decide what is read. Give the job of the run: JOB on the command line, job= in Python."
        )
    lines: list[int] = []
    if manifest is not None:
        found = read_manifest_lines(manifest)
        data["sources"] = [source for source, _ in found]
        lines = [line for _, line in found]

    def locate(loc: Loc) -> str:
        if lines and loc[:1] == ("sources",) and len(loc) > 1:
            return f"{manifest}:{lines[loc[1]]}"
        return f"{file}:{_line_of(root, loc)}"

    job: Job | None = None
    launch = LaunchOptions()
    try:
        _refuse_function(data.get("mixture"), locate)
        job = Job.from_mapping(data, locate)
    except SpecError as error:
        problems.append(error)
    if imports:
        search_beside(file.parent, launch_data)
    try:
        launch = LaunchOptions.from_mapping(
            {} if launch_data is None else launch_data,
            lambda loc: f"{file}:{_line_of(root, ('launch', *loc))}: launch",
        )
    except SpecError as error:
        problems.append(error)
    if problems or job is None:
        told = joined(problems)
        told.args = (in_yaml(str(told)),)
        raise told
    places = {f"source {name!r}": locate(("sources", number)) for number, name in enumerate(job.names)}
    places["tokenizer: "] = locate(("tokenizer",))
    return dataclasses.replace(_resolved(job, launch, file.parent), places=places, code=code)


def _take_code(data: Mapping[str, Any], launch: object) -> dict[str, str]:
    """Return the modules that a job names for hooks and readers; hooks are taken out of its launch."""
    found: dict[str, str] = {}
    for kind in HOOK_KINDS:
        hook = launch.pop(kind, None) if isinstance(launch, dict) else None
        if hook is not None:
            found[kind] = str(hook)
    sources = data.get("sources")
    for number, source in enumerate(sources if isinstance(sources, list) else ()):
        for at in (("format",), ("join", "format")):
            format = follow(source, at)
            if isinstance(format, str) and ":" in format:
                found[".".join((f"sources[{number}]", *at))] = format
    return found


def _refuse_function(mixture: object, locate: Callable[[Loc], str]) -> None:
    learn = follow(mixture, ("learn",))
    if learn == "function" or follow(learn, ("method",)) == "function" or follow(learn, ("fn",)) is not None:
        raise SpecError(
            f"{locate(('mixture', 'learn'))}: mixture.learn: a rule of your own is a Python function, which this file "
            'cannot hold. Keep the job in a Python file with ol.Learn("function", fn=rule), or name one of the rules '
            "odm, ado, doremi, skill_it, repetition."
        )


def _parse_yaml(file: Path) -> tuple[dict[Any, Any], yaml.Node]:
    """Return what a YAML file holds, and its nodes, which know their lines."""
    text = read_text(file)
    try:
        check_yaml(text)
        root = cast("yaml.Node | None", yaml.compose(text, Loader=SafeLoader))  # type: ignore[reportUnknownMemberType]
        data: object = None
        if root is not None:
            _refuse_double_keys(root, file)
            data = build_yaml(text)
    except yaml.MarkedYAMLError as error:
        mark, begin = error.problem_mark or error.context_mark, error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        inside = f" (in what begins on line {begin.line + 1})" if begin else ""
        raise SpecError(
            f"{file}{line}: this is not plain YAML: {error.problem or error.context}{inside}. "
            "Look at the indentation, quotes and colons of this line and the one before."
        ) from None
    except TooMuchYaml as error:
        raise SpecError(
            f"{file}: this file {error}; building it could take more memory than the host has. Write the values out, "
            "without aliases, and hundreds of sources as a manifest."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{file}: this is not YAML: {error}. Write the file anew as plain text.") from None
    if root is None or not isinstance(data, dict):
        raise SpecError(
            f"{file}: a job file must be a mapping with the keys sources, batch and so on, but this one "
            f"holds {'nothing' if data is None else f'a {type(data).__name__}'}. Start from the file that "
            "`overlord demo` writes."
        )
    return cast("dict[Any, Any]", data), root


def _manifest_of(value: object, file: Path, root: yaml.Node) -> Path | None:
    """Return the manifest that `sources` names, if it names one."""
    at: Loc = ("sources",)
    if isinstance(value, Mapping):
        keys = list(cast("Mapping[Any, Any]", value))
        if keys != ["manifest"]:
            raise SpecError(
                f"{file}:{_line_of(root, at)}: sources is a mapping of "
                f"{', '.join(map(repr, keys)) or 'nothing'}, but must be a list of sources or "
                "{manifest: file.jsonl}; no source would be found. Begin each source with '- name: ..'."
            )
        value, at = cast("Mapping[str, object]", value)["manifest"], ("sources", "manifest")
        if not isinstance(value, str):
            raise SpecError(
                f"{file}:{_line_of(root, at)}: sources.manifest is {value!r}, not the path of a file; no "
                "source would be found. Write {manifest: file.jsonl}."
            )
    return Path(resolve_path(value, file.parent)) if isinstance(value, str) else None


def _refuse_double_keys(root: yaml.Node, file: Path) -> None:
    seen: set[int] = set()  # an alias is the same node again; without this a file could grow without end
    waiting: list[yaml.Node] = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            first: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                waiting.append(value)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if (key.tag, key.value) in first:
                    raise SpecError(
                        f"{file}:{line}: the key {key.value!r} is given twice (first on line "
                        f"{first[key.tag, key.value]}); one would be lost. Give it once."
                    )
                first[key.tag, key.value] = line


def _line_of(root: yaml.Node, loc: Loc) -> int:
    """Return the line of the deepest part of a location that stands in the file."""
    node, line = root, root.start_mark.line + 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if isinstance(k, yaml.ScalarNode) and k.value == str(part)]
            if not found:
                break
            node, line = found[0][1], found[0][0].start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _load_python(file: Path) -> JobFile:
    read_text(file)  # a missing or unreadable file is told like any other
    folder = str(file.parent.absolute())
    sys.path.insert(0, folder)  # as `python job.py` does: a job file may import its neighbours
    try:
        names = runpy.run_path(str(file), run_name=JOB_FILE_MODULE)
    except (Exception, SystemExit) as error:
        line = _line_in(file, error)
        what = str(error) if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
        hint = "" if isinstance(error, SpecError) else "; the job could not be built. Run the file with python."
        raise SpecError(f"{file}{f':{line}' if line else ''}: {what}{hint}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    job = names.get("job")
    if not isinstance(job, Job):
        found = "has no `job`" if job is None else f"has a `job` that is a {type(job).__name__}"
        raise SpecError(
            f"{file}: the file {found}; there is nothing to run. Write job = ol.Job(..) at the top level of it."
        )
    given = {name: names[name] for name in ("mesh", "strategy", "layout", *HOOK_KINDS) if names.get(name) is not None}
    return _resolved(job, LaunchOptions.from_mapping(given, lambda _: str(file)), file.parent)


def _line_in(file: Path, error: BaseException) -> int | None:
    """Return the line of the file at which an error came up."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return lines[-1] if lines else None


def _resolved(job: Job, launch: LaunchOptions, folder: Path) -> JobFile:
    if launch.store is not None:
        launch = launch.model_copy(update={"store": resolve_path(launch.store, folder)})
    return JobFile(resolved_job(job, folder), launch)


def resolved_job(job: Job, folder: Path) -> Job:
    """Return a job whose relative paths are taken from a folder."""
    changes: dict[str, Any] = {"sources": tuple(resolve_source(s, folder) for s in job.sources)}
    if job.tokenizer is not None:
        changes["tokenizer"] = resolve_path(job.tokenizer, folder)
    return job.model_copy(update=changes)


def dump_job_yaml(job: Job, launch: LaunchOptions | None = None) -> str:
    """Return a job as a YAML file to edit, with a comment on each key; reading it gives the same job.

    Raises:
        SpecError: A sample, the mixture's rule, the strategy or a hook is a Python function, which YAML cannot hold.
    """
    for source in job.sources:
        if isinstance(source.sample, Custom):
            raise SpecError(
                f"source {source.name!r}: its sample is the Python function {source.sample.name!r}, which "
                "YAML cannot hold; the file would not give the same job. Keep this job in a Python file."
            )
    if job.mixture.learn is not None and job.mixture.learn.fn is not None:
        raise SpecError(
            f"mixture.learn: its rule is the Python function {job.mixture.learn.name!r}, which YAML cannot hold; the "
            "file would not give the same job. Keep this job in a Python file."
        )
    if launch is not None and launch.strategy is not None:
        written_strategy(launch.strategy)  # here, where its own error is raised
    for kind in HOOK_KINDS:
        hook = getattr(launch, kind, None)
        if hook is not None:
            hook.written(kind)
    out = ["# A job of overlord. Run it with: overlord run FILE", ""]
    for name in Job.model_fields:
        value = getattr(job, name)
        if name == "sources":
            value = [_source_keys(source) for source in value]
        elif name == "mixture":
            value = _mixture_keys(job)
        elif name == "batch":
            value = job.batch.model_dump(mode="json", exclude_none=True)
        out += [f"# {field_docs(Job)[name]}", _yaml(name, value), ""]
    out += ["# How the job is run; nothing here changes which samples are drawn.", "launch:"]
    written = (launch or LaunchOptions()).model_dump(mode="json")
    for name in LaunchOptions.model_fields:
        value = written[name]
        out += [f"  # {field_docs(LaunchOptions)[name]}", textwrap.indent(_yaml(name, value), "  ")]
    return "\n".join(out) + "\n"


def _source_keys(source: Source) -> dict[str, Any]:
    path = source.path[0] if len(source.path) == 1 else list(source.path)
    front = {"name": source.name, "path": path, "sample": _sample_keys(source.sample)}
    return front | source.model_dump(mode="json", exclude_defaults=True, exclude=set(front))


def _sample_keys(sample: Spec) -> dict[str, Any]:
    """Return what was given of a sample, also where it is the default: a processor folder fills in the rest."""
    given = sample.model_fields_set
    # What is no part of a fingerprint (where a sample is rendered) is left out of a dump, but not out of a file.
    aside = {n: getattr(sample, n) for n, field in type(sample).model_fields.items() if field.exclude and n in given}
    keys = {n: getattr(sample, n) for n in ("kind", *sample.positional)}
    keys |= sample.model_dump(mode="json", exclude_unset=True) | aside
    if isinstance(sample, (Interleaved, ImageChat)) and sample.images:
        keys["images"] = sample.images[0] if len(sample.images) == 1 else list(sample.images)
    if isinstance(sample, Interleaved) and sample.parts is not None:  # instead of a text with markers
        del keys["text"]
    return keys


def _mixture_keys(job: Job) -> dict[str, Any]:
    # In JSON mode the steps of a curve would become text.
    keys = job.mixture.model_dump(mode="python", by_alias=True, exclude_defaults=True)
    if "stages" in keys:
        keys["stages"] = [list(stage) for stage in keys["stages"]]
    return {"level": job.mixture.level, "stopping": job.mixture.stopping} | keys


def _yaml(key: str, value: object) -> str:
    flow = None if isinstance(value, (dict, list)) else False  # None: short collections on one line
    text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=100)
    return text.rstrip("\n")


def job_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of a YAML job file: a job, its launch options, or a manifest for its sources."""
    schema, launch = describe_schema(Job), describe_schema(LaunchOptions)
    schema["$defs"] |= launch.pop("$defs", {}) | {"LaunchOptions": launch}
    properties = schema["properties"]
    properties["launch"] = {"$ref": "#/$defs/LaunchOptions"}
    listed = {key: properties["sources"].pop(key) for key in ("items", "type")}
    manifest = {
        "type": "object",
        "properties": {"manifest": {"type": "string"}},
        "required": ["manifest"],
        "additionalProperties": False,
    }
    properties["sources"]["anyOf"] = [listed, manifest, {"type": "string"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def write_job_schema(path: str | os.PathLike[str]) -> None:
    """Write the JSON Schema of a job file."""
    Path(path).write_text(json.dumps(job_file_schema(), indent=2) + "\n", encoding="utf-8")


# -- manifests: hundreds of sources, one line each, as JSONL or as a CSV or TSV table ----------------------------------


_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")

_KINDS = (Text, Chat, ImageChat, ImageText, Interleaved, Audio, Video)
_NO_CELLS = ("sample", "storage_options", "augment", "join")
"""Fields that are mappings, which a cell cannot hold."""
_TOKENS = ("bos", "eos", "image_token", "video_token", "audio_token", "before", "after")
"""Fields that take a token by its text or by its id."""
_SAMPLE_COLUMNS = {key for kind in _KINDS for key in kind.known_keys() if key not in _NO_CELLS}
_SOURCE_COLUMNS = [key for key in Source.known_keys() if key not in _NO_CELLS]


def read_manifest(path: str | os.PathLike[str]) -> list[Source]:
    """Return the sources of a manifest.

    A .jsonl line is a mapping with the fields of a Source. A .csv or .tsv file has a header of Source
    fields; the sample's fields are columns too (kind, column, image, text, ..). An empty cell is not given.

    Raises:
        SpecError: The file is missing or a line is wrong; the message names the line.
    """
    return [source for source, _ in read_manifest_lines(path)]


def read_manifest_lines(path: str | os.PathLike[str]) -> list[tuple[Source, int]]:
    """Return the sources of a manifest, each with the line it stands on."""
    file = Path(path)
    if file.suffix in (".jsonl", ".ndjson"):
        rows = _json_rows(file)
    elif file.suffix in (".csv", ".tsv"):
        rows = _table_rows(file)
    else:
        raise SpecError(
            f"{file}: a manifest ends in .jsonl, .csv or .tsv, not {file.suffix!r}; how to read it cannot "
            "be told. Rename it, or write one source a line as JSON."
        )
    found: list[tuple[Source, int]] = []
    for line, row in rows:
        source = Source.from_mapping(row, partial(_place, file, line))
        found.append((resolve_source(source, file.parent), line))
    if not found:
        raise SpecError(f"{file}: the manifest names no source; there is nothing to read. Add one line a source.")
    return found


def read_text(file: Path) -> str:
    """Return the text of a file, or raise a SpecError that says why not."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"{file}: there is no such file. Check the path; it is taken from {os.getcwd()}.") from None
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{file}: byte {error.start} is not UTF-8, so the text cannot be read. Save the file as UTF-8."
        ) from None
    except OSError as error:
        raise SpecError(f"{file}: it cannot be read ({error.strerror}). Check the path and its rights.") from None


def resolve_path(path: str, folder: Path) -> str:
    """Return a path seen from the folder of the file it stands in; URLs stay as they are."""
    if _URL.match(path):
        return path
    return os.path.normpath(folder.absolute() / Path(path).expanduser()) + ("/" if path.endswith("/") else "")


def resolve_source(source: Source, folder: Path) -> Source:
    """Return a source whose paths are seen from a folder."""
    changes: dict[str, Any] = {"path": tuple(resolve_path(p, folder) for p in source.path)}
    if source.join is not None:
        paths = tuple(resolve_path(p, folder) for p in source.join.path)
        changes["join"] = source.join.model_copy(update={"path": paths})
    sample, inner = source.sample, dict[str, Any]()
    if isinstance(sample, Chat) and sample.template is not None and sample.template.endswith(".jinja"):
        inner["template"] = resolve_path(sample.template, folder)
    if isinstance(sample, ImageSpec) and sample.folder is not None:
        inner["folder"] = resolve_path(sample.folder, folder)
    if inner:
        changes["sample"] = sample.model_copy(update=inner)
    return source.model_copy(update=changes)


def _json_rows(file: Path) -> Iterator[tuple[int, object]]:
    # Not splitlines: JSON may hold U+2028, which is no end of line here.
    for line, text in enumerate(read_text(file).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row: object = json.loads(text, object_pairs_hook=_unique_keys)
        except json.JSONDecodeError as error:
            raise SpecError(
                f"{file}:{line}: this line is not JSON ({error.msg} at column {error.colno}). Write one "
                "source a "
                'line, such as {"name": "web", "path": "web/*.parquet"}.'
            ) from None
        except _DoubleKey as error:
            raise SpecError(
                f"{file}:{line}: the key {str(error)!r} is given twice; one would be lost. Give it once."
            ) from None
        if not isinstance(row, dict):
            raise SpecError(
                f"{file}:{line}: this line holds {text.strip()[:40]!r}, not a source. Write a mapping, "
                "such as "
                '{"name": "web", "path": "web/*.parquet"}.'
            )
        yield line, row  # type: ignore[reportUnknownVariableType]


class _DoubleKey(ValueError):
    pass


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DoubleKey(key)
        found[key] = value
    return found


def _table_rows(file: Path) -> Iterator[tuple[int, object]]:
    delimiter = "\t" if file.suffix == ".tsv" else ","
    reader = csv.reader(io.StringIO(read_text(file), newline=""), delimiter=delimiter, strict=True)
    try:
        header = [cell.strip() for cell in next(reader, list[str]())]
        _check_header(file, header)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) > len(header):
                raise SpecError(
                    f"{file}:{reader.line_num}: this line has {len(cells)} cells but the header has "
                    f"{len(header)}; values would land in the wrong fields. Put cells that hold the "
                    "separator in quotes."
                )
            yield reader.line_num, _row_of(header, cells)
    except csv.Error as error:
        raise SpecError(
            f"{file}:{reader.line_num}: this line cannot be split into cells ({error}). Check its quotes."
        ) from None


def _check_header(file: Path, header: list[str]) -> None:
    known = [*_SOURCE_COLUMNS, *sorted(_SAMPLE_COLUMNS)]
    for number, column in enumerate(header):
        if column not in known:
            hint = " Write a JSONL manifest for it." if column in _NO_CELLS else did_you_mean(column, known)
            raise SpecError(
                f"{file}:1: unknown column {column!r}; it would be ignored and the sources would not be "
                f"what you asked.{hint} Known columns: {', '.join(known)}."
            )
        if column in header[:number]:
            raise SpecError(f"{file}:1: the column {column!r} is given twice; one would be lost. Give it once.")


def _row_of(header: list[str], cells: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    sample: dict[str, Any] = {}
    for column, cell in zip(header, cells, strict=False):
        if cell.strip():
            (sample if column in _SAMPLE_COLUMNS else row)[column] = _value_of(column, cell.strip())
    if sample:
        row["sample"] = sample
    return row


def _value_of(column: str, cell: str) -> str | int | bool:
    """Return what a cell says; of a token, a number is its id, and true the tokenizer's own."""
    if column not in _TOKENS:
        return cell
    return int(cell) if cell.isdecimal() else {"true": True, "false": False}.get(cell.lower(), cell)


def _place(file: Path, line: int, _: object) -> str:
    return f"{file}:{line}"
