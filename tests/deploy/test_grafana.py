"""The Grafana dashboard asks only for metrics that a service gives, and for all groups of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import overlord as ol
from overlord.runtimes.autoscaling.metrics import metrics_of

BOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
PLACED_BY_RUNS = {"overlord_steps_per_s", "overlord_wait_s", "overlord_balance"}
"""What a service gives once it has been running for a while."""


def test_it_asks_for_metrics_and_labels_that_exist(ids_job, cache):
    with ol.launch(ids_job, runtime="inline", cache=cache) as service, service.client() as client:
        next(client)
        client.report(0, {"loss": 1.0})
        status = service.status()
    status["measured"] |= {"steps_per_s": 1.0, "wait_s": 0.0, "balance": 1.0}
    families = list(metrics_of(status))
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert names >= PLACED_BY_RUNS
    asked = {name for panel in BOARD["panels"] for one in panel["targets"] for name in _metrics(one["expr"])}
    assert asked <= names, asked - names
    assert len(asked) >= 20
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    legends = {one["legendFormat"] for panel in BOARD["panels"] for one in panel["targets"]}
    assert {label for words in legends for label in re.findall(r"{{(\w+)}}", words)} <= labels | {"role", "host"}


def _metrics(expression: str) -> list[str]:
    return re.findall(r"\boverlord_\w+", expression)


def test_panels_have_places_and_sources_of_their_own():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])
    assert {one["name"] for one in BOARD["templating"]["list"]} == {"datasource", "instance"}
