"""The state of a stream: what a checkpoint holds. Small, JSON, versioned, keyed by source name, no rank in it.

Rules of this file:
1. A state describes the stream before a step; nothing in it depends on ranks, loaders or time.
2. A state carries the parts of its stream fingerprint, so that a refusal can say what differs.
3. A source keeps its number for as long as its stream lives: numbers decide ties in the draw.
4. A state carries a checksum of its content. It is checked when a state is given to a launch. Inside the service
   states are edited (for example reconciled with another job) and the checksum is ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from overlord.core.order import BEGIN, NO_GROUP
from overlord.core.samples import Cursor
from overlord.core.spec_errors import is_finite, is_whole, list_some
from overlord.errors import StateError

STATE_VERSION = 4
"""Also that of the order of a source, which cursors are positions in."""

Int64s = npt.NDArray[np.int64]
P = ParamSpec("P")
R = TypeVar("R")

_COLUMNS = (
    "epoch", "group", "offset", "deficit", "samples", "tokens", "skipped", "passed", "epoch_rows", "finished", "start",
)  # fmt: skip
_LEAST_COLUMNS = list(_COLUMNS[:-1])
"""The columns of a state in which no sample is drawn in part, and of those saved before there was such a column."""


_MOST = (1 << 63) - 1
_RANGES = {"epoch": (0, (1 << 31) - 1), "group": (BEGIN, _MOST), "deficit": (-_MOST, _MOST), "finished": (0, 1)}
"""Least and most of a column; the others count from 0 on."""


def reads_records(read: Callable[P, R]) -> Callable[P, R]:
    """Let a function that reads the records of a journal raise a StateError where one is not what a service writes.

    Checksums find accidents. A record that was made to fit its checksum may still lack a field, or hold another kind of
    value in it.
    """

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise StateError(
                f"a record of the store's journal is none that a service writes ({type(error).__name__}: {error}); the "
                "stream cannot be continued from it. Use a store that nothing else has written to, or launch from a "
                "state that you saved."
            ) from error

    return reading


@dataclass(frozen=True, slots=True)
class StreamState:
    """The position of every source before `step`: parallel arrays over the job's sources."""

    step: int
    epoch: Int64s
    group: Int64s
    offset: Int64s
    deficit: Int64s
    """What the source is owed, in fixed point (drawing.SCALE is one sample or token)."""
    samples: Int64s
    """Drawn since the beginning."""
    tokens: Int64s
    skipped: Int64s
    """Rows skipped since the beginning by filters and overlength drops."""
    passed: Int64s
    """Rows passed in the current epoch, drawn or skipped."""
    epoch_rows: Int64s
    """Rows of a whole epoch; 0 until the first one ended."""
    finished: Int64s
    """1 when the source has left the mixture."""
    start: Int64s
    """Tokens of the sample at the cursor that earlier steps have drawn: it is split over steps."""
    mixer: Mapping[str, Any] | None = None
    """The state of a mixture that learns, or was changed while running; JSON."""

    @classmethod
    def begin(cls, num_sources: int) -> StreamState:
        """Return the state of a stream that has not begun."""
        columns = {name: np.zeros(num_sources, np.int64) for name in _COLUMNS}
        columns["group"][:] = BEGIN
        return cls.of(0, [columns[name] for name in _COLUMNS], None)

    @classmethod
    def of(cls, step: int, columns: Sequence[Int64s], mixer: Mapping[str, Any] | None) -> StreamState:
        """Return a state from its arrays, in the order of the fields."""
        return cls(step, **dict(zip(_COLUMNS, columns, strict=True)), mixer=mixer)  # type: ignore[arg-type]

    def cursor(self, source: int) -> Cursor:
        """Return the cursor of one source."""
        return Cursor(int(self.epoch[source]), int(self.group[source]), int(self.offset[source]))

    def grown(self, num_sources: int) -> StreamState:
        """Return the state extended by further sources, each at its beginning and owed nothing."""
        more = num_sources - len(self.epoch)
        if not more:
            return self
        fresh = StreamState.begin(more)
        columns = [np.concatenate([getattr(self, name), getattr(fresh, name)]) for name in _COLUMNS]
        return StreamState.of(self.step, columns, self.mixer)

    def rows_since(self, before: StreamState, names: Sequence[str]) -> dict[str, list[int]]:
        """Return the rows of the sources that differ from those of an older state, by name."""
        now, old = (np.stack([getattr(one, name) for name in _COLUMNS], axis=1) for one in (self, before))
        return {names[at]: now[at].tolist() for at in np.flatnonzero((now != old).any(axis=1)).tolist()}

    @reads_records
    def with_rows(
        self, rows: Mapping[str, Sequence[int]], names: Sequence[str], mixer: Mapping[str, Any] | None
    ) -> StreamState:
        """Return the state behind the next step, from what `rows_since` returned then."""
        places = [names.index(name) for name in rows]
        after = self.grown(max([len(self.epoch), *(place + 1 for place in places)])).copy()
        for column, values in zip(_COLUMNS, zip(*rows.values(), strict=True), strict=False):
            getattr(after, column)[places] = values
        return dataclasses.replace(after, step=self.step + 1, mixer=mixer)

    def copy(self) -> StreamState:
        """Return a copy with writable arrays of its own."""
        return StreamState.of(self.step, [getattr(self, name).copy() for name in _COLUMNS], self.mixer)

    def to_json(
        self,
        names: Sequence[str],
        parts: Mapping[str, Any],
        reports: Mapping[int, Any],
        changes: Sequence[Mapping[str, Any]] = (),
        verdicts: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the state as a JSON-able dictionary.

        "verdicts" is left out when there are none, "order" when the sources are numbered by name.
        """
        columns = list(_COLUMNS) if self.start.any() else _LEAST_COLUMNS
        table = np.stack([getattr(self, name) for name in columns], axis=1).tolist()
        state = {
            "version": STATE_VERSION,
            "step": self.step,
            "fingerprint": dict(parts),
            "columns": columns,
            "sources": dict(zip(names, table, strict=True)),
            "reports": {str(step): report for step, report in reports.items()},
            "changes": list(changes),
            "mixer": self.mixer,
        }
        if list(names) != sorted(names):
            state["order"] = list(names)  # a JSON writer may sort the keys of "sources"
        return sealed({**state, "verdicts": dict(verdicts)} if verdicts else state)

    @classmethod
    def from_json(cls, state: Mapping[str, Any], names: Sequence[str], parts: Mapping[str, Any]) -> StreamState:
        """Read a state; refuse one of another version or another job."""
        check_state(state, parts)
        width = len(state["columns"])
        for name in names:
            _check_row(name, state["sources"][name], width)
        rows = np.zeros((len(names), len(_COLUMNS)), np.int64)
        rows[:, :width] = [state["sources"][name] for name in names]
        return cls.of(state["step"], [rows[:, i].copy() for i in range(len(_COLUMNS))], state["mixer"])


def check_state(state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Raise StateError when a state cannot continue this job's stream."""
    check_form(state)
    differences = describe_differences(state["fingerprint"], parts)
    if differences:
        raise StateError(
            "the state belongs to another stream: "
            + "; ".join(differences)
            + ". Resuming would lose or repeat samples silently. Restore the job, or start anew without state. Sources "
            "may come and go with reconcile='allow_add' or 'allow_add_remove'."
        )
    known = state.get("columns") in (list(_COLUMNS), _LEAST_COLUMNS)
    if not known or set(state["sources"]) != set(parts.get("sources", state["sources"])):
        raise _damaged("the columns or names of its table of sources do not match the job")


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the checksum of its content.

    Example:
        >>> sealed({"step": 7}) == sealed(sealed({"step": 7}))
        True
    """
    return {**state, "checksum": _checksum(state)}


def check_seal(state: Mapping[str, Any]) -> None:
    """Raise StateError for anything but an unedited state of this version."""
    _check_version(state)
    if "checksum" not in state:
        raise _no_state("checksum")
    try:
        found = _checksum(state)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _damaged(f"it is not JSON ({error!s:.80})") from None
    if state["checksum"] != found:
        raise _damaged(
            f"its checksum is {state['checksum']!r:.80}, that of its content {found!r}: it was edited or cut"
        )


def _checksum(state: Mapping[str, Any]) -> str:
    # A round trip first: keys that are numbers become strings, and must be sorted as strings.
    plain = json.loads(json.dumps({key: value for key, value in state.items() if key != "checksum"}))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check_version(state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping) or "version" not in state:
        raise _no_state("version")
    if state["version"] != STATE_VERSION:
        raise StateError(
            f"the state has version {state['version']!r:.80}, this overlord reads version {STATE_VERSION}; resuming "
            "would misread its cursors. Resume with the overlord that wrote it, or start anew without state."
        )


def check_form(state: Mapping[str, Any]) -> None:
    """Raise StateError for anything that is not a well-formed state of this version, of any job."""
    _check_version(state)
    for key in ("step", "fingerprint", "sources", "reports", "changes", "mixer"):
        if key not in state:
            raise _no_state(key)
    for key in ("fingerprint", "sources", "reports"):
        if not isinstance(state[key], Mapping):
            raise _damaged(f"{key} is {state[key]!r:.80}")
    digests = state["fingerprint"].get("sources")
    if not isinstance(digests, Mapping):
        raise _damaged(f"the sources of its fingerprint are {digests!r:.80}")
    if not is_whole(state["step"], 0, _MOST):
        raise _damaged(f"step is {state['step']!r:.80}")
    if state["mixer"] is not None and not isinstance(state["mixer"], Mapping):
        raise _damaged(f"mixer is {state['mixer']!r:.80}")
    for step, report in state["reports"].items():
        known = isinstance(report, Mapping) and all(is_finite(v) for v in report.values())
        if not str(step).isdecimal() or not known:
            raise _damaged(f"the report of step {step!r:.80} is {report!r:.80}")
    if not isinstance(state["changes"], Sequence) or not all(_is_change(one) for one in state["changes"]):
        raise _damaged(f"changes are {state['changes']!r:.80}")
    order = state.get("order", [])
    if not isinstance(order, list) or (order and sorted(map(str, order)) != sorted(state["sources"])):
        raise _damaged(f"order is {order!r:.80}, not the names of its sources")


def _is_change(given: Any) -> bool:
    if not isinstance(given, Mapping) or not is_whole(given.get("at"), 0, _MOST):
        return False
    return isinstance(given.get("mixture", None if given.get("kind") == "mixture" else {}), Mapping)


def names_of(state: Mapping[str, Any]) -> list[str]:
    """Return the names of a state's sources, in the order of their numbers."""
    return list(state.get("order") or state["sources"])


def restricted_parts(parts: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a fingerprint restricted to some of the sources."""
    known = set(names)
    found = {**parts, **{key: {n: v for n, v in parts[key].items() if n in known} for key in ("weights", "sources")}}
    if "sequence" in parts["mixture"]:
        found["mixture"] = {**parts["mixture"], "sequence": [n for n in parts["mixture"]["sequence"] if n in known]}
    return found


def _no_state(missing: str) -> StateError:
    return StateError(
        f"this is not a state of overlord: it has no {missing!r}; resuming from it would start an unknown stream. Pass "
        "what client.state_dict() returned."
    )


def _check_row(name: str, row: Any, width: int) -> None:
    if not isinstance(row, Sequence) or len(row) != width:
        raise _damaged(f"the row of source {name!r} is {row!r:.80}, not {width} numbers")
    for column, value in zip(_COLUMNS, row, strict=False):
        least, most = _RANGES.get(column, (0, _MOST))
        if not is_whole(value, least, most) or (column == "group" and value == NO_GROUP):
            raise _damaged(f"{column} of source {name!r} is {value!r:.80}")


def _damaged(what: str) -> StateError:
    return StateError(
        f"the state is damaged: {what}; resuming would start at wrong rows. Use an undamaged state, as "
        "client.state_dict() returned it."
    )


IN_TIME = (
    "{name} was {old}, is now {new}",
    "{name} was {old}, is now missing",
    "{name} is new ({new})",
    "missing sources: {names}",
    "new sources: {names}",
)
"""Wording of a difference: another value, only in the first, only in the second; sources only in either."""

_LONGEST_VALUE = 160


def describe_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "", words: Sequence[str] = IN_TIME
) -> list[str]:
    """Describe the differences between two fingerprints.

    Example:
        >>> describe_differences({"seed": 0, "sources": {"a": "1:2"}}, {"seed": 1, "sources": {"a": "1:3"}})
        ['seed was 0, is now 1', "the files of source 'a' differ"]
    """
    found: list[str] = []
    for key in sorted(set(old) | set(new)):
        one, other = old.get(key), new.get(key)
        both = key in old and key in new
        if both and isinstance(one, Mapping) and isinstance(other, Mapping):
            if key == "sources" and not prefix:
                found.extend(_describe_sources(one, other, words))
                continue
            names = [parts.get("sources") for parts in (old, new)]  # of any type, in a state that was edited
            if key == "weights" and not prefix and all(isinstance(each, Mapping) for each in names):
                # The weight of a source that is missing or new is no difference of its own.
                kept = set(names[0] or ()) & set(names[1] or ())
                one, other = ({n: w for n, w in weights.items() if n in kept} for weights in (one, other))
            found.extend(describe_differences(one, other, f"{prefix}{key}.", words))
        elif key == "module" and prefix.startswith("hooks.") and not both:
            continue  # older states do not tell the modules of hooks, and hooks of scripts have none
        elif both and one != other and key == "tokenizer" and not prefix:
            found.append("the tokenizers differ")
        elif not both or one != other:
            told = words[1 if key not in new else 2 if key not in old else 0]
            found.append(told.format(name=f"{prefix}{key}", old=_brief(one), new=_brief(other)))
    return found


def _describe_sources(old: Mapping[str, Any], new: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Describe the differences between the sources of two fingerprints, whose values are digests."""
    gone, fresh = ([name for name in these if name not in others] for these, others in ((old, new), (new, old)))
    found = [
        told.format(names=list_some(sorted(names))) for told, names in ((words[3], gone), (words[4], fresh)) if names
    ]
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            (how, _, _), (how_now, _, _) = (str(digests[name]).partition(":") for digests in (old, new))
            found.append(
                f"the files of source {name!r} differ" if how == how_now else f"source {name!r} is read in another way"
            )
    return found


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} .."
