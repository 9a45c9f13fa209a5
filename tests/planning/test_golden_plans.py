"""Golden plans: where pieces go must never change by accident, on any machine. A change goes into the CHANGELOG."""

from __future__ import annotations

import numpy as np
import pytest

import overlord as ol
from overlord.planning.checking import run_strategy

TREE = ol.ClientPlaceTree(dp=4, cp=2, tp=2)
OFFLOAD = ol.costs.Offload(
    layers=32, act_bytes_per_token=153_000, bandwidth=150e9, time=ol.costs.CostModel(alpha=1.55e-8, beta=4.8e-4)
)
STRATEGIES = {
    "vanilla": ol.strategies.vanilla(),
    "lockstep": ol.strategies.backbone_balance(),
    "sum": ol.strategies.backbone_balance(objective="sum", level="inter", reorder=True),
    "pipeline": ol.strategies.backbone_balance(objective="pipeline"),
    "intra": ol.strategies.backbone_balance(level="intra"),
    "karmarkar_karp": ol.strategies.backbone_balance(method="karmarkar_karp"),
    "zigzag": ol.strategies.backbone_balance(method="zigzag", group_size=2),
    "long_short": ol.strategies.long_short(threshold=1000),
    "vlm": ol.strategies.vlm_hybrid(split=True, broadcast=("TP",)),
    "hdp": ol.strategies.hdp(),
    "hdp equal": ol.strategies.hdp(equal_counts=True),
    "hdp lockstep": ol.strategies.hdp(objective="lockstep"),
    "hdp any": ol.strategies.hdp(blocks="any"),
    "hdp any equal": ol.strategies.hdp(blocks="any", equal_counts=True),
    "hdp pipelines": ol.strategies.hdp(blocks="any"),
    "hdp offload": ol.strategies.hdp(offload=OFFLOAD),
    "hdp offload equal": ol.strategies.hdp(offload=OFFLOAD, blocks="any", equal_counts=True),
}
TREES = {
    "hdp any": ol.ClientPlaceTree(cp=6),
    "hdp any equal": ol.ClientPlaceTree(dp=2, cp=6),
    "hdp pipelines": ol.ClientPlaceTree(pp=2, dp=2, cp=6, vpp=2, microbatch_group=4),
    "hdp offload": ol.ClientPlaceTree(dp=2, cp=4),
    "hdp offload equal": ol.ClientPlaceTree(dp=2, cp=6),
}
GOLDEN = {
    "vanilla": "7917a9556d00766188126ee73862f59f",
    "lockstep": "21f881931b6618a24364836d7e300d35",
    "sum": "5808a446a79b2f88fecd7e7a376e3b3e",
    "pipeline": "93fb44370a89152a60b81673291f517e",
    "intra": "a8cef257ed9290e20bd1579b636d6abc",
    "karmarkar_karp": "156becdd63a23f80833ea5b4cf52ccaf",
    "zigzag": "252d12c137578989b2af71344c92dd67",
    "long_short": "54688c3f30e9f81ba7d35203ff11bf5e",
    "vlm": "a290bdbc631f177d094754ad6c46ab87",
    "hdp": "53046010cf09caf4eda5700b381fdc9f",
    "hdp equal": "38d9020a33780073cf7e2e152ec6fc92",
    "hdp lockstep": "38d9020a33780073cf7e2e152ec6fc92",
    "hdp any": "289d20087bf4d919334ea5f652c74b3f",
    "hdp any equal": "575ec85eb95352e9a1d704687425bac8",
    "hdp pipelines": "3e5f1bf5232c565c5ee13e54ae11e420",
    "hdp offload": "d998ddaddf729f0086af86ed28d23b27",
    "hdp offload equal": "94e055e7a0927b53aee856dcb71756ea",
}


def buffer():
    """Lengths from integer arithmetic alone: no random generator of any numpy version is asked."""
    steps = np.arange(1, 401)
    text = steps * steps * 7919 % 4093 + steps % 13 + 1
    images = steps[:120] * 104729 % 700 + 4
    return ol.summary_buffer(
        {
            "web": text,
            "coyo": {"tokens": images + steps[:120] % 31 + 1, "images": np.ones(120, int), "image_tokens": images},
        },
        context_length=4096,
        microbatch_tokens=8192,
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_golden_plan(name):
    plan = run_strategy(STRATEGIES[name], buffer(), TREES.get(name, TREE))
    assert plan.digest == GOLDEN[name]
