"""Lint: looks at every file of every source before a run does, and says what is wrong in one line each."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from overlord.cli.output import Tell
from overlord.cli.preview import OpenItem, decode_items, stays_turned
from overlord.cli.sources import (
    ContextFit,
    Opened,
    borders_left_out,
    cores,
    counter,
    first_rows,
    has_borders,
    open_each,
    side_by_side,
    sum_fits,
    tokens_told,
)
from overlord.core.ragged import Ragged, RowBatch
from overlord.core.samples import SKIP, SampleId
from overlord.core.spec_errors import list_some
from overlord.errors import OverlordError, SpecError
from overlord.job.specs import Audio, Chat, ImageSpec, Job, Video
from overlord.readers.files import StoredFile
from overlord.readers.source_files import LengthSidecars
from overlord.readers.spill import most_kept
from overlord.reports.summary import number, percent
from overlord.roles.source_loader import FEW_SAMPLES, Lengths, fit_context, judge_tolerance
from overlord.runtimes.launching.deployment import known_lengths, transform_of
from overlord.transforms.samples.audio import sound_size
from overlord.transforms.samples.chat import find_template
from overlord.transforms.samples.images import open_image
from overlord.transforms.samples.per_sample import no_seeds
from overlord.transforms.samples.tokenize import TextTokenizer, TokenSpans

FEW_ROWS = 32
"""A source with fewer rows is seen again and again."""
_FEW_BLOCKS = 4
_BATCH_ROWS = 64
_NAMED_ROWS = 5
"""Bad rows of a source that get a line of their own."""
_MANY_EMPTY = 0.1
_PROBE_BYTES = 1 << 16
_MARKER = re.compile(r"<\|[^|<>\s]+\|>|<\w+_of_\w+>|</?s>")
"""What separates turns by the custom of chat templates; other tags in them may be plain text."""

Severity = Literal["error", "warning"]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in one line."""

    severity: Severity
    source: str
    message: str


@dataclass(slots=True)
class _FileFacts:
    """What looking into one file told."""

    rows: int = 0
    blocks: int = 0
    bytes: int = 0
    largest: int = 0
    """Bytes of the largest block."""
    is_cut: bool = False
    """Whether a block is too large for the shuffle as it is, and is cut into parts."""
    spills: bool = False
    """Whether blocks that are cut are unpacked to disk."""
    fit: ContextFit = field(default_factory=ContextFit)
    tokens: int = 0
    bordered: bool = False
    """Whether the text itself has the tokens that stand around media."""
    bad: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(sample id, reason)."""
    wrong_lengths: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    items: int = 0
    """Images, clips and sounds that were decoded."""
    altered: Counter[str] = field(default_factory=Counter[str])
    """How many of them a batch does not hold as they are in the file, by what happens to them."""
    turned: int = 0
    """Images that their EXIF data would turn, and nothing does."""
    texts: int = 0
    """Texts that were tokenized."""
    lossy: int = 0
    """Those of which the tokens do not hold all characters."""
    lost: dict[str, None] = field(default_factory=dict[str, None])
    """The characters that they do not hold, the first ones first."""
    markers: set[str] = field(default_factory=set[str])
    """What the chat template of the job wrote to separate turns."""
    broken: str | None = None

    @property
    def looked_at(self) -> int:
        """Rows that were measured and decoded."""
        return self.fit.rows


class _Listening(TextTokenizer):
    """The tokenizer of a job, which keeps the texts that it is given."""

    def __init__(self, of: TextTokenizer) -> None:
        self.__dict__.update(of.__dict__)
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str], *, special_tokens: bool) -> Ragged:
        self.texts += texts
        return super().encode(texts, special_tokens=special_tokens)

    def encode_spans(self, texts: Sequence[str], *, special_tokens: bool) -> TokenSpans:
        self.texts += texts
        return super().encode_spans(texts, special_tokens=special_tokens)


@dataclass(frozen=True, slots=True)
class LintResult:
    """What a look into every file told."""

    findings: list[Finding]
    """What is wrong, errors first."""
    looked_at: int
    """Rows that were measured and decoded."""
    rows: int
    """Rows of all files that could be opened."""
    media_tokens: list[str]
    """Which tokens stand for images, clips and sounds, in a line for all sources that are alike."""


def lint_job(job: Job, cache: Path, rows: int, tell: Tell) -> LintResult:
    """Return everything that looks wrong in a job's sources, as far as so many rows of every file tell.

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
    known, wrong = _known_lengths(opened, cache)

    def look(task: tuple[Opened, int]) -> _FileFacts:
        return _look_into(task[0], task[1], rows, known.get(task[0].source.name))

    facts: dict[str, list[_FileFacts]] = defaultdict(list)
    for (one, _), told in zip(tasks, side_by_side(look, tasks, cores(), did), strict=True):
        facts[one.source.name].append(told)
    for one in opened:
        findings += _judge_source(job, one, facts[one.source.name])
    findings += wrong + _never_drawn(job) + _duplicates(opened)
    every = [one for found in facts.values() for one in found]
    return LintResult(
        sorted((_one_line(finding) for finding in findings), key=lambda finding: finding.severity != "error"),
        sum(one.looked_at for one in every),
        sum(one.rows for one in every),
        tokens_told(opened),
    )


def _known_lengths(opened: Sequence[Opened], cache: Path) -> tuple[dict[str, Lengths], list[Finding]]:
    """Return how the lengths of each source are known beforehand, and what is wrong with that."""
    sidecars = LengthSidecars(cache / "lengths")
    known: dict[str, Lengths] = {}
    findings: list[Finding] = []
    for one in opened:
        source = one.source
        try:
            lengths = known_lengths(source, one.files, sidecars, one.tokenizer_digest)
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


def _look_into(one: Opened, number: int, rows: int, lengths: Lengths | None) -> _FileFacts:
    facts, files = _FileFacts(), one.files
    heard = None if one.tokenizer is None else _Listening(one.tokenizer)
    one = replace(one, transform=transform_of(one.source, heard))
    try:
        blocks = files.blocks(number)
        facts.rows = int(blocks.rows.sum())
        facts.blocks = int((blocks.rows > 0).sum())
        facts.bytes = int(blocks.bytes.sum())
        facts.largest = int(blocks.bytes.max(initial=0))
        facts.is_cut = blocks.has_large(one.source.shuffle_bytes)
        facts.spills = files.spills_parts(number)
        for first, part in first_rows(files, number, rows, _BATCH_ROWS):
            if heard is not None:
                heard.texts.clear()
            _look_at_rows(one, part, first, lengths, facts)
            if heard is not None:
                _look_at_texts(one, heard, facts)
    except OverlordError as error:
        facts.broken = str(error)
    return facts


def _look_at_rows(one: Opened, rows: RowBatch, first: int, lengths: Lengths | None, facts: _FileFacts) -> None:
    measured = one.transform.measure(rows, None, no_seeds(rows))
    count = len(measured.tokens)
    delivered, flags = fit_context(measured, one.context_length, one.overlength)

    def told(row: int, reason: str) -> tuple[str, str]:
        sample = SampleId(one.source.name, first + row, 0)
        return str(sample).rpartition("@")[0], reason + one.files.place(sample)

    bad = dict(reversed(measured.faults))
    never_drawn = ((measured.flags | flags) & SKIP) > 0  # and so never decoded either
    for item in decode_items(one, measured, delivered.astype(np.int64), never_drawn):
        if item.fault is not None:
            bad.setdefault(item.row, item.fault)
            continue
        facts.items += 1
        facts.turned += stays_turned(one, item)
        if (words := _altered(one, item)) is not None:
            facts.altered[words] += 1
    facts.bad += [told(row, reason) for row, reason in sorted(bad.items())]
    if lengths is not None:
        said = lengths(rows, first + np.arange(count))
        claimed = np.maximum(said, 1)
        empty = np.asarray(measured.kept.get("empty", np.zeros(count, np.bool_)), np.bool_)
        true = measured.tokens - (measured.image_tokens if measured.front is None else measured.front)
        facts.wrong_lengths += [
            told(row, f"its length says {said[row]} tokens, the text has {true[row]}")
            for row in np.flatnonzero((claimed != true) | ((said < 1) & ~empty)).tolist()
            if row not in bad
        ]
    facts.tokens += int(delivered.sum())
    facts.bordered |= has_borders(one, measured)
    facts.fit.add(measured, delivered, flags)


def _look_at_texts(one: Opened, tokenizer: _Listening, facts: _FileFacts) -> None:
    texts, spec = list(filter(None, tokenizer.texts)), one.source.sample
    lost = tokenizer.lost_characters(texts)
    facts.texts += len(texts)
    facts.lossy += sum(map(bool, lost))
    facts.lost |= dict.fromkeys("".join(lost))
    # The template of the tokenizer's own folder is what its model was trained with.
    if isinstance(spec, Chat) and spec.template is not None and spec.template not in tokenizer.chat_templates:
        template = find_template(spec, tokenizer)
        facts.markers |= {mark for text in texts for mark in _MARKER.findall(text) if mark in template}


def _texts_altered(one: Opened, facts: Sequence[_FileFacts]) -> list[Finding]:
    """Tell of what a model never sees of texts as they are written: lost characters, and markers of turns."""
    found = list[Finding]()
    lost = list(dict.fromkeys(character for f in facts for character in f.lost))
    if lost:
        rows = f"{sum(f.lossy for f in facts)} of {number(sum(f.texts for f in facts), 'text')} looked at"
        message = (
            f"the tokenizer has no tokens for {number(len(lost), 'character')} ({list_some(lost, 8)}): in {rows} they "
            "vanish or become unknown. Use a tokenizer that has them; a byte-level one is trained with "
            "initial_alphabet=pre_tokenizers.ByteLevel.alphabet()"
        )
        found.append(Finding("warning", one.source.name, message))
    cut = {mark: len(one.tokenizer.encode([mark], special_tokens=False)[0])
           for mark in sorted({m for f in facts for m in f.markers}) if one.tokenizer is not None}  # fmt: skip
    several = [f"{mark} (as {number(tokens, 'token')})" for mark, tokens in cut.items() if tokens != 1]
    if several:
        message = (
            f"the chat template writes {', '.join(several)}, and the tokenizer has no token for each, so that turns "
            "are hard to tell from text. Add them to the tokenizer as special tokens, or use the template of its model"
        )
        found.append(Finding("warning", one.source.name, message))
    return found


def _judge_source(job: Job, one: Opened, facts: Sequence[_FileFacts]) -> list[Finding]:
    name, findings = one.source.name, list[Finding]()
    for file, found in zip(one.files.files, facts, strict=True):
        if found.broken is not None:
            findings.append(Finding("error", name, found.broken))
        elif found.rows == 0:
            findings.append(Finding("warning", name, f"{file.path} has no rows"))
    looked = sum(f.looked_at for f in facts)
    rows, tokens = sum(f.rows for f in facts), sum(f.tokens for f in facts)
    findings += _faults(one, "bad", [b for f in facts for b in f.bad], looked, rows)
    findings += _faults(one, "wrong length", [b for f in facts for b in f.wrong_lengths], looked, rows)
    broken = any(f.broken is not None for f in facts)
    if rows == 0 and not broken:
        findings.append(Finding("error", name, "no file has any rows; the mixture would wait for it for ever"))
    elif rows < FEW_ROWS and not broken:
        few = f"tiny: {number(rows, 'row')}; the model sees the same samples again and again"
        findings.append(Finding("warning", name, few))
    findings += _texts_altered(one, facts)
    findings += _media_altered(name, facts)
    findings += _never_fits(job, one, sum_fits([f.fit for f in facts]), rows)
    if looked and (pair := borders_left_out(one)) is not None and not any(f.bordered for f in facts):
        findings.append(Finding("warning", name, _borders(pair)))
    if turned := sum(f.turned for f in facts):
        findings.append(Finding("warning", name, _turned(turned, looked)))
    findings += _shuffle(one, facts)
    return findings + _repeats(job, name, rows, tokens / looked if looked else 0.0)


def _altered(one: Opened, item: OpenItem) -> str | None:
    """Return what happens to an image, clip or sound that a batch cannot hold as it is, if anything does."""
    spec = one.source.sample
    if isinstance(spec, Audio):
        samples, rate = sound_size(item.data)
        cut = f"sounds are longer than seconds={spec.seconds} and are cut there, while their text stays whole"
        return cut if samples > spec.seconds * rate else None
    if isinstance(spec, Video):
        tokens = int(np.prod(item.grid, dtype=np.int64)) // spec.merge**2
        over = (
            f"clips have more than max_tokens={spec.max_tokens} tokens, since their frames are not shrunk below "
            f"min_pixels={spec.min_pixels}. Lower min_pixels, fps or max_frames"
        )
        return over if spec.max_tokens is not None and tokens > spec.max_tokens else None
    assert isinstance(spec, ImageSpec)  # no other kind of sample gives images
    with open_image(item.data, spec.formats) as image:
        if not image.has_transparency_data or image.convert("RGBA").getchannel("A").getextrema()[0] == 255:
            return None
    return "images are transparent in places and are put on white"


def _media_altered(name: str, facts: Sequence[_FileFacts]) -> list[Finding]:
    items, altered = sum(f.items for f in facts), sum((f.altered for f in facts), Counter[str]())
    return [Finding("warning", name, f"{count} of {items} {words}") for words, count in altered.items()]


def _turned(count: int, rows: int) -> str:
    images = f"{number(count, 'image')} of the {number(rows, 'row')} looked at {'is' if count == 1 else 'are'}"
    return (
        f"{images} stored turned, and delivered so: their EXIF data say how to turn them, which processors of "
        "transformers do not look at and transformers' load_image does. Set exif_transpose if the model was trained "
        "with the latter"
    )


def _shuffle(one: Opened, facts: Sequence[_FileFacts]) -> list[Finding]:
    """Tell what a shuffle costs where blocks are large, and where it has too few of them to merge."""
    if one.source.order_by is not None:
        return []
    budget, blocks, size = one.source.shuffle_bytes, sum(f.blocks for f in facts), sum(f.bytes for f in facts)
    if size > budget and any(f.is_cut for f in facts):
        spilled, largest = sum(f.bytes for f in facts if f.spills), max(f.largest for f in facts)
        if not spilled:
            return []  # parts are read from the files as they are
        message = (
            f"rows of {_mebibytes(spilled)} are reached only by unpacking those before them (compressed lines, "
            "archives or record batches; Parquet with pages of more than 4 MiB, or encrypted): they are unpacked into "
            "the cache folder, at most once an epoch in each loader process, in blocks of up to "
            f"{_mebibytes(largest)}, which takes up to {_mebibytes(most_kept(spilled, largest))} of disk at a time; "
            "rows that are far from each other are shuffled less at the beginning of an epoch. To avoid it, write "
            "Parquet with smaller pages (data_page_size, and for images write_batch_size), or files that are not "
            "compressed"
        )
    elif budget and size > budget and blocks < _FEW_BLOCKS:
        message = (
            f"its rows lie in {number(blocks, 'block')} of {_mebibytes(size / blocks)}, and a shuffle reads each block "
            f"in order: neighbours mostly stay neighbours. Set shuffle_bytes to {size} to shuffle it in memory, or "
            "write the files with smaller row groups"
        )
    else:
        return []
    return [Finding("warning", one.source.name, message)]


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 10 << 20 else f"{size / 2**20:.1f} MiB"


def _never_fits(job: Job, one: Opened, fit: ContextFit, rows: int) -> list[Finding]:
    """Tell of rows that are never drawn, or not as a whole."""
    name, length = one.source.name, one.context_length
    if not fit.rows:
        return []
    found: list[Finding] = []
    if fit.refused:
        message = f"{percent(fit.refused / fit.rows)} of {fit.rows} rows are longer than context_length={length}, and "
        found.append(Finding("error", name, f"{message}overlength is 'error'; the run would stop at the first"))
    if fit.bad < fit.bad + fit.empty + fit.dropped == fit.rows:
        why = " and ".join(
            words
            for count, words in ((fit.empty, "empty or filtered out"), (fit.dropped, f"too long for {length} tokens"))
            if count
        )
        none = f"{'' if not fit.bad else ' but bad rows'}{'' if fit.rows == rows else ', if the others are alike'}"
        count = f"all {fit.rows} rows" if not fit.bad else f"{fit.rows - fit.bad} of {fit.rows} rows"
        message = f"{count} looked at would be skipped ({why}); a run would find nothing to draw{none}"
        drawn = name not in {idle.source for idle in _never_drawn(job)}
        return [*found, Finding("error" if drawn else "warning", name, message)]
    if fit.empty > _MANY_EMPTY * fit.rows:
        share = percent(fit.empty / fit.rows)
        found.append(Finding("warning", name, f"{share} of {fit.rows} rows looked at are empty and never drawn"))
    # With overlength="drop" some dropped rows are expected; where texts are cut, every dropped row is a surprise.
    if fit.dropped > (_MANY_EMPTY * fit.rows if one.overlength == "drop" else 0):
        what = "are" if one.overlength == "drop" else "have an image, clip or sound"
        message = f"{percent(fit.dropped_share)} of {fit.rows} rows {what} longer than context_length={length} and"
        found.append(Finding("warning", name, f"{message} are dropped"))
    if fit.cut >= _MANY_EMPTY * fit.rows:
        message = f"{percent(fit.cut_share)} of {fit.rows} rows are longer than context_length={length} and are cut"
        found.append(Finding("warning", name, f"{message}, which loses {percent(fit.lost_share)} of the tokens"))
    return found


def _borders(pair: tuple[str, str]) -> str:
    before, after = pair
    return (
        f"the tokenizer has {before} and {after}, between which its model was trained to find media, but neither "
        f'before nor after is set. Write before: "{before}" and after: "{after}" in its sample'
    )


def _faults(one: Opened, what: str, faults: Sequence[tuple[str, str]], looked: int, rows: int) -> list[Finding]:
    name, tolerance, count = one.source.name, one.source.tolerance, len(faults)
    findings = [Finding("warning", name, f"{what}: {sample}: {reason}") for sample, reason in faults[:_NAMED_ROWS]]
    if count > _NAMED_ROWS:
        findings.append(Finding("warning", name, f"{what}: {count - _NAMED_ROWS} more rows like these"))
    if not count:
        return findings
    share, found = count / looked, f"{what}: {count} of {looked} rows ({percent(count / looked)})"
    if judge_tolerance(one.source, looked, count, 0) is not None:
        message = f"{found} are more than tolerance={tolerance:g} allows; a run would stop"
        findings.append(Finding("error", name, message))
    elif share > tolerance and (count > 1 or looked == rows):  # one row among many may be the only one
        after = math.floor(tolerance * FEW_SAMPLES / share) + 1
        message = f"{found} are a larger share than tolerance={tolerance:g}; a run would stop after about {after} rows"
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
    except (OSError, ValueError):
        return file.path
    return digest.hexdigest()
