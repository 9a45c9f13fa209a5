"""A small word model that writes the demo's text: articles, encyclopedia entries, threads, code, captions.

Words have Zipf frequencies, and each writer favours other words, so sources differ as topics do.
Lengths are given in tokens of the demo's tokenizer and met within a few per cent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

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
