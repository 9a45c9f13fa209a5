"""The panel of repeated sources: marks stand at the right steps, and the alarm comes when its three signs agree."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from overlord.reports.repetition_panel import shown_repetition

STEPS = list(range(0, 2000, 10))


def series(value_at) -> dict[str, list[float]]:
    return {"step": STEPS, "mean": [float(value_at(step)) for step in STEPS]}


def history(*, epochs=20.0, held_out=0.5, trained=-0.5, spread=0.5) -> dict[str, Any]:
    """A run in which a source is read so often; losses and spread change by so much from the fourth epoch on."""

    def moved(begin, by):
        fourth = 2000 * 4 / epochs
        return series(lambda step: begin + by * max(0.0, step - fourth) / (2000 - fourth) if epochs > 4 else begin)

    return {
        "measured": {"epochs/math": series(lambda step: epochs * step / 2000), "share/math": series(lambda _: 0.5)},
        "reports": {
            "loss/math": moved(2.0, trained),
            "heldout/math": moved(2.2, held_out),
            "loss/web": series(lambda _: 2.0),
            "alpha/std": moved(0.3, spread * 0.3),
        },
        "changes": [],
    }


def test_marks_stand_where_sources_pass_four_and_sixteen_epochs():
    shown = shown_repetition(history())
    assert shown["marks"] == [
        {"step": 400, "source": "math", "epochs": 4},
        {"step": 1600, "source": "math", "epochs": 16},
    ]
    assert list(shown["losses"]) == ["loss/math", "heldout/math"] and list(shown["spread"]) == ["alpha/std"]
    assert shown["worth"]["math"] == pytest.approx(11.9, abs=0.1) and shown["left_out"] == 0


def test_a_source_that_was_not_repeated_is_not_shown():
    shown = shown_repetition({"measured": {"share/a": series(lambda _: 1)}, "reports": {}, "changes": []})
    assert shown["epochs"] == shown["losses"] == shown["spread"] == {} and shown["marks"] == shown["warnings"] == []


SIGNS = {"epochs": (20.0, 15.0), "held_out": (0.5, -0.1), "trained": (-0.5, 0.1), "spread": (0.5, 0.2)}


@pytest.mark.parametrize("present", list(itertools.product((True, False), repeat=4)))
def test_the_alarm_needs_all_signs(present):
    values = {name: SIGNS[name][0 if there else 1] for name, there in zip(SIGNS, present, strict=True)}
    warnings = shown_repetition(history(**values))["warnings"]
    assert len(warnings) == all(present)
    if warnings:
        assert warnings[0].startswith("math was read 19.9 times, worth 11.9. Since its fourth epoch, at step 400,")


@pytest.mark.parametrize("missing", ["loss/math", "heldout/math", "alpha/std"])
def test_a_sign_that_is_not_reported_is_no_sign(missing):
    whole = history()
    del whole["reports"][missing]
    assert shown_repetition(whole)["warnings"] == []


def test_the_alarm_comes_at_the_step_at_which_the_last_sign_does():
    whole, first = history(), None
    for count in range(1, len(STEPS)):
        so_far = {
            kind: {name: {key: values[:count] for key, values in line.items()} for name, line in whole[kind].items()}
            for kind in ("measured", "reports")
        }
        if shown_repetition(so_far | {"changes": []})["warnings"]:
            first = STEPS[count - 1]
            break
    # Sixteen epochs are at step 1,600, and the spread has grown by a third two thirds of the way from 400 to 2,000.
    assert first == 1600
