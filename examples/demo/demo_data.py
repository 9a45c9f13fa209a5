"""The demo's own data: text, image, clip and sound sources, their tokenizers, and the jobs that read them.

`overlord demo` loads this file when it is called; no part of the package imports it. A wheel carries it as data.

The skew of the text and images follows section 2.3 of the paper: long-tailed text lengths, 98 % of the captions of
`coyo` with at most 64 tokens, image sides spread over a factor of eight.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from overlord.errors import SpecError
from overlord.job.specs import Audio, Batch, ImageText, Job, Mixture, Source, Text, Video
from overlord.transforms.samples.per_sample import media_library

# --------------------------------------------------------------------------------------------------------------
# A small word model that writes the demo's text: articles, encyclopedia entries, threads, code, captions.
#
# Words have Zipf frequencies, and each writer favours other words, so sources differ as topics do.
# Lengths are given in tokens of the demo's tokenizer and met within a few per cent.


Lengths = npt.NDArray[np.int64]

_TOKENS_PER_WORD = 1.17
"""Measured with the demo's tokenizer, on all styles: a full stop is a token, a rare word two or three."""


def _split(words: str, mark: str | None = None) -> list[str]:
    return words.split(mark)


_NOUNS = _split("""
time year day thing world school state family student group country problem
hand part place case week company system program question work government number night point home water room
mother area story fact month study book eye job word business issue side kind head house
service friend father power hour game line end member law car city community name president team minute idea
body information back parent face level office door health person art war history party result change
morning reason research girl moment air teacher force education foot boy age policy process music market
sense nation plan college interest death experience effect class control field development role effort rate
heart drug show leader light voice mind price report decision son view relationship town road arm
difference value building action season society tax director position player record paper space ground form
event official matter center couple site project activity star table need court oil situation cost industry
figure street image phone data picture practice piece land product doctor wall patient worker test movie
north love river mountain window garden bridge engine forest harbour island kitchen lantern machine meadow
orchard painter pencil railway sailor scholar shadow signal station summer tower valley village winter bottle
camera candle carpet castle cattle century chapel coffee copper corner cotton farmer feather festival kettle
ladder leather library market mirror needle ocean parcel pepper pillow planet pocket ribbon saddle silver
theatre ticket timber tunnel turbine velvet vessel violin wagon weather whistle workshop
""")

_VERBS = _split("""
find give tell work call try ask need feel become leave put mean keep let begin help talk turn start show hear
play run move like live believe hold bring happen write provide sit stand lose pay meet include continue set
learn change lead understand watch follow stop create speak read allow add spend grow open walk win offer
remember love consider appear buy wait serve die send expect build stay fall cut reach kill remain suggest
raise pass sell require report decide pull return explain hope develop carry break receive agree support hit
produce eat cover catch draw choose cause point listen realise place close involve increase measure gather
repair polish deliver borrow collect describe discover examine fasten imagine improve invent launch observe
""")

_ADJECTIVES = _split("""
good new first last long great little own other old right big high different small large next early young
important few public bad same able political late general full special easy clear recent certain personal
open red difficult available likely short single medical current wrong private past foreign fine common poor
natural significant similar hot dead central happy serious ready simple left physical federal entire close
green blue dark quiet bright narrow wooden ancient distant gentle heavy hollow humble modern northern patient
pleasant proud rapid rough rural silent slender smooth steady tender tiny vivid weary yellow broken careful
""")

_SYLLABLES = _split("ka ro mi ta len dor sha vel nor bri an os ter wick ham ley ston el mar ju pe lin gor ath ed")

_FUNCTION = {
    "D": _split("the this every one its their that another each our his her"),
    "P": _split("of in to for with on at from by about near into over after under between through against"),
    "C": _split("and but because while although when so"),
    "R": _split("again slowly today soon together there early gladly"),
    "M": _split("can will would could should may might must"),
}

_SENTENCES = [
    "D A N M V D N",
    "D N P D N M V D A N",
    "O P D A N M V P D N",
    "D A N P D N M V R",
    "S M V D N P D N , C D N M V D A N",
    "P D N , D A N M V D N P O",
    "D N P S M V R , C D A N M V D N P D N",
    "R , D N M V O P D A N P D N , C S M V D N",
    "S M V P D N",
    "D N M V P Y , C D N P S M V D A N",
]

_CAPTIONS = ["A N P D N", "D A N P A O", "O P D N , A O", "S P D A N", "D N P S , D A N", "A O , Y"]

_CODE = _split(
    """\
def {v}_{n}({m}, {k}={number}):
    \"\"\"{sentence}\"\"\"
    {n}s = [{m}.{w}({k}) for {m} in {m}s if {m}.{a}]
    return {n}s
|
class {V}{N}:
    def __init__(self, {n}: int, {m}: str = "{a}") -> None:
        self.{n} = {n}
        self._{m} = {m}
|
    def {v}(self, {k}: list[float]) -> float:
        # {sentence}
        for index, {n} in enumerate({k}):
            if {n} > {number} or not self.{m}:
                self.{w}({n}, index)
        return sum({k}) / max(len({k}), 1)
|
    with open({n}_path) as {m}:
        {k} = json.load({m})["{n}"]
    assert {k} is not None, "{sentence}"
|
    {n}, {m} = {v}_{k}({number}, {a}=True)
    while {n} < {m} + {number}:
        {n} += {w}({m})
|
try:
    {m} = {N}({number}).{v}()
except ValueError as error:
    raise {A}Error(f"{n} {{error}}") from error
""",
    "|\n",
)


class Writer:
    """Writes text in one voice: the same grammar for all, word frequencies of its own."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        parts = rng.choice(_SYLLABLES, (700, 3)).tolist()
        names = ["".join(part[: 2 + n % 2]).title() for n, part in enumerate(parts)]
        nouns = rng.permutation(_NOUNS)
        self._words = {
            "N": nouns,
            "O": np.array([_plural(noun) for noun in nouns]),
            "V": rng.permutation(_VERBS),
            "A": rng.permutation(_ADJECTIVES),
            "S": rng.permutation(names),
            "Y": np.array([str(year) for year in range(2024, 1700, -1)]),
            **{kind: np.array(words) for kind, words in _FUNCTION.items()},
        }

    def articles(self, lengths: Lengths) -> list[str]:
        """Return one text per length: paragraphs of sentences."""
        return [_paragraphs(words, 90) for words in self._cut(lengths)]

    def entries(self, lengths: Lengths) -> list[str]:
        """Return one text per length: a title, then headed sections."""
        heads = self._draw("N", 2 * len(lengths)).reshape(-1, 2)
        return [
            f"{first.title()} {second.title()}\n\n== {second.title()} ==\n{_paragraphs(words, 60)}"
            for (first, second), words in zip(heads, self._cut(lengths - 10), strict=True)
        ]

    def threads(self, lengths: Lengths) -> list[str]:
        """Return one text per length: posts by several people."""
        names = self._draw("S", 6 * len(lengths)).reshape(-1, 6)
        texts: list[str] = []
        for people, words in zip(names, self._cut((lengths * 0.94).astype(np.int64)), strict=True):
            posts = _paragraphs(words, 35).split("\n\n")
            texts.append("\n".join(f"{people[n % 6].lower()}: {post}" for n, post in enumerate(posts)))
        return texts

    def captions(self, lengths: Lengths) -> list[str]:
        """Return one line per length."""
        lines = (" ".join(words) for words in self._cut(lengths, _CAPTIONS))
        return [line.replace("?", ".").replace("!", ".") for line in lines]

    def modules(self, lengths: Lengths) -> list[str]:
        """Return one text per length, shaped like Python source."""
        block_tokens = 44
        counts = np.maximum(1, lengths // block_tokens)
        blocks = iter(self._blocks(int(counts.sum())))
        return ["import json\n\n" + "\n".join(next(blocks) for _ in range(count)) for count in counts]

    def _blocks(self, count: int) -> list[str]:
        nouns = self._draw("N", 3 * count).reshape(-1, 3)
        verbs = self._draw("V", 2 * count).reshape(-1, 2)
        rows = zip(
            self._rng.integers(0, len(_CODE), count),
            nouns.tolist(),
            verbs.tolist(),
            self._draw("A", count).tolist(),
            self._rng.geometric(0.05, count).tolist(),
            self._sentences(count),
            strict=True,
        )
        return [
            _CODE[kind].format(
                n=n, m=m, k=k, v=v, w=w, a=a, N=n.title(), V=v.title(), A=a.title(), number=number,
                sentence=" ".join(sentence),
            )
            for kind, (n, m, k), (v, w), a, number, sentence in rows
        ]  # fmt: skip

    def _draw(self, kind: str, count: int) -> npt.NDArray[np.str_]:
        words = self._words[kind]
        weight = 1.0 / (np.arange(len(words)) + 2.7)
        return words[np.searchsorted(np.cumsum(weight / weight.sum())[:-1], self._rng.random(count))]

    def _sentences(self, count: int, templates: Sequence[str] = _SENTENCES) -> list[list[str]]:
        """Return sentences as lists of words, punctuation attached to the word before it."""
        chosen = self._rng.integers(0, len(templates), count)
        sentences: list[list[str]] = []
        for number, template in enumerate(templates):
            rows = int((chosen == number).sum())
            columns: list[list[str]] = []
            for kind in template.split():
                if kind == ",":
                    columns[-1] = [word + "," for word in columns[-1]]
                else:
                    columns.append(self._draw(kind, rows).tolist())
            columns[0] = [word[:1].upper() + word[1:] for word in columns[0]]
            marks = self._rng.choice([".", ".", ".", ".", ".", ".", "?", "!"], rows)
            columns[-1] = [word + mark for word, mark in zip(columns[-1], marks, strict=True)]
            sentences += [list(words) for words in zip(*columns, strict=True)]
        return [sentences[at] for at in self._rng.permutation(len(sentences))]

    def _cut(self, lengths: Lengths, templates: Sequence[str] = _SENTENCES) -> Iterator[list[str]]:
        """Yield the words of each text: whole sentences, the last one cut where the length is reached."""
        wanted = np.maximum(2, (lengths / _TOKENS_PER_WORD).astype(np.int64)).tolist()
        mean = sum(len(template.replace(",", "").split()) for template in templates) / len(templates)
        ready: list[list[str]] = []
        for count in wanted:
            words: list[str] = []
            while len(words) < count:
                if not ready:
                    ready = self._sentences(max(64, int(sum(wanted) / mean / 8)), templates)
                words += ready.pop()
            yield [*words[: count - 1], words[count - 1].rstrip(".,?!") + "."]


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "ch", "sh", "x")) else "s")


def _paragraphs(words: Sequence[str], size: int) -> str:
    """Join words, breaking the paragraph at the first sentence end after `size` words."""
    parts: list[str] = []
    start = 0
    for at, word in enumerate(words):
        if at - start >= size and word[-1] in ".?!":
            parts.append(" ".join(words[start : at + 1]))
            start = at + 1
    if start < len(words):
        parts.append(" ".join(words[start:]))
    return "\n\n".join(parts)


# --------------------------------------------------------------------------------------------------------------
# Five text and three image sources in every format, their tokenizer, and the job that reads them.


VERSION = 1
"""Raised when the data changes, so that a folder written by an older version is written again."""
SEED = 20_240_601
VOCABULARY = 4096
SPECIAL_TOKENS = ("<unk>", "<bos>", "<eos>", "<pad>", "<image>")
CAPTION_LIMIT = 64
_MARKER = "demo.json"
_JPEG_QUALITY = 85
_TRAINING_CHARACTERS = 2_000_000

Progress = Callable[[str, int, int], None]
Pixels = npt.NDArray[np.uint8]
Write = Callable[[Path, int, np.random.Generator, Progress | None], list[str]]


@dataclass(frozen=True, slots=True)
class DemoFiles:
    """Where the demo's data lies and how much of it there is."""

    folder: Path
    sources: dict[str, str]
    """Path or glob of each source."""
    tokenizer: Path
    total_bytes: int
    samples: dict[str, int]

    def relative(self) -> DemoFiles:
        """Return the files with paths relative to their folder, so that the folder can be moved."""
        sources = {name: Path(path).relative_to(self.folder).as_posix() for name, path in self.sources.items()}
        return replace(self, sources=sources, tokenizer=self.tokenizer.relative_to(self.folder))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one source is written."""

    pattern: str
    samples: int
    write: Write
    """Writes the files and returns their text, for the tokenizer."""


def write_demo(folder: Path, *, scale: float = 1.0, progress: Progress | None = None) -> DemoFiles:
    """Write the demo's sources and tokenizer into a folder, unless they are already there.

    Args:
        folder: Created if missing. Only the demo's own files in it are written.
        scale: Samples per source relative to the full demo (about 50 MB).
        progress: Called with (source, samples done, samples in all).

    Raises:
        SpecError: `scale` is not positive, or `folder` is a file.
    """
    if not scale > 0:
        raise SpecError(f"scale={scale} would write no samples; give a number above 0, such as 1.0")
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"demo folder {str(folder)!r} is a file; nothing was written: name a folder instead")
    found = _complete_demo(folder, scale)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).unlink(missing_ok=True)
    samples: dict[str, int] = {}
    corpus: list[str] = []
    for number, (name, plan) in enumerate(_PLANS.items()):
        # A file left by another version would be matched by the job's glob.
        for stale in folder.glob(plan.pattern):
            stale.unlink()
        (folder / name).mkdir(exist_ok=True)
        samples[name] = max(8, round(plan.samples * scale))
        rng = np.random.default_rng([SEED, number])
        corpus += _excerpts(plan.write(folder, samples[name], rng, progress))
    train_tokenizer(corpus, VOCABULARY, SPECIAL_TOKENS).save(str(folder / "tokenizer.json"))
    if progress is not None:
        progress("tokenizer", 1, 1)
    _write_marker(folder, scale, samples)
    return _demo_files(folder, samples)


def demo_job(files: DemoFiles) -> Job:
    """Return the VLM-shaped job of the demo: the mixture moves from text to images at step 15."""

    def pictures(image: str, text: str) -> ImageText:
        return ImageText(image=image, text=text, patch=16, merge=2, max_pixels=512 * 512)

    samples = dict.fromkeys(("web", "books", "code", "wiki", "forum"), Text("text")) | {
        "coyo": pictures("jpg", "caption"),
        "photos": pictures("jpg", "txt"),
        "charts": pictures("image", "caption"),
    }
    names = list(samples)
    first = (0.32, 0.12, 0.12, 0.10, 0.06, 0.14, 0.08, 0.06)
    later = (0.20, 0.07, 0.08, 0.07, 0.04, 0.28, 0.15, 0.11)
    return Job(
        sources=[Source(name, files.sources[name], sample=samples[name]) for name in names],
        mixture=Mixture.stages(
            [(0, dict(zip(names, first, strict=True))), (15, dict(zip(names, later, strict=True)))],
            level="token",
        ),
        tokenizer=str(files.tokenizer),
        batch=Batch(context_length=4096, global_tokens=65536),
        overlength="split",
        seed=0,
    )


def _demo_files(folder: Path, samples: dict[str, int]) -> DemoFiles:
    return DemoFiles(
        folder=folder,
        sources={name: str(folder / plan.pattern) for name, plan in _PLANS.items()},
        tokenizer=folder / "tokenizer.json",
        total_bytes=sum(_file_sizes(folder).values()),
        samples=samples,
    )


def _file_sizes(folder: Path) -> dict[str, int]:
    paths = [path for plan in _PLANS.values() for path in sorted(folder.glob(plan.pattern))]
    paths.append(folder / "tokenizer.json")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.exists()}


def _write_marker(folder: Path, scale: float, samples: dict[str, int]) -> None:
    marker = {"version": VERSION, "scale": scale, "samples": samples, "files": _file_sizes(folder)}
    part = folder / f"{_MARKER}.part"
    part.write_text(json.dumps(marker, indent=1))
    part.replace(folder / _MARKER)


def _complete_demo(folder: Path, scale: float) -> DemoFiles | None:
    """Return the demo in the folder if it is whole and of this version and scale."""
    try:
        marker: dict[str, Any] = json.loads((folder / _MARKER).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if marker.get("version") != VERSION or marker.get("scale") != scale:
        return None
    return _demo_files(folder, marker["samples"]) if marker.get("files") == _file_sizes(folder) else None


def train_tokenizer(corpus: Iterable[str], vocabulary: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of a corpus; the first special token stands for what is unknown."""
    tokenizer = Tokenizer(models.BPE(unk_token=special_tokens[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _excerpts(texts: Sequence[str]) -> list[str]:
    """Return enough of a source's text to train on, taken evenly from all its samples."""
    budget = _TRAINING_CHARACTERS // len(_PLANS)
    limit = max(200, budget // max(len(texts), 1))
    return [text[:limit] for text in texts[:: max(1, len(texts) * limit // budget)]]


def _skewed_lengths(
    rng: np.random.Generator, count: int, *, median: float, spread: float, low: int, high: int
) -> Lengths:
    """Return lognormal lengths in random order; their quantiles are exact, so a small demo is as skewed."""
    normal = np.sort(rng.standard_normal(max(4096, count)))
    quantiles = np.quantile(normal, (np.arange(count) + 0.5) / count)
    return rng.permutation(np.clip(np.rint(median * np.exp(spread * quantiles)), low, high).astype(np.int64))


def _caption_lengths(rng: np.random.Generator, count: int) -> Lengths:
    """Return caption lengths in tokens: 1.7 % above the limit, holding about 9 % of all tokens."""
    long = max(1, round(0.017 * count))
    short = _skewed_lengths(rng, count - long, median=14, spread=0.55, low=4, high=CAPTION_LIMIT - 18)
    tail = np.linspace(CAPTION_LIMIT + 20, 2 * CAPTION_LIMIT, long).astype(np.int64)
    return rng.permutation(np.concatenate([short, tail]))


def _shards(count: int, shards: int) -> list[slice]:
    edges = [count * number // shards for number in range(shards + 1)]
    return [slice(low, high) for low, high in pairwise(edges)]


def _parquet_writer(name: str, median: float, spread: float, low: int, high: int, shards: int) -> Write:
    def write(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
        lengths = _skewed_lengths(rng, count, median=median, spread=spread, low=low, high=high)
        texts = Writer(rng).articles(lengths)
        for number, part in enumerate(_shards(count, shards)):
            url = [f"https://example.org/{name}/{row}" for row in range(part.start, part.stop)]
            table = cast("Any", pa.table({"text": texts[part], "url": url}))
            pq.write_table(table, folder / name / f"{name}-{number:03d}.parquet", row_group_size=96)
            if progress is not None:
                progress(name, part.stop, count)
        return texts

    return write


def _jsonl_writer(
    name: str,
    suffix: str,
    style: Callable[[Writer, Lengths], list[str]],
    median: float,
    spread: float,
    low: int,
    high: int,
) -> Write:
    def write(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
        lengths = _skewed_lengths(rng, count, median=median, spread=spread, low=low, high=high)
        texts = style(Writer(rng), lengths)
        for number, part in enumerate(_shards(count, 2)):
            lines = [json.dumps({"text": text, "source": name}) + "\n" for text in texts[part]]
            data = "".join(lines).encode()
            if suffix == "jsonl.gz":
                data = gzip.compress(data, mtime=0)
            elif suffix == "jsonl.zst":
                data = cast("bytes", pa.Codec("zstd").compress(data, asbytes=True))
            (folder / name / f"{name}-{number:03d}.{suffix}").write_bytes(data)
            if progress is not None:
                progress(name, part.stop, count)
        return texts

    return write


def _write_coyo(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
    captions = Writer(rng).captions(_caption_lengths(rng, count))
    sides = _skewed_lengths(rng, count, median=216, spread=0.48, low=96, high=768)
    images = _encode_all("coyo", _draw_scene, _sizes(rng, sides, spread=0.22, low=96, high=768), progress)
    for number, part in enumerate(_shards(count, 3)):
        table = cast("Any", pa.table({"jpg": pa.array(images[part], pa.binary()), "caption": captions[part]}))
        path = folder / "coyo" / f"coyo-{number:03d}.parquet"
        # JPEG bytes do not compress and have no repeats; a dictionary would only cost memory.
        pq.write_table(table, path, row_group_size=64, compression="none", use_dictionary=False)
    return captions


def _write_photos(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
    captions = Writer(rng).captions(_skewed_lengths(rng, count, median=28, spread=0.5, low=8, high=120))
    sides = _skewed_lengths(rng, count, median=580, spread=0.22, low=416, high=1080)
    images = _encode_all("photos", _draw_scene, _sizes(rng, sides, spread=0.14, low=384, high=1280), progress)
    for number, part in enumerate(_shards(count, 2)):
        path = folder / "photos" / f"photos-{number:03d}.tar"
        _write_tar(path, range(part.start, part.stop), "jpg", images, captions)
    return captions


def _write_tar(path: Path, rows: range, suffix: str, media: Sequence[bytes], captions: Sequence[str]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row in rows:
            for ending, data in ((suffix, media[row]), ("txt", captions[row].encode())):
                member = tarfile.TarInfo(f"{row:06d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _write_charts(folder: Path, count: int, rng: np.random.Generator, progress: Progress | None) -> list[str]:
    captions = Writer(rng).captions(_skewed_lengths(rng, count, median=22, spread=0.6, low=6, high=200))
    sides = _skewed_lengths(rng, count, median=380, spread=0.25, low=220, high=720)
    images = _encode_all("charts", _draw_chart, _sizes(rng, sides, spread=0.55, low=128, high=1400), progress)
    table = cast("Any", pa.table({"image": pa.array(images, pa.binary()), "caption": captions}))
    out: Any = pa.ipc.new_file(str(folder / "charts" / "charts-000.arrow"), table.schema)
    with out:
        out.write_table(table, max_chunksize=64)
    return captions


def _sizes(rng: np.random.Generator, sides: Lengths, *, spread: float, low: int, high: int) -> Lengths:
    """Return (height, width) per image: the given side at a lognormal aspect ratio."""
    stretch = np.exp(spread * rng.standard_normal(len(sides)))
    both = np.stack([sides / stretch, sides * stretch], axis=1)
    return np.clip(np.rint(both), low, high).astype(np.int64)


def _encode_all(
    name: str,
    draw: Callable[[np.random.Generator, int, int], Pixels],
    sizes: Lengths,
    progress: Progress | None,
) -> list[bytes]:
    """Draw and encode one JPEG per size; drawing mostly happens outside the GIL, so threads are enough."""
    source = list(_PLANS).index(name)

    def encode(row: int) -> bytes:
        height, width = (int(side) for side in sizes[row])
        pixels = draw(np.random.default_rng([SEED, source, row]), height, width)
        return simplejpeg.encode_jpeg(pixels, quality=_JPEG_QUALITY, colorspace="RGB")

    images: list[bytes] = []
    pool = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    try:
        for image in pool.map(encode, range(len(sizes))):
            images.append(image)
            if progress is not None and (len(images) % 16 == 0 or len(images) == len(sizes)):
                progress(name, len(images), len(sizes))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the images that are left
    return images


def _draw_scene(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """Return soft light, a few shaded shapes and sensor noise: a JPEG as heavy as a photograph's."""
    palette = rng.integers(40, 216, 3) + rng.integers(-55, 56, (4, 5, 3))
    coarse = Image.fromarray(np.clip(palette, 0, 255).astype(np.uint8))
    scene = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    for _ in range(int(rng.integers(4, 11))):
        shares = rng.uniform(0.06, 0.4, 2)
        tall, wide = max(6, int(height * shares[0])), max(6, int(width * shares[1]))
        top, left = int(rng.integers(0, max(1, height - tall))), int(rng.integers(0, max(1, width - wide)))
        area = scene[top : top + tall, left : left + wide]
        y = np.linspace(-1, 1, area.shape[0], dtype=np.float32)[:, None]
        x = np.linspace(-1, 1, area.shape[1], dtype=np.float32)[None, :]
        colour = rng.integers(20, 236, 3).astype(np.int16) + (30 * (x + y)).astype(np.int16)[..., None]
        round_one = rng.random() < 0.6
        inside = x * x + y * y < 1 if round_one else np.ones_like(x + y, bool)
        np.copyto(area, colour, where=inside[..., None])
    # Grain at half resolution: what is left after a camera's own smoothing.
    grain = rng.integers(-6, 7, (-(-height // 2), -(-width // 2)), dtype=np.int8)
    scene += np.repeat(np.repeat(grain, 2, axis=0), 2, axis=1)[:height, :width, None]
    return np.clip(scene, 0, 255, out=scene).astype(np.uint8)


def _draw_chart(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """Return a bar or area chart with a grid and axes on white."""
    chart = np.full((height, width, 3), 252, np.uint8)
    chart[:: max(8, height // 9)] = 225
    left, bottom = width // 12 + 2, height - height // 10 - 2
    steps = int(rng.integers(5, 40))
    values = np.abs(np.cumsum(rng.standard_normal(steps))) + 0.4
    column = np.minimum(np.arange(width - left) * steps // (width - left), steps - 1)
    level = (values / values.max() * (bottom - 4))[column]
    if rng.random() < 0.5:
        level = np.interp(np.arange(width - left), np.arange(steps) * (width - left) / steps, values)
        level = level / level.max() * (bottom - 4)
    filled = np.arange(height)[:, None] >= bottom - level[None, :]
    filled[bottom:] = False
    chart[:, left:][filled] = rng.integers(30, 200, 3)
    chart[bottom : bottom + 2, left:] = 40
    chart[:bottom, left - 2 : left] = 40
    speckle = rng.integers(0, 5, (height, width, 1), dtype=np.uint8)
    return np.ascontiguousarray(chart - speckle)


_PLANS: dict[str, _Plan] = {
    "web": _Plan("web/web-*.parquet", 1500, _parquet_writer("web", 330, 1.15, 30, 5600, 4)),
    "books": _Plan("books/books-*.parquet", 64, _parquet_writer("books", 8000, 0.5, 3000, 24000, 2)),
    "code": _Plan("code/code-*.jsonl.gz", 600, _jsonl_writer("code", "jsonl.gz", Writer.modules, 420, 0.9, 60, 5000)),
    "wiki": _Plan("wiki/wiki-*.jsonl.zst", 500, _jsonl_writer("wiki", "jsonl.zst", Writer.entries, 450, 0.9, 60, 5000)),
    "forum": _Plan("forum/forum-*.jsonl", 1200, _jsonl_writer("forum", "jsonl", Writer.threads, 110, 0.9, 20, 2000)),
    "coyo": _Plan("coyo/coyo-*.parquet", 1600, _write_coyo),
    "photos": _Plan("photos/photos-*.tar", 240, _write_photos),
    "charts": _Plan("charts/charts-*.arrow", 400, _write_charts),
}


# --------------------------------------------------------------------------------------------------------------
# Small generated media: sounds in tar shards, clips in Parquet, notes in JSONL, and the job that reads them.


MEDIA_TOKENS = (
    "<unk>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
)  # fmt: skip
MEDIA_VOCABULARY = 1024
NOTES_PER_ITEM = 2
_RATES = (16000, 16000, 8000, 44100)
_SHARDS = 2


def write_media(folder: Path, *, clips: int, sounds: int, seed: int = 0, corrupt: int = 0) -> list[Path]:
    """Write sounds, clips, notes and a tokenizer into a folder and return the files.

    Args:
        folder: Created if missing; files of the same names are written again.
        clips: How many clips.
        sounds: How many sounds.
        seed: Another seed gives other media.
        corrupt: How many of the clips, and how many of the sounds, are damaged: in turn in the body, which is found
            when they are decoded, and in the header, which is found when they are measured.

    Raises:
        SpecError: when a number makes no sense, or the libraries for media are not installed.
    """
    if clips < _SHARDS or sounds < _SHARDS or not 0 <= corrupt <= min(clips, sounds):
        raise SpecError(
            f"clips={clips}, sounds={sounds}, corrupt={corrupt}: there must be at least {_SHARDS} of each for as many "
            "files, and not more damaged ones than there are. Raise clips and sounds, or lower corrupt."
        )
    writer = Writer(np.random.default_rng([seed, 0]))
    lengths = np.random.default_rng([seed, 1]).integers(6, 40, clips + sounds)
    captions = writer.captions(lengths)
    notes = writer.articles(np.random.default_rng([seed, 2]).integers(20, 300, NOTES_PER_ITEM * (clips + sounds)))
    heard = [_draw_sound(np.random.default_rng([seed, 3, row]), row) for row in range(sounds)]
    seen = [_draw_clip(np.random.default_rng([seed, 4, row])) for row in range(clips)]
    for row in range(corrupt):
        # The middle of each shard rather than its first rows: a run begins well and meets them later.
        heard[(row + sounds // 2) % sounds] = _damage(heard[(row + sounds // 2) % sounds], in_header=row % 2 > 0)
        seen[(row + clips // 2) % clips] = _damage(seen[(row + clips // 2) % clips], in_header=row % 2 > 0)
    files = [
        *_write_sounds(folder / "sounds", heard, captions[clips:]),
        *_write_clips(folder / "clips", seen, captions[:clips]),
        _write_notes(folder / "notes", notes),
    ]
    train_tokenizer([*captions, *notes], MEDIA_VOCABULARY, MEDIA_TOKENS).save(str(folder / "tokenizer.json"))
    return [*files, folder / "tokenizer.json"]


def media_job(folder: Path) -> Job:
    """Return the job that reads what `write_media` wrote: sounds, clips and notes in turn."""
    audio = Audio("flac", "txt", seconds=6, before="<|audio_bos|>", after="<|audio_eos|>")
    video = Video(
        "mp4", "caption", max_frames=16, min_pixels=56 * 56, max_pixels=112 * 112, before="<|vision_start|>",
        after="<|vision_end|>",
    )  # fmt: skip
    return Job(
        sources=[
            Source("sounds", str(folder / "sounds" / "*.tar"), sample=audio, tolerance=1.0),
            Source("clips", str(folder / "clips" / "*.parquet"), sample=video, tolerance=1.0),
            Source("notes", str(folder / "notes" / "*.jsonl"), sample=Text("text")),
        ],
        mixture=Mixture({"sounds": 0.3, "clips": 0.3, "notes": 0.4}),
        tokenizer=str(folder / "tokenizer.json"),
        batch=Batch(context_length=512, global_samples=8),
        seed=0,
    )


def _draw_sound(rng: np.random.Generator, row: int) -> bytes:
    """Return a gliding tone with noise as FLAC; every fourth sound has two channels."""
    rate = _RATES[row % len(_RATES)]
    count = int(rate * rng.uniform(0.3, 5.0))
    low, high = rng.uniform(80, 0.4 * rate, 2)
    glide = np.cumsum(np.linspace(low, high, count)) / rate
    sound = 0.4 * np.sin(2 * np.pi * glide) + 0.02 * rng.standard_normal(count)
    channels = np.stack([sound, 0.5 * sound], axis=1) if row % 4 == 3 else sound
    out = io.BytesIO()
    media_library("soundfile").write(out, channels.astype(np.float32), rate, format="FLAC")
    return out.getvalue()


def _draw_clip(rng: np.random.Generator) -> bytes:
    """Return a square that moves over a gradient as MP4."""
    av = media_library("av")
    width, height = (int(side) * 16 for side in rng.integers(5, 11, 2))
    frames, rate = int(rng.integers(6, 49)), int(rng.choice([8, 12, 24]))
    out = io.BytesIO()
    codec, options = "mpeg4", {"g": "12"}
    if "libx264" in av.codecs_available:
        # Its macroblock tree makes about one clip in 70 differ from run to run on x86, on one thread as well.
        codec, options["mbtree"] = "libx264", "0"
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1  # encoders write other bytes on other numbers of threads
        for pixels in _move_square(rng, frames, height, width):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def _move_square(rng: np.random.Generator, frames: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    y, x = np.mgrid[:height, :width]
    ground = np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)
    film = np.repeat(ground[None], frames, axis=0)
    side, colour = height // 4, rng.integers(0, 256, 3).astype(np.uint8)
    start, stop = rng.uniform(0, [height - side, width - side], (2, 2))
    for number, (top, left) in enumerate(np.linspace(start, stop, frames).astype(np.int64)):
        film[number, top : top + side, left : left + side] = colour
    return film


def _damage(data: bytes, *, in_header: bool) -> bytes:
    if in_header:
        return data[:24]
    # An MP4 describes itself behind its body, a FLAC file in front of it.
    begin, end = (data.index(b"mdat") + 4, data.rindex(b"moov") - 4) if b"moov" in data else (len(data) // 2, len(data))
    return data[:begin] + b"\xff" * (end - begin) + data[end:]


def _write_sounds(folder: Path, sounds: Sequence[bytes], captions: Sequence[str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"sounds-{number:03d}.tar" for number in range(_SHARDS)]
    for number, path in enumerate(paths):
        _write_tar(path, range(number, len(sounds), _SHARDS), "flac", sounds, captions)
    return paths


def _write_clips(folder: Path, clips: Sequence[bytes], captions: Sequence[str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"clips-{number:03d}.parquet" for number in range(_SHARDS)]
    for number, path in enumerate(paths):
        clip = pa.array(clips[number::_SHARDS], pa.binary())
        table = cast("Any", pa.table({"mp4": clip, "caption": captions[number::_SHARDS]}))
        pq.write_table(table, path, row_group_size=8, compression="none", use_dictionary=False)
    return paths


def _write_notes(folder: Path, notes: Sequence[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "notes-000.jsonl"
    path.write_text("".join(json.dumps({"text": note}) + "\n" for note in notes))
    return path
