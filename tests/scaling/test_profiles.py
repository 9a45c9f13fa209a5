"""Profiles as files and figures: round trips, damage, refusals, and how running figures move them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.scaling.profiles import (
    MOST_ENTRIES,
    MOST_OLD_WEIGHT,
    Entry,
    Profile,
    Running,
    SourceProfile,
    Spread,
    _checksum,
    cost_digest,
)

amounts = st.floats(1e-7, 1e3)


def source(name: str = "web", **changes: Any) -> SourceProfile:
    values: dict[str, Any] = {
        "name": name,
        "digest": "how:files:tokens",
        "samples": 200,
        "transform": Spread.of([0.001, 0.002, 0.006]),
        "read_s": 0.001,
        "measure_s": 0.0015,
        "finish_s": 0.0005,
        "handover_s": 1e-5,
        "file_bytes": 4000,
        "buffer_bytes": 1 << 20,
        "tokens": 512.5,
        "read_bytes": 3000.0,
        "kept_bytes": 2000.0,
        "delivered_bytes": 2500.0,
        "entries": (Entry("2030-01-01T00:00:00+00:00", "measured", 200, 0.003),),
    }
    return SourceProfile(**values | changes)


@st.composite
def sources(draw: st.DrawFn) -> SourceProfile:
    return source(
        draw(st.text(min_size=1, max_size=12)),
        samples=draw(st.integers(1, 10**9)),
        transform=Spread.of(draw(st.lists(amounts, min_size=1, max_size=6))),
        file_bytes=draw(st.integers(0, 2**50)),
        tokens=draw(amounts),
        cpu_share=draw(st.floats(0.0, 1.0)),
        decoded_in=draw(st.sampled_from(["", "loader", "constructor"])),
    )


@given(st.lists(sources(), max_size=3, unique_by=lambda one: one.name))
def test_what_is_written_is_read_again(found: list[SourceProfile]) -> None:
    profile = Profile(tuple(found))
    assert Profile.from_json(profile.to_json(), "x.profile.json") == profile


@given(st.lists(amounts, min_size=1, max_size=200))
def test_a_spread_is_in_order(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.quantiles[0] == min(values) and spread.quantiles[-1] == spread.max == max(values)
    assert list(spread.quantiles) == sorted(spread.quantiles)
    assert spread.p50 <= spread.p90 <= spread.p99 <= spread.max
    assert spread.scaled(3.0).p90 == pytest.approx(3 * spread.p90)


def test_a_cost_is_what_the_partition_takes() -> None:
    profile = Profile((source("web"), source("code", tokens=7.0)))
    cost = profile.cost("code")
    assert (cost.name, cost.transform_s, cost.tokens) == ("code", pytest.approx(0.003), 7.0)
    assert (cost.file_bytes, cost.buffer_bytes, cost.handover_s) == (4000, 1 << 20, 1e-5)
    assert cost.cpu_share == 1.0 and source(cpu_share=0.25).cost.cpu_share == 0.25
    with pytest.raises(ol.SpecError, match=r"'books' is not in the profile.*overlord profile"):
        profile.cost("books")


def test_a_file_of_before_cpu_shares_is_read_as_one_that_only_computes() -> None:
    whole = json.loads(Profile((source("web"),)).to_json())
    del whole["sources"]["web"]["cpu_share"]
    whole["checksum"] = _checksum(whole["sources"])
    assert Profile.from_json(json.dumps(whole), "x.profile.json") == Profile((source("web"),))


# ---- damage

WHOLE = Profile((source("web"), source("code"))).to_json()


@given(st.integers(0, len(WHOLE) - 1), st.characters(codec="ascii", exclude_categories=["Cc"]))
def test_no_change_of_a_file_goes_unseen(at: int, letter: str) -> None:
    changed = WHOLE[:at] + letter + WHOLE[at + 1 :]
    try:
        read = Profile.from_json(changed, "job.profile.json")
    except ol.SpecError as error:
        assert "job.profile.json" in str(error) and "overlord profile" in str(error)
    else:
        assert read == Profile.from_json(WHOLE, "x")  # white space


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '{"sources": {}}', WHOLE[: len(WHOLE) // 2]])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ol.SpecError, match=r"job\.profile\.json is damaged.*overlord profile"):
        Profile.from_json(text, "job.profile.json")


def test_another_version_is_named() -> None:
    newer = json.dumps(json.loads(WHOLE) | {"version": 2})
    with pytest.raises(ol.SpecError, match="version 2, and this overlord reads version 1"):
        Profile.from_json(newer, "job.profile.json")


# ---- refusals


def web(**changes: Any) -> ol.Source:
    return ol.Source(**{"name": "web", "path": "data/web/*.parquet", "sample": ol.Text("text")} | changes)


def test_a_digest_follows_what_decides_the_cost() -> None:
    def digest(source: ol.Source, listing: str = "l", tokenizer: str = "t", placement: str = "auto") -> str:
        return cost_digest(source, listing, tokenizer, placement)

    same = digest(web())
    assert digest(web(weight=3.0, tolerance=0.5)) == same
    others = [
        digest(web(path="elsewhere/*.parquet")),
        digest(web(sample=ol.Text("body"))),
        digest(web(lengths="n")),
        digest(web(), listing="other"),
        digest(web(), tokenizer="other"),
        digest(web(), placement="loader"),
    ]
    assert len({same, *others}) == 7


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ("HOW:files:tokens", "how its samples are made"),
        ("how:FILES:tokens", "its files changed"),
        ("how:files:TOKENS", "the tokenizer changed"),
    ],
)
def test_a_changed_source_is_refused_with_what_changed(now: str, words: str) -> None:
    profile = Profile((source("web"), source("code")))
    profile.check({"web": "how:files:tokens", "code": "how:files:tokens"})
    profile.check({"code": "how:files:tokens"})  # a source that is gone does not matter
    with pytest.raises(ol.SpecError, match=f"source 'code' is not what was profiled: .*{words}.*overlord profile"):
        profile.check({"web": "how:files:tokens", "code": now})


def test_a_source_that_was_never_measured_is_named() -> None:
    with pytest.raises(ol.SpecError, match=r"source 'books' is not in the profile.*overlord profile"):
        Profile((source("web"),)).check({"web": "how:files:tokens", "books": "x:y:z"})


# ---- refreshing


@given(st.integers(1, 10**7), st.integers(1, 10**6), amounts)
def test_a_refresh_moves_toward_the_run_and_not_past_it(old: int, new: int, per_sample: float) -> None:
    before = source(samples=old, cpu_share=0.25)
    running = {"web": Running(new, new * per_sample, 0.5 * new * per_sample)}
    after = Profile((before,)).refreshed(running, "t", "refreshed at step 9").sources[0]
    low, high = sorted((before.transform_s, per_sample))
    assert low * (1 - 1e-9) <= after.transform_s <= high * (1 + 1e-9)
    if new >= 100 * MOST_OLD_WEIGHT:  # what a long run saw wins, whatever was known before
        assert abs(after.transform_s - per_sample) <= 0.01 * abs(before.transform_s - per_sample) + 1e-12
    assert after.read_s + after.measure_s + after.finish_s == pytest.approx(after.transform_s)
    assert after.transform.p99 / before.transform.p99 == pytest.approx(after.transform_s / before.transform_s)
    assert after.samples == old + new
    assert after.entries == (*before.entries, Entry("t", "refreshed at step 9", new, after.transform_s))
    assert 0.25 * (1 - 1e-9) <= after.cpu_share <= 0.5 * (1 + 1e-9)
    assert (after.digest, after.buffer_bytes, after.handover_s) == (before.digest, before.buffer_bytes, 1e-5)


def test_a_refresh_leaves_what_did_not_run() -> None:
    profile = Profile((source("web"), source("code")))
    running = {"web": Running(0, 0.0, 0.0), "other": Running(10, 1.0, 1.0)}
    assert profile.refreshed(running, "t", "x") == profile


def test_a_journal_is_bounded_and_keeps_its_first_line() -> None:
    profile = Profile((source(),))
    for step in range(100):
        profile = profile.refreshed({"web": Running(10, 0.02, 0.02)}, "t", f"refreshed at step {step}")
    entries = profile.sources[0].entries
    assert len(entries) == MOST_ENTRIES
    assert [entry.what for entry in entries][:: MOST_ENTRIES - 1] == ["measured", "refreshed at step 99"]


def test_measuring_again_goes_on_in_the_journal_of_the_same_source() -> None:
    again = (Entry("t2", "measured", 50, 0.1),)
    before = Profile((source("web"), source("code"), source("books")))
    after = before.joined(Profile((source("web", entries=again), source("code", digest="n:e:w", entries=again))))
    assert after.names == ["web", "code", "books"]
    web, code, books = after.sources
    assert [entry.when[:2] for entry in web.entries] == ["20", "t2"]
    assert code.entries == again  # figures of other files say nothing about these
    assert books == before.sources[2]
