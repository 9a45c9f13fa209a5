"""Lint: looks at every file of every source before a run does, and says what is wrong in one line each."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from overlord.cli.output import Tell
from overlord.cli.preview_media import decode_items
from overlord.cli.sources import (
    Opened,
    cores,
    counter,
    load_tokenizer,
    open_each,
    side_by_side,
)
from overlord.cli.summary import percent
from overlord.core.ragged import RowBatch
from overlord.core.samples import FILE_SHIFT, SKIP, SampleId
from overlord.core.specs import Job
from overlord.errors import OverlordError, SpecError
from overlord.readers.filesystems import StoredFile
from overlord.readers.reader import READ_FAILURES
from overlord.readers.sidecars import LengthSidecars
from overlord.roles.source_loader import FEW_SAMPLES, Lengths
from overlord.runtimes.opening import known_lengths
from overlord.transforms.per_sample import no_seeds

FEW_ROWS = 32
"""A source with fewer rows is seen again and again."""
_FEW_BLOCKS = 4
_BATCH_ROWS = 64
_NAMED_ROWS = 5
"""Bad rows of a source that get a line of their own."""
_MANY_EMPTY = 0.1
_PROBE_BYTES = 1 << 16

Severity = Literal["error", "warning"]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in one line."""

    severity: Severity
    source: str
    message: str

    def to_json(self) -> dict[str, str]:
        """Return the finding for a program."""
        return asdict(self)


@dataclass(slots=True)
class _FileFacts:
    """What looking into one file told."""

    rows: int = 0
    blocks: int = 0
    bytes: int = 0
    looked_at: int = 0
    tokens: int = 0
    empty: int = 0
    overlong: int = 0
    bad: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(sample id, reason)."""
    lies: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    broken: str | None = None


def lint_job(job: Job, cache: Path, rows: int, tell: Tell) -> list[Finding]:
    """Return everything that looks wrong in a job's sources; errors first.

    Args:
        job: The job.
        cache: Folder of indices and sidecars.
        rows: Rows of every file that are measured and decoded.
        tell: Told how far it is.
    """
    found = open_each(job, job.sources, cache, tell)
    opened = [one.opened for one in found if one.opened is not None]
    tasks = [(one, n) for one in opened for n in range(len(one.files.files))]
    did = counter(tell, "looking into files", len(tasks))
    findings = [Finding("error", one.source.name, str(one.error)) for one in found if one.error is not None]
    known, wrong = _known_lengths(job, opened, cache)

    def look(task: tuple[Opened, int]) -> _FileFacts:
        return _look_into(job, task[0], task[1], rows, known.get(task[0].source.name))

    facts: dict[str, list[_FileFacts]] = defaultdict(list)
    for (one, _), told in zip(tasks, side_by_side(look, tasks, cores(), did), strict=True):
        facts[one.source.name].append(told)
    for one in opened:
        findings += _judge_source(job, one, facts[one.source.name])
    findings += wrong + _never_drawn(job) + _duplicates(opened)
    return sorted((_one_line(finding) for finding in findings), key=lambda finding: finding.severity != "error")


def _known_lengths(job: Job, opened: Sequence[Opened], cache: Path) -> tuple[dict[str, Lengths], list[Finding]]:
    """Return how the lengths of each source are known beforehand, and what is wrong with that."""
    digest = tokenizer.digest if (tokenizer := load_tokenizer(job)) else ""
    sidecars = LengthSidecars(cache / "lengths")
    known: dict[str, Lengths] = {}
    findings: list[Finding] = []
    for one in opened:
        source = one.source
        try:
            lengths = known_lengths(source, one.files, sidecars, digest)
        except SpecError as error:
            findings.append(Finding("error", source.name, str(error)))
            continue
        if lengths is not None:
            known[source.name] = lengths
    return known, findings


def _one_line(finding: Finding) -> Finding:
    """Return a finding whose message neither breaks the line nor names its source again."""
    message = " ".join(finding.message.split()).removeprefix(f"source {finding.source!r}: ")
    return Finding(finding.severity, finding.source, message)


def _look_into(job: Job, one: Opened, number: int, rows: int, lengths: Lengths | None) -> _FileFacts:
    facts, files = _FileFacts(), one.files
    try:
        blocks = files.blocks(number)
        facts.rows = int(blocks.rows.sum())
        facts.blocks = int((blocks.rows > 0).sum())
        facts.bytes = int(blocks.bytes.sum())
        for block in range(len(blocks.rows)):
            if facts.looked_at >= rows:
                break
            for batch in files.stream(number, block, batch_rows=min(_BATCH_ROWS, rows - facts.looked_at)):
                _look_at_rows(job, one, batch, (number << FILE_SHIFT) + facts.looked_at, lengths, facts)
                if facts.looked_at >= rows:
                    break
    except OverlordError as error:
        facts.broken = str(error)
    return facts


def _look_at_rows(
    job: Job, one: Opened, rows: RowBatch, first: int, lengths: Lengths | None, facts: _FileFacts
) -> None:
    measured = one.transform.measure(rows, None, no_seeds(rows))
    count = len(measured.tokens)

    def name(row: int) -> str:
        return str(SampleId(one.source.name, first + row, 0)).rpartition("@")[0]

    bad = dict(reversed(measured.faults))
    for item in decode_items(one, measured):
        if item.fault is not None:
            bad.setdefault(item.row, item.fault)
    facts.bad += [(name(row), reason) for row, reason in sorted(bad.items())]
    if lengths is not None:
        claimed = np.maximum(lengths(rows, first + np.arange(count)), 1)
        true = measured.tokens - (measured.image_tokens if measured.front is None else measured.front)
        facts.lies += [
            (name(row), f"its length says {claimed[row]} tokens, the text has {true[row]}")
            for row in np.flatnonzero(claimed != true).tolist()
            if row not in bad
        ]
    facts.looked_at += count
    facts.tokens += int(measured.tokens.sum())
    facts.empty += int(((measured.flags & SKIP) > 0).sum())
    facts.overlong += int((measured.tokens > job.batch.context_length).sum())


def _judge_source(job: Job, one: Opened, facts: Sequence[_FileFacts]) -> list[Finding]:
    name, findings = one.source.name, list[Finding]()
    for file, found in zip(one.files.files, facts, strict=True):
        if found.broken is not None:
            findings.append(Finding("error", name, found.broken))
        elif found.rows == 0:
            findings.append(Finding("warning", name, f"{file.path} has no rows"))
    looked = sum(f.looked_at for f in facts)
    findings += _faults(one, "bad", [b for f in facts for b in f.bad], looked)
    findings += _faults(one, "wrong length", [b for f in facts for b in f.lies], looked)
    rows, tokens = sum(f.rows for f in facts), sum(f.tokens for f in facts)
    broken = any(f.broken is not None for f in facts)
    if rows == 0 and not broken:
        findings.append(Finding("error", name, "no file has any rows; the mixture would wait for it for ever"))
    elif rows < FEW_ROWS and not broken:
        findings.append(Finding("warning", name, f"tiny: {rows} rows; the model sees the same samples again and again"))
    if looked and (empty := sum(f.empty for f in facts)) > _MANY_EMPTY * looked:
        share = percent(empty / looked)
        findings.append(Finding("warning", name, f"{share} of {looked} rows looked at are empty and never drawn"))
    if looked and (overlong := sum(f.overlong for f in facts)):
        findings += _overlong(job, name, overlong, looked)
    findings += _shuffle(one, sum(f.blocks for f in facts), sum(f.bytes for f in facts))
    return findings + _repeats(job, name, rows, tokens / looked if looked else 0.0)


def _shuffle(one: Opened, blocks: int, size: int) -> list[Finding]:
    """Tell where a shuffle has too few blocks to merge: their rows would stay in order."""
    budget = one.source.shuffle_bytes
    if not budget or size <= budget or blocks >= _FEW_BLOCKS:
        return []
    message = (
        f"its rows lie in {blocks} block{'s' if blocks > 1 else ''} of {size / blocks / 2**20:.0f} MiB, and a shuffle "
        f"reads each block in order: neighbours mostly stay neighbours. Set shuffle_bytes to {size} to shuffle it in "
        "memory, or write the files with smaller row groups"
    )
    return [Finding("warning", one.source.name, message)]


def _overlong(job: Job, name: str, overlong: int, looked: int) -> list[Finding]:
    length, share = job.batch.context_length, percent(overlong / looked)
    if job.overlength == "error":
        message = f"{share} of {looked} rows are longer than context_length={length}, and overlength is 'error'"
        return [Finding("error", name, f"{message}; the run would stop at the first")]
    if job.overlength == "split" or overlong < _MANY_EMPTY * looked:
        return []
    effect = "are cut" if job.overlength == "truncate" else "are dropped"
    return [Finding("warning", name, f"{share} of {looked} rows are longer than context_length={length} and {effect}")]


def _faults(one: Opened, what: str, faults: Sequence[tuple[str, str]], looked: int) -> list[Finding]:
    name = one.source.name
    findings = [Finding("warning", name, f"{what}: {sample}: {reason}") for sample, reason in faults[:_NAMED_ROWS]]
    if len(faults) > _NAMED_ROWS:
        findings.append(Finding("warning", name, f"{what}: {len(faults) - _NAMED_ROWS} more rows like these"))
    # The rule by which a run would stop.
    if len(faults) > one.source.tolerance * max(looked, FEW_SAMPLES) or (looked and len(faults) == looked):
        found = f"{what}: {len(faults)} of {looked} rows ({percent(len(faults) / looked)})"
        message = f"{found} are more than tolerance={one.source.tolerance:g} allows; a run would stop"
        findings.append(Finding("error", name, message))
    return findings


def _repeats(job: Job, name: str, rows: int, mean_tokens: float) -> list[Finding]:
    """Warn of a source that one step reads more than once."""
    if job.mixture.schedule != "static" or job.mixture.temperature is not None or not rows:
        return []
    base = {s.name: s.weight for s in job.sources if s.weight is not None}
    weights = job.mixture.weights_at(0.0, job.names, base)
    share = weights[job.names.index(name)] / (sum(weights) or 1.0)
    size = job.batch.global_samples or (job.batch.global_tokens or 0) / max(mean_tokens, 1.0)
    if job.mixture.level == "sample" and job.batch.global_samples is None:
        return []  # how many samples fill a step depends on all the other sources
    if share * size <= rows:
        return []
    return [Finding("warning", name, f"one step takes about {share * size / rows:.1f} times its {rows} rows")]


def _never_drawn(job: Job) -> list[Finding]:
    if job.mixture.has_weights:
        named = {name for _, name in job.mixture.places()}
        idle = [name for name in job.names if name not in named or not _ever_positive(job, name)]
    else:
        idle = [source.name for source in job.sources if source.weight == 0]
    return [Finding("warning", name, "the mixture never gives it a weight above 0; it is never drawn") for name in idle]


def _ever_positive(job: Job, name: str) -> bool:
    mixture = job.mixture
    if mixture.weights is not None:
        return mixture.weights.get(name, 0.0) > 0
    if mixture.stage_weights is not None:
        return any(stage.get(name, 0.0) > 0 for _, stage in mixture.stage_weights)
    curves = mixture.linear_points or mixture.step_points or {}
    return any(weight > 0 for weight in curves.get(name, {}).values())


def _duplicates(opened: Sequence[Opened]) -> list[Finding]:
    """Find files that two sources share, and files with the same beginning, end and size."""
    files = [(one.source.name, file) for one in opened for file in one.files.files]
    findings = list[Finding]()
    same_place = _groups(files, lambda file: (file.filesystem.type_name, file.location))
    for group in same_place:
        others = ", ".join(sorted({name for name, _ in group[1:]}))
        findings.append(Finding("warning", group[0][0], f"{group[0][1].path} is also a file of {others}"))
    firsts = list({(file.filesystem.type_name, file.location): (name, file) for name, file in files}.values())
    for same_size in _groups(firsts, lambda file: file.size):
        for group in _groups(same_size, _probe):
            for name, file in group[1:]:
                message = f"{file.path} looks like a copy of {group[0][1].path} (source {group[0][0]})"
                findings.append(Finding("warning", name, message))
    return findings


def _groups(
    files: Sequence[tuple[str, StoredFile]], key: Callable[[StoredFile], Any]
) -> list[list[tuple[str, StoredFile]]]:
    found: dict[Any, list[tuple[str, StoredFile]]] = defaultdict(list)
    for name, file in files:
        found[key(file)].append((name, file))
    return [group for group in found.values() if len(group) > 1]


def _probe(file: StoredFile) -> str:
    """Return a hash of the two ends of a file; one that cannot be read is like no other."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with file.open() as handle:
            digest.update(handle.read(_PROBE_BYTES))
            handle.seek(max(0, file.size - _PROBE_BYTES))
            digest.update(handle.read(_PROBE_BYTES))
    except READ_FAILURES:
        return file.path
    return digest.hexdigest()


def count_errors(findings: Sequence[Finding]) -> int:
    """Return how many findings are errors."""
    return sum(finding.severity == "error" for finding in findings)
