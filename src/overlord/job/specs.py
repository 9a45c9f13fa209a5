"""The job: `Source`, `Batch`, `Job`, and what of a job decides the stream (its fingerprint).

All configuration of the stream is here and in the files beside it (samples, mixture): frozen, checked when built. Job
files are read in `overlord/job_files.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from overlord.core.spec_errors import Fault, conflict, did_you_mean, list_some, unexpanded
from overlord.errors import SpecError
from overlord.job.mixture_specs import Learn, Mixture
from overlord.job.sample_specs import (
    Audio,
    Augment,
    Chat,
    Custom,
    ImageChat,
    ImageSpec,
    ImageText,
    Interleaved,
    Sample,
    Text,
    Video,
    audio_frames,
    audio_tokens,
    image_grid,
    image_tokens,
    pick_frames,
    smart_resize,
    video_frames,
    video_grid,
)
from overlord.job.spec_model import Spec, Takes, Word, as_bytes, as_number, real, spec_field, whole

# --------------------------------------------------------------------------------------------------------------
# `Source`: one place samples come from, and what its fields may hold.


def _as_name(value: object) -> object:
    if not isinstance(value, str):
        raise Fault("the name of a source must be text; in a file, put it in quotes")
    if not value or value in (".", ".."):
        raise Fault("a source needs a name; states and sample ids are kept by it. Write a short word")
    bad = sorted({c for c in value if c in "/:@" or c.isspace() or not c.isprintable()})
    if bad:
        raise Fault(
            f"a name must not contain {list_some(bad)}; sample ids such as name:row could not be read back. "
            "Use letters, digits, '-', '_' or '.'"
        )
    return value


def _as_paths(value: object) -> object:
    if isinstance(value, (str, os.PathLike)):
        return [cast("object", value)]
    if not isinstance(value, (list, tuple)) or not value:
        raise Fault("this must be a path, a glob, a folder or a URL, or a list of them; nothing could be read")
    return cast("Any", value)


def _as_joined(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value)) or _as_joined([])
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(one, str) for one in cast("Any", value)):
        raise Fault(
            "this must be a column, a list of columns, or a mapping of new names to columns; nothing would be joined. "
            'Write columns=["embedding"] or columns={"embedding": "vector"}'
        )
    return {str(one): str(one) for one in cast("Any", value)}


_Paths = Takes[
    Annotated[tuple[Word, ...], BeforeValidator(_as_paths, json_schema_input_type=str | list[str])],
    str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
]


class Join(Spec):
    """Columns of another dataset beside those of a source: by row, or by a key.

    Example:
        >>> Join("embeddings/*.parquet", ["vector"], by="id")
        Join(('embeddings/*.parquet',), {'vector': 'vector'}, by='id')
    """

    path: _Paths = spec_field(kw_only=False)
    """File, glob, folder or URL of the other dataset, or a list of them."""
    columns: Takes[
        Annotated[
            dict[Word, Word], BeforeValidator(_as_joined, json_schema_input_type=str | list[str] | dict[str, str])
        ],
        str | Sequence[str] | Mapping[str, str],
    ] = spec_field(kw_only=False)
    """Its columns that are joined: a list, or a mapping of new names to columns."""
    by: Word | None = None
    """Column of the source with the key; none joins row by row, in the order of the files."""
    key: Word | None = None
    """Column of the other dataset with the key; by default as `by`."""
    missing: Literal["bad", "error"] = "bad"
    """What a row without a partner is: a bad sample, or an error at launch."""
    format: Word | None = None
    """File format of the other dataset, where it cannot be told from the names."""
    config: Word | None = None
    """Configuration of the other dataset, as of a source."""
    split: Word | None = None
    """Split of the other dataset, as of a source."""
    storage_options: Takes[dict[str, Any], Mapping[str, Any]] = spec_field(default={}, repr=False)
    """Options of its filesystem."""

    @property
    def other_key(self) -> str:
        """The column of the other dataset with the key."""
        return self.key or self.by or ""

    @model_validator(mode="after")
    def _check_key(self) -> Join:
        for name, given in (("key", self.key is not None), ("missing", self.missing != "bad")):
            if given and self.by is None:
                raise conflict(
                    f"{getattr(self, name)!r} would not be used: without by rows are joined by their numbers. Give "
                    f"the column of the source that holds the key as by, or leave {name} out",
                    name,
                )
        return self


PUBLIC_OPTIONS = frozenset(
    {
        "allow_bucket_creation", "allow_delayed_open", "anonymous", "buffer_size", "connect_timeout",
        "endpoint_override", "force_virtual_addressing", "load_frequency", "project_id", "region", "request_timeout",
        "retry_time_limit", "scheme", "session_name", "tls_ca_file_path",
    }
)  # fmt: skip
"""Storage options that may be written down. Any other may be a credential: it stays in the memory of processes."""


def secret_options(source: Source) -> dict[str, Any]:
    """Return the storage options of a source that are never written down; those of its join under "join".

    Example:
        >>> secret_options(Source("a", "s3://b/a", storage_options={"region": "eu-west-1", "secret_key": "x"}))
        {'secret_key': 'x'}
    """
    found = {name: value for name, value in source.storage_options.items() if not _is_public(name, value)}
    joined = source.join.storage_options if source.join is not None else {}
    of_join = {name: value for name, value in joined.items() if not _is_public(name, value)}
    return found | ({"join": of_join} if of_join else {})


def without_secrets(source: Source) -> Source:
    """Return a source with only those of its storage options that may be written down.

    Example:
        >>> without_secrets(Source("a", "s3://b/a", storage_options={"region": "x", "secret_key": "y"})).storage_options
        {'region': 'x'}
    """
    secret = secret_options(source)
    if not secret:
        return source
    public = {name: value for name, value in source.storage_options.items() if name not in secret}
    join = source.join
    if join is not None:
        kept = {name: value for name, value in join.storage_options.items() if name not in secret.get("join", {})}
        join = join.replace(storage_options=kept)
    return source.replace(storage_options=public, join=join)


def with_options(source: Source, given: Mapping[str, Any]) -> Source:
    """Return a source with further storage options; those of its join stand under "join"."""
    own = {name: value for name, value in given.items() if name != "join"}
    join, joined = source.join, given.get("join")
    if joined is not None and join is not None:
        join = join.replace(storage_options={**join.storage_options, **joined})
    return source.replace(storage_options={**source.storage_options, **own}, join=join)


def _is_public(name: str, value: object) -> bool:
    return name in PUBLIC_OPTIONS and "@" not in str(value)  # http://user:password@host


MAX_ROW_BYTES = 256 * 2**20
"""What a row may have by default: more than any sample of a training has, and less than would fill a host."""


def _as_row_bytes(value: object) -> int:
    found = as_bytes(value)
    if found < 1:
        raise Fault("every row would be too large, and all samples bad. Write the bytes of the largest row, as 256MiB")
    return found


class Source(Spec):
    """One place samples come from: files of one kind with one kind of row.

    Example:
        >>> Source("web", "data/web/*.parquet", sample=Text("body"), shuffle_bytes="16MB")
        Source('web', ('data/web/*.parquet',), sample=Text('body'), shuffle_bytes=16000000)
    """

    name: Annotated[str, BeforeValidator(_as_name, json_schema_input_type=str)] = Field(kw_only=False)
    """Unique name; weights, states and sample ids use it."""
    path: _Paths = spec_field(kw_only=False)
    """File, glob, folder or URL, or a list of them."""
    sample: Takes[Sample, Spec | Mapping[str, Any]] = spec_field(default=Text("text"))
    """What a row is."""
    weight: (
        Annotated[float, real(0, math.inf, "a source cannot be drawn less than never. Write 0 to leave it out")] | None
    ) = None
    """Weight in the mixture, unless the mixture has its own."""
    lengths: Word | None = None
    """Where token counts come from: a column's name, "sidecar", or none to tokenize on read."""
    shuffle_bytes: Takes[
        Annotated[int, BeforeValidator(as_bytes, json_schema_input_type=int | str)],
        int | str,
    ] = spec_field(default=4 * 2**20)
    """Memory of the shuffle, as bytes or "16MB"; 0 keeps the order of the files."""
    max_row_bytes: Takes[
        Annotated[int, BeforeValidator(_as_row_bytes, json_schema_input_type=int | str)], int | str
    ] = spec_field(default=MAX_ROW_BYTES, exclude_if=lambda size: size == MAX_ROW_BYTES)  # older states still fit
    """Largest row that is read, as bytes or "256MiB": a longer line, or a tar sample with more, is a bad sample."""
    order_by: Word | None = Field(default=None, exclude_if=lambda column: column is None)  # older states still fit
    """Column of numbers by which rows are ordered in every epoch, smallest first; "-column" for largest first."""
    join: Takes[Join | None, Join | Mapping[str, Any] | None] = spec_field(
        default=None, exclude_if=lambda join: join is None
    )
    """Columns of another dataset, by row or by key, which the sample may name like the source's own."""
    tolerance: Annotated[
        float, real(0, 1, "it is the share of samples that may be bad. Write 0.01 for one in a hundred")
    ] = 0.01
    """Share of bad samples at which the run stops."""
    format: Word | None = None
    """File format, where it cannot be told from the names, or a reader of your own as "module:Class"."""
    config: Word | None = None
    """Configuration of a dataset that is laid out as on the Hugging Face Hub, by its README.md."""
    split: Word | None = None
    """Split of such a dataset, by its README.md or the names of its files."""
    storage_options: Takes[dict[str, Any], Mapping[str, Any]] = spec_field(default={}, repr=False)
    """Options of the filesystem: region, endpoint, credentials."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Source:
        if self.lengths is not None and isinstance(self.sample, (Chat, Interleaved, Custom)):
            raise conflict(
                f"{self.lengths!r} would not be looked at: {type(self.sample).__name__} is measured when it is read, "
                "since its labels or images decide the length too. Leave it out",
                "lengths",
            )
        return self

    @model_validator(mode="after")
    def _check_join(self) -> Source:
        if self.join is not None and self.lengths == "sidecar":
            raise conflict(
                "a sidecar would not notice another joined dataset, and its lengths could be wrong. Leave lengths out, "
                "or name a column that holds them",
                "lengths",
            )
        return self

    @model_validator(mode="after")
    def _check_order(self) -> Source:
        if self.order_by == "-":
            raise conflict(
                "'-' names no column; rows would have no order. Write a column, or -column for largest first",
                "order_by",
            )
        usual = type(self).model_fields["shuffle_bytes"].default
        if self.order_by is not None and self.shuffle_bytes not in (0, usual):
            raise conflict(
                f"{self.shuffle_bytes} would not be used: order_by={self.order_by!r} keeps the order of that column, "
                "and rows are not shuffled. Leave one of them out",
                "shuffle_bytes",
            )
        return self


# --------------------------------------------------------------------------------------------------------------


__all__ = [
    "Audio",
    "Augment",
    "Batch",
    "Chat",
    "Custom",
    "ImageChat",
    "ImageSpec",
    "ImageText",
    "Interleaved",
    "Job",
    "Join",
    "Learn",
    "Mixture",
    "Sample",
    "Source",
    "Spec",
    "Text",
    "Video",
    "audio_frames",
    "audio_tokens",
    "image_grid",
    "image_tokens",
    "pick_frames",
    "smart_resize",
    "source_digest",
    "stream_parts",
    "video_frames",
    "video_grid",
]

FINGERPRINT_VERSION = 4

Overlength = Literal["truncate", "split", "drop", "error"]


class Batch(Spec):
    """How large a step and a sequence are.

    Example:
        >>> Batch(8192, global_tokens=2**20).microbatch_cap
        8192
    """

    context_length: Annotated[
        int,
        whole(
            2,
            "a sequence of one token has no next token to predict: nothing would count in the loss. Give the model's "
            "sequence length",
            example="8192",
        ),
    ] = Field(kw_only=False)
    """Tokens in a sequence; no sample is longer."""
    global_tokens: (
        Annotated[int, whole(1, "a step would be empty. Give the tokens of a step", example="1048576")] | None
    ) = None
    """Tokens in a step over all ranks."""
    global_samples: (
        Annotated[int, whole(1, "a step would be empty. Give the samples of a step", example="512")] | None
    ) = None
    """Samples in a step over all ranks."""
    microbatch_tokens: (
        Annotated[int, whole(1, "a microbatch would be empty. Give what fits a rank's memory")] | None
    ) = None
    """Most tokens in a microbatch of one rank; context_length by default."""
    microbatches: Annotated[int, whole(1, "a step would have no microbatch. Leave it out to have it chosen")] | None = (
        None
    )
    """Microbatches in a step of one rank; chosen by the plan by default."""

    @property
    def microbatch_cap(self) -> int:
        """Most tokens in a microbatch of one rank."""
        return self.microbatch_tokens or self.context_length

    @model_validator(mode="after")
    def _check_together(self) -> Batch:
        length = self.context_length
        if (self.global_tokens is None) == (self.global_samples is None):
            found = "neither is given" if self.global_tokens is None else "both are given"
            raise conflict(
                f"a step is measured by global_tokens or by global_samples, but {found}; its size would be "
                "unclear. Give exactly one, such as global_tokens=1048576",
                "global_tokens",
            )
        for name, value in (("global_tokens", self.global_tokens), ("microbatch_tokens", self.microbatch_tokens)):
            if value is not None and value < length:
                raise conflict(
                    f"{value} is less than context_length = {length}; a sample of full length would never "
                    f"fit. Write at least {name}={length}, or a shorter context_length",
                    name,
                )
        return self


def _as_sources(value: object) -> object:
    if isinstance(value, (str, Mapping, Source)):
        raise Fault(
            "this must be a list of sources. Write sources=[ol.Source(..)]; a manifest belongs into a job "
            "file, or is read with overlord.job_files.read_manifest"
        )
    return value


def _as_mixture(value: object) -> object:
    """Take a Mixture, its fields, or bare weights {source: weight}."""
    if value is None:
        return Mixture()
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, Any]", value)
        numbers = all(as_number(v) is not None for v in mapping.values())
        if mapping and numbers and not set(mapping) & set(Mixture.known_keys()):
            return Mixture.nested({"weights": mapping})
        return Mixture.nested(mapping)
    if not isinstance(value, Mixture):
        raise Fault("this must be an ol.Mixture(..), or a mapping of source names to weights")
    return value


class Job(Spec):
    """Everything that decides the stream, and nothing about its trainers.

    Example:
        >>> web = Source("web", "web/*.parquet")
        >>> job = Job([web], tokenizer="tok.json", batch=Batch(512, global_samples=8))
        >>> job.names
        ['web']
    """

    sources: Takes[
        Annotated[tuple[Source, ...], BeforeValidator(_as_sources, json_schema_input_type=list[Source])],
        Sequence[Source | Mapping[str, Any]],
    ] = spec_field(kw_only=False)
    """The sources, each with its own name."""
    mixture: Takes[
        Annotated[Mixture, BeforeValidator(_as_mixture, json_schema_input_type=Mixture | dict[str, float] | None)],
        Mixture | Mapping[str, Any] | None,
    ] = spec_field(default=Mixture(), kw_only=False)
    """How much of each source; by default the weights beside the sources."""
    tokenizer: Takes[Word | None, str | os.PathLike[str] | None] = spec_field(default=None, kw_only=False)
    """A tokenizer.json, or a folder with a Hugging Face tokenizer or processor."""
    batch: Takes[Batch, Batch | Mapping[str, Any]]
    """Size of a step and of a sequence."""
    seed: Annotated[int, whole(None, "", example="0")] = 0
    """Seed of the order; another seed is another stream."""
    overlength: Overlength = "truncate"
    """What happens to a sample longer than context_length; "split" also fills steps of global_tokens."""
    lag: Annotated[
        int, whole(1, "feedback on a step cannot count before the step is over. Write 16 or leave it out")
    ] = 16
    """Steps after which reported metrics take effect; larger than the prefetch depth."""
    max_steps: Annotated[int, whole(1, "nothing would run. Leave it out for no limit")] | None = None
    """Steps after which the stream ends."""
    drop_last: bool = False
    """Whether a last step that is not full is left out."""

    @property
    def names(self) -> list[str]:
        """The names of the sources, in order."""
        return [source.name for source in self.sources]

    def evaluation(self) -> Job:
        """Return the job that gives every sample once, and ends.

        Steps take one source after the other, and the rows of each in the order of its files. Inside a step samples are
        where the strategy places them: "vanilla" on one data-parallel rank leaves them in order. Weights do not count:
        a source with weight 0 is read as well.
        """
        sources = tuple(s.model_copy(update={"shuffle_bytes": 0, "weight": None}) for s in self.sources)
        mixture = Mixture(order="sequential", stopping="all_exhausted_without_replacement")
        return self.model_copy(update={"sources": sources, "mixture": mixture, "max_steps": None, "drop_last": False})

    @model_validator(mode="after")
    def _check_together(self) -> Job:
        _check_names(self)
        _check_weights(self)
        _check_tokenizer(self)
        _check_contexts(self)
        return self


def _check_names(job: Job) -> None:
    if not job.sources:
        raise conflict("there are no sources, so there is nothing to read. Add at least one", "sources")
    seen: dict[str, int] = {}
    for number, source in enumerate(job.sources):
        if source.name in seen:
            raise conflict(
                f"{source.name!r} is also the name of sources[{seen[source.name]}]; weights and states are "
                "kept by name and would mix the two. Give each source its own name",
                "sources",
                number,
                "name",
            )
        seen[source.name] = number


def _check_weights(job: Job) -> None:
    names = job.names
    for loc, name in job.mixture.places():
        if name not in names:
            raise conflict(
                f"no source has the name {name!r}; its weight would be lost and the shares of the others "
                f"would change.{did_you_mean(name, [*names, *Mixture.known_keys()])} Sources: "
                f"{list_some(names)}",
                "mixture",
                *loc,
            )
    weighted = [n for n, s in enumerate(job.sources) if s.weight is not None]
    if weighted and job.mixture.has_weights:
        raise conflict(
            "there are weights in the mixture too, and neither wins over the other. Choose one place: "
            "weights beside the sources, or in the mixture",
            "sources",
            weighted[0],
            "weight",
        )
    missing = [n for n, s in enumerate(job.sources) if s.weight is None]
    if weighted and missing:
        raise conflict(
            f"missing, although {names[weighted[0]]!r} has one; the share of this source would be a guess. "
            "Give every source a weight (0 leaves it out), or none",
            "sources",
            missing[0],
            "weight",
        )
    if weighted and not any(source.weight for source in job.sources):
        raise conflict(
            "the weights beside the sources sum to zero; nothing could be drawn. Give at least one source a "
            "weight above 0",
            "sources",
        )


def _check_tokenizer(job: Job) -> None:
    if job.tokenizer is not None:
        return
    for source in job.sources:
        sample = source.sample
        if isinstance(sample, Custom) or (isinstance(sample, Text) and sample.tokenized):
            continue
        ready = ", or add tokenized=True to its sample if the column already holds token ids"
        raise conflict(
            f"missing, but source {source.name!r} holds text; it could be neither counted nor packed. Give "
            f'tokenizer="tokenizer.json" or a Hugging Face tokenizer folder{ready if isinstance(sample, Text) else ""}',
            "tokenizer",
        )


def _check_contexts(job: Job) -> None:
    length = job.batch.context_length
    for source in job.sources:
        sample = source.sample
        if isinstance(sample, (ImageSpec, Video)) and sample.min_tokens > length:
            item, one = ("clip", "a clip") if isinstance(sample, Video) else ("image", "an image")
            what = "size" if isinstance(sample, ImageSpec) and sample.size is not None else "min_pixels"
            raise conflict(
                f"{length} tokens are fewer than the {sample.min_tokens} of the smallest {item} of source "
                f"{source.name!r} ({what}={getattr(sample, what)}, patch*merge={sample.factor}); {one} is never cut, "
                f"so no sample would fit. Write a longer context_length or a smaller {what}",
                "batch",
                "context_length",
            )


def tokenizer_file(path: str) -> Path:
    """Return the tokenizer.json that a job's `tokenizer` names, itself or by its folder.

    Raises:
        SpecError: There is none.
    """
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise SpecError(
            f"tokenizer: {path!r} is neither a tokenizer.json nor a folder with one; no text could be turned into "
            "tokens. Give the path of a tokenizer.json or of a Hugging Face tokenizer folder; a name on the Hub is not "
            "downloaded: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) of transformers writes the folder."
            f"{unexpanded(path)}"
        )
    return file


def stream_parts(job: Job, *, tokenizer_digest: str, listings: Mapping[str, str]) -> dict[str, Any]:
    """Return what decides the stream, as plain JSON: the parts of the stream fingerprint.

    Two jobs with equal parts have the same stream; where parts differ, the keys say what changed.
    Where files lie, how they are reached, how microbatches are cut and when the run stops are not part.

    Args:
        job: The job.
        tokenizer_digest: Digest of the tokenizer's files.
        listings: For each source, the digest of its list of files.
    """
    mixture = job.mixture.model_dump(mode="json", by_alias=True)
    if job.mixture.unit == "step":
        del mixture["unit"]  # states were saved before there were others
    if job.mixture.learn is not None and job.mixture.learn.decay_epochs is None:
        del mixture["learn"]["decay_epochs"]  # states of other rules were saved before there was this one
    if job.mixture.order == "sequential":
        mixture["sequence"] = job.names  # only here does the order of the sources decide anything
    batch = job.batch.model_dump(mode="json", include={"context_length", "global_tokens", "global_samples"})
    return {
        "version": FINGERPRINT_VERSION,
        "seed": job.seed,
        "lag": job.lag,
        "overlength": job.overlength,
        "batch": batch,
        "drop_last": job.drop_last,
        "tokenizer": tokenizer_digest,
        "mixture": mixture,
        "weights": {source.name: source.weight for source in job.sources if source.weight is not None},
        "sources": {source.name: source_digest(source, listings[source.name]) for source in job.sources},
    }


def source_digest(source: Source, listing: str) -> str:
    """Return "how it is read:which files": two digests, so that a refusal can tell which of them changed."""
    fields = {"sample", "lengths", "shuffle_bytes", "max_row_bytes", "format", "order_by", "join"}
    how = source.model_dump(
        mode="json", include=fields, exclude={"sample": {"folder"}, "join": {"path", "storage_options"}}
    )
    texts = (json.dumps(how, sort_keys=True, separators=(",", ":")), listing)
    return ":".join(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in texts)
