"""What each host fetches, holds and packs is what the views of its ranks need, and no more."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.sharing import BAR, measure, table
from examples.demo.demo_data import media_job, write_media
from tests.conftest import slice_indices
from tests.law.test_bad_data import jpeg
from tests.runtimes.test_many_hosts import hosts_of

import overlord as ol
from overlord.core.client_messages import GetPlan, GetStatus
from overlord.core.draw import Pieces
from overlord.core.place_tree import ranks_of_host
from overlord.core.plan import plan_from_bytes
from overlord.runtimes.hosts.step_server import AttachedClients
from overlord.testing.digests import digests_of

HOSTS, STEPS = 3, 3

IDS = {"input_ids", "tokens", "input"}
MEDIA = {"pixel_values", "pixel_values_videos", "input_features"}
LABELS = {"labels", "shift_labels", "loss_mask"}
BY_CP = IDS | LABELS | {"position_ids", "positions", "attention_mask"}
INDICES = {"image_positions", "image_rows", "audio_positions", "audio_rows"}
BY_CP |= {f"meta.{name}" for name in INDICES}
ALIASES = {"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens_padded"}
"""Other names of `meta.cu_seqlens`."""

QUICK, OTHERS = "pp=2,cp=4", ["pp=4", "cp=4", "tp=4", "dp=4", "pp=4,cp=2", "pp=3,dp=2,tp=2", "dp=3,cp=2,tp=2"]
MESHES = [QUICK, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in OTHERS)]


class View(dict):
    """The arrays that a rank gets of a microbatch, and how its sequence is cut: (ranks, which of them, slicing)."""

    cut = (1, 0, "zigzag")
    place: tuple[int, int]
    """Its bucket and microbatch; the rank and -1 or -2 for what it encodes."""

    def tokens(self, samples, starts, behind=0):
        """The (sample, token) of every place of the rank's slice, or of the one so many places behind it."""
        cu, lengths = self["meta.cu_seqlens"].astype(np.int64), self["meta.origin"][4]
        of, part, slicing = self.cut
        rows = self["attention_mask"].ndim == 2 if "attention_mask" in self else False
        where = np.arange(cu[-1]) if of == 1 else slice_indices(cu, of, part, slicing, rows=rows)
        segment = np.searchsorted(cu, where, side="right") - 1
        inside = where - cu[segment] + behind
        kept = inside < lengths[segment]
        return set(zip(samples[segment[kept]].tolist(), (starts[segment] + inside)[kept].tolist(), strict=True))


def views_of(clients):
    """Take all steps with all ranks side by side: (step, rank, microbatch) -> arrays; -1 and -2 are what it encodes."""
    found = {}
    for index in range(STEPS):
        for rank, client in enumerate(clients):
            step = next(client)
            assert step.index == index
            places = [(bucket, number) for bucket in step.fetched for number in range(len(step.fetched[bucket]))]
            batches = {number: step.fetched[at[0]][at[1]] for number, at in enumerate(places)}
            encoded = {-1: step.encoder, -2: step.audio_encoder}
            batches |= {number: batch for number, batch in encoded.items() if batch is not None}
            for number, batch in batches.items():
                meta = {} if number < 0 else batch.meta._columns
                arrays = {key: value for key, value in batch.items() if isinstance(value, np.ndarray)}
                columns = {f"meta.{key}": meta[key] for key in meta.keys() & {"origin", "cu_seqlens"}}
                columns |= {f"meta.{key}": meta[key] for key in meta.keys() & INDICES}
                view = View({key: np.array(value) for key, value in (arrays | columns).items()})
                if number >= 0 and batch.meta.local_cp_size > 1:
                    view.cut = (
                        batch.meta.local_cp_size,
                        batch.meta.ranks.index(batch.meta._place.rank),
                        batch.meta.slicing,
                    )
                view.place = (rank, number) if number < 0 else places[number]
                found[index, rank, number] = view
    for client in clients:
        client.close()
    return found


def least_of(views, plans, tree, ranks, encoded=None):
    """Work out from what the ranks of a host were given: bytes fetched, most held of a step, packed.

    Images travel as large as they are in a batch, or as they are stored: `encoded` has the bytes of each row.
    """
    fetched, packed = [], 0
    for index, plan in enumerate(plans):
        arrays, tokens, loss, media = {}, set(), set(), defaultdict(int)
        for rank in ranks:
            at = tree.coords(rank)
            for (step, whose, number), view in views.items():
                if (step, whose) != (index, rank):
                    continue
                place = view.place
                for key, array in view.items():
                    if key not in ALIASES or number < 0:
                        arrays[(*place, key, at.cp if key in BY_CP else 0)] = array.nbytes
                pieces = Pieces(*np.zeros((3, 0), np.int32)) if number < 0 else plan.bin(*place)
                samples = set(pieces.sample.tolist())
                if len(pieces) and view.keys() & (IDS | LABELS):
                    tokens |= view.tokens(pieces.sample, pieces.start)
                if len(pieces) and view.keys() & LABELS:  # in place, and shifted by one
                    marks = view.tokens(pieces.sample, pieces.start) | view.tokens(pieces.sample, pieces.start, 1)
                    loss |= marks
                    tokens |= marks
                stands_in = any(view[key][0] < 0 for key in ("image_ids", "audio_ids") if key in view)
                if view.keys() & MEDIA and not stands_in:
                    rows = plan.draw.meta["row"][sorted(samples)] if encoded else ()
                    made = sum(view[key].nbytes for key in view.keys() & MEDIA)
                    media[place] = sum(encoded[row] for row in rows) if encoded else made
        fetched.append(4 * len(tokens) + len(loss))
        fetched[-1] += sum(media.values())
        packed += sum(arrays.values())
    return {"fetched_bytes": sum(fetched), "held_bytes": max(fetched), "packed_bytes": packed}


def check(views, plans, status, tree, encoded=None):
    """Compare what hosts say with what their ranks were given."""
    for host in range(HOSTS):
        ranks = ranks_of_host(host, HOSTS, tree.world_size)
        assert status["constructors"][str(host)] == least_of(views, plans, tree, ranks, encoded), (
            f"host {host} of {tree}"
        )


def shared(job, tmp_path, cache, tree, **options):
    """Run a job on three hosts of this process: views, plans and status."""
    with hosts_of(job.replace(max_steps=STEPS), tmp_path, cache, mesh=tree, hosts=HOSTS, loader_hosts=2,
                  prefetch=1, **options) as (service, planner, _):  # fmt: skip
        views = views_of([service.client(rank) for rank in range(tree.world_size)])
        plans = [plan_from_bytes(planner.role.ask(GetPlan(step)).plan) for step in range(STEPS)]
        return views, plans, planner.role.ask(GetStatus()).content


@pytest.mark.parametrize("mesh", MESHES)
def test_a_host_fetches_holds_and_packs_what_its_views_need(mixed_job, tmp_path, cache, mesh):
    tree = ol.ClientPlaceTree.parse(mesh)
    # Decoded by loaders, an image is as large on its way as in a batch.
    views, plans, status = shared(mixed_job, tmp_path, cache, tree, placement="loader")
    assert any("pixel_values" in view for view in views.values())
    check(views, plans, status, tree)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("cp=4", {"layout": ol.Layout(slicing="contiguous")}),
        ("dp=2,cp=4", {"layout": ol.Layout(slicing="whole_zigzag")}),
        ("cp=4,pp=2", {"layout": ol.Layout(keys="megatron", mtp=True)}),
        ("cp=4", {"layout": ol.Layout(rows="padded")}),
        ("dp=2,cp=4", {"strategy": ol.strategies.hdp()}),
        ("dp=3,cp=2", {"strategy": ol.strategies.backbone_balance(broadcast=("CP",))}),
        ("dp=2,cp=2,tp=2", {"strategy": ol.strategies.backbone_balance(broadcast=("DP",))}),
    ],
    ids=str,
)
def test_of_a_sequence_a_host_has_what_its_slices_hold(ids_job, tmp_path, cache, mesh, options):
    tree, job = ol.ClientPlaceTree.parse(mesh), ids_job.replace(max_steps=STEPS)
    with ol.launch(job, mesh=tree, runtime="inline", cache=cache, **options) as service:
        expected = views_of([service.client(rank) for rank in range(tree.world_size)])
    views, plans, status = shared(job, tmp_path, cache, tree, **options)
    check(views, plans, status, tree)
    every = sum(4 * int(plan.draw.meta["tokens"].sum()) for plan in plans)
    assert any(0 < one["fetched_bytes"] < every for one in status["constructors"].values())
    assert views.keys() == expected.keys()
    for at, view in views.items():
        assert view.keys() == expected[at].keys()
        assert all(np.array_equal(array, expected[at][key]) for key, array in view.items()), at


@pytest.mark.slow
def test_an_image_goes_where_it_is_encoded(mixed_job, tmp_path, cache):
    tree, strategy = ol.ClientPlaceTree(pp=2, dp=2, tp=2), ol.strategies.vlm_hybrid()
    views, plans, status = shared(mixed_job, tmp_path, cache, tree, placement="loader", strategy=strategy)
    assert any("pixel_values" in view for view in views.values())
    check(views, plans, status, tree)


@pytest.mark.parametrize("audio", [ol.costs.tokens, None])
def test_a_sound_goes_where_it_is_encoded(tmp_path, cache, audio):
    write_media(tmp_path, clips=4, sounds=8)
    tree, strategy = ol.ClientPlaceTree(pp=2, dp=2, tp=2), ol.strategies.vlm_hybrid(audio=audio)
    views, plans, status = shared(media_job(tmp_path), tmp_path, cache, tree, placement="loader", strategy=strategy)
    heard = {(number, rank) for (_, rank, number), view in views.items() if "input_features" in view}
    if audio is None:
        assert heard and all(number >= 0 and tree.coords(rank).pp == 0 for number, rank in heard)
    else:
        assert {number for number, _ in heard} == {-2}
        assert any(len(view.get("meta.audio_rows", ())) for view in views.values())
    check(views, plans, status, tree)


@pytest.mark.parametrize("placement", ["constructor", "loader"])
@pytest.mark.parametrize("audio", [ol.costs.tokens, None])
def test_all_hosts_know_which_sounds_do_not_decode(tmp_path, cache, audio, placement):
    write_media(tmp_path, clips=4, sounds=8, corrupt=2)  # one in its body, one in its header
    job, tree = media_job(tmp_path), ol.ClientPlaceTree(pp=2, dp=2, tp=2)
    strategy = ol.strategies.vlm_hybrid(audio=audio)
    options = {"placement": placement, "mesh": tree, "strategy": strategy}

    def told(service):
        clients = [service.client(rank) for rank in range(tree.world_size)]
        steps = ([next(client) for client in clients] for _ in range(STEPS))
        return [[(one.global_loss_tokens, digests_of(one)) for one in step] for step in steps]

    with ol.launch(job, runtime="inline", cache=cache, **options) as service:
        expected = told(service)
        planned = [service.plan_raw(step).global_loss_tokens for step in range(STEPS)]
    assert any(labels > step[0][0] for labels, step in zip(planned, expected, strict=True)), "some do not decode"
    with hosts_of(job, tmp_path / "hosts", cache, hosts=HOSTS, loader_hosts=2, **options) as (service, *_):
        assert told(service) == expected


@pytest.fixture(scope="module")
def pictures(tmp_path_factory, demo_files):
    """Images of many sizes, some of which do not decode; and the bytes of each row."""
    folder = tmp_path_factory.mktemp("pictures")
    files = [jpeg(48 + 8 * (seed % 5), 64, seed) for seed in range(60)]
    files = [one[: len(one) // 3] if i % 4 == 0 else one for i, one in enumerate(files)]
    pq.write_table(pa.table({"jpg": files, "txt": ["a picture of something"] * 60}), folder / "p.parquet")
    source = ol.Source("p", str(folder / "p.parquet"), sample=ol.ImageText("jpg", "txt"), tolerance=1)
    job = ol.Job(sources=[source], tokenizer=str(demo_files.tokenizer), batch=ol.Batch(256, global_samples=12))
    return job, [len(one) for one in files]


@pytest.mark.parametrize("keys", ["hf", "megatron"])
@pytest.mark.slow
def test_stages_without_images_know_which_of_them_decode(pictures, tmp_path, cache, keys, monkeypatch):
    """The first stage decodes them, and only it has them: the others are told which samples count in the loss."""
    # What is packed for a rank that is not attached yet, to know what decodes, is packed for it again when it comes.
    wanted, ranks = AttachedClients.wanted, set()
    take = AttachedClients.take
    monkeypatch.setattr(AttachedClients, "take", lambda self, rank, *at: (ranks.add(rank), take(self, rank, *at))[1])
    monkeypatch.setattr(AttachedClients, "wanted", lambda self: wanted(self) if len(ranks) == 6 else {})
    job, encoded = pictures
    tree, layout = ol.ClientPlaceTree(pp=3, dp=2), ol.Layout(keys=keys, positions="mrope")
    options = {"placement": "constructor", "layout": layout}
    with ol.launch(job, mesh=tree, runtime="inline", cache=cache, **options) as service:
        clients = [service.client(rank) for rank in range(tree.world_size)]
        expected = [[_told(next(client)) for client in clients] for _ in range(STEPS)]
    views, plans, status = shared(job, tmp_path, cache, tree, **options)
    check(views, plans, status, tree, encoded)
    assert not any("pixel_values" in view for (_, rank, _), view in views.items() if tree.coords(rank).pp)
    with hosts_of(job, tmp_path / "again", cache, mesh=tree, hosts=HOSTS, loader_hosts=2, **options) as (service, *_):
        clients = [service.client(rank) for rank in range(tree.world_size)]
        assert [[_told(next(client)) for client in clients] for _ in range(STEPS)] == expected
    lost = [plan.global_loss_tokens - step[0][0] for plan, step in zip(plans, expected, strict=True)]
    assert all(labels > 0 for labels in lost), "every step has images that do not decode"


def _told(step):
    return step.global_loss_tokens, [(batch.meta.loss_tokens, batch.digest()) for batch in step.microbatches]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mesh", ["pp=4,dp=3", "pp=3,cp=4", "cp=2,tp=3"])
def test_it_holds_on_three_ray_nodes(mixed_job, cache, ray_address, mesh):
    tree = ol.ClientPlaceTree.parse(mesh)
    options = {"address": ray_address, "ranks_per_host": tree.world_size // HOSTS, "prefetch": 1}
    job = mixed_job.replace(max_steps=STEPS)
    with ol.launch(job, mesh=tree, runtime="ray", cache=cache, placement="loader", **options) as service:
        views = views_of([service.client(rank) for rank in range(tree.world_size)])
        plans = [service.plan_raw(step) for step in range(STEPS)]
        status = service.status()
    assert len({one["node"] for one in status["ray"]["placement"] if one["role"].startswith("constructor")}) == HOSTS
    check(views, plans, status, tree)


def test_the_documented_table_is_what_is_measured():
    found = measure()
    assert "\n".join(table(found)) in (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    apart, shared = found[4, 4]
    assert shared < BAR * apart
