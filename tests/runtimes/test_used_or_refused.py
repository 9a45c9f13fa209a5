"""Options of a launch that would act on nothing are refused."""

from __future__ import annotations

import pytest

import overlord as ol
from overlord.runtimes.launching.deployment import check_decoding
from overlord.runtimes.launching.service_options import ServiceOptions

MODULES = ol.ClientPlaceTree(dp=2, modules={"encoder": ol.ClientPlaceTree(dp=2)})


def by_module(buffer, tree):
    """A strategy of a user, which may ask for the mesh of a module."""
    assert tree.module("encoder").dp == 2
    return ol.strategies.backbone_balance()(buffer, tree)


@pytest.mark.parametrize("placement", ["loader", "constructor"])
def test_a_place_of_decoding_without_media_is_refused(ids_job, cache, placement):
    with pytest.raises(ol.SpecError, match=f"placement is '{placement}', and no source .* has images, clips or sounds"):
        ol.launch(ids_job, runtime="inline", cache=cache, placement=placement)
    ol.launch(ids_job, runtime="inline", cache=cache, placement="auto").close()


@pytest.mark.parametrize(
    ("strategy", "hosts", "refused"),
    [
        (ol.strategies.vlm_hybrid(), 2, True),
        (ol.strategies.curriculum([(0, "vlm_hybrid"), (9, {"vlm_hybrid": {"split": True}})]), 2, True),
        (ol.strategies.curriculum([(0, "vlm_hybrid"), (9, "hdp")]), 2, False),
        (ol.strategies.vlm_hybrid(), 1, False),
        (None, 2, False),
        (by_module, 2, False),
    ],
)
def test_decoding_in_constructors_is_refused_where_loaders_decode_all(mixed_job, cache, strategy, hosts, refused):
    options = ServiceOptions(mesh=ol.ClientPlaceTree(dp=2), cache=cache, placement="constructor", strategy=strategy)
    if not refused:
        check_decoding(mixed_job, options, hosts)
        return
    with pytest.raises(ol.SpecError, match=r"placement is 'constructor'.*on 2 hosts"):
        check_decoding(mixed_job, options, hosts)


@pytest.mark.parametrize("strategy", [None, ol.strategies.vlm_hybrid(), ol.strategies.curriculum([(0, "hdp")])])
def test_meshes_of_modules_that_no_strategy_looks_at_are_refused(ids_job, cache, strategy):
    with pytest.raises(ol.SpecError, match=r"mesh: modules has encoder.*would be ignored"):
        ol.launch(ids_job, mesh=MODULES, strategy=strategy, runtime="inline", cache=cache)
    with ol.launch(ids_job, strategy=strategy, runtime="inline", cache=cache) as service:
        with pytest.raises(ol.SpecError, match=r"mesh: modules has encoder.*would be ignored"):
            service.reshard(MODULES)
        next(service.client())


def test_a_strategy_of_the_user_may_look_at_modules(ids_job, cache):
    with ol.launch(ids_job, mesh=MODULES, strategy=by_module, runtime="inline", cache=cache) as service:
        next(service.client())
