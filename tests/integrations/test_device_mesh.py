"""torch's DeviceMesh as a ClientPlaceTree, with the dimension names of torchtitan."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from overlord.core.place_tree import ClientPlaceTree
from overlord.errors import SpecError


def mesh_of(grid: torch.Tensor, *names: str) -> DeviceMesh:
    """Return a mesh that needs no process group."""
    return DeviceMesh("cpu", grid, mesh_dim_names=names, _init_backend=False, _rank=0)


def tree_of(**dims: int) -> ClientPlaceTree:
    world = torch.arange(torch.Size(dims.values()).numel()).view(*dims.values())
    return ClientPlaceTree.from_device_mesh(mesh_of(world, *dims))


@pytest.fixture
def sixteen_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("sixteen_ranks")
def test_the_meshes_of_torchtitan() -> None:
    dense = init_device_mesh("cpu", (2, 2, 2, 1, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    tree = ClientPlaceTree.from_device_mesh(dense)
    assert tree == ClientPlaceTree(pp=2, dp=4, tp=2, dp_replicate=2)
    at = tree.coords(dist.get_rank())
    assert [at.pp, *divmod(at.dp, tree.dp_shard), at.cp, at.tp] == list(dense.get_coordinate() or [])
    loading = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", "batch", "cp", "tp"))
    tree = ClientPlaceTree.from_device_mesh(loading)
    assert tree == ClientPlaceTree(pp=2, dp=2, cp=2, tp=2)
    tree.check_world_size(dist.get_world_size())
    assert tree.consumers("TP", tree.bucket_of("TP", 5)) == loading["pp"].mesh.tolist()
    with pytest.raises(SpecError, match=r"\(cp=2, tp=2\): its place 0 holds rank 4.*mesh of all ranks, 0 to 3"):
        ClientPlaceTree.from_device_mesh(loading["cp", "tp"])


def test_names_of_other_trainers() -> None:
    assert tree_of(dp=4, tp=2) == ClientPlaceTree(dp=4, tp=2)
    assert tree_of(fsdp=4) == ClientPlaceTree(dp=4)
    assert tree_of(pp=2, dp_replicate=1, dp_shard=2, ulysses=2, cp=3, tp=2) == ClientPlaceTree(pp=2, dp=2, cp=6, tp=2)
    assert tree_of(dp_shard=2, sp=4) == ClientPlaceTree(dp=2, cp=4)
    assert tree_of(dp_replicate=2, dp_shard=2, ep=2) == ClientPlaceTree(dp=8, dp_replicate=2, ep=2)
    assert tree_of(dp=1) == ClientPlaceTree()


def test_the_order_of_ranks_is_seen() -> None:
    assert tree_of(tp=2, dp=4) == ClientPlaceTree(dp=4, tp=2, order="pp-cp-tp-dp")
    turned = mesh_of(torch.arange(8).view(2, 4).T.contiguous(), "dp", "tp")
    tree = ClientPlaceTree.from_device_mesh(turned)
    assert tree.order == "pp-cp-tp-dp"
    assert tree.grid()[0, :, 0].tolist() == turned.mesh.tolist()


@pytest.mark.parametrize(
    ("grid", "names", "words"),
    [
        (
            torch.arange(4),
            ("efsdp",),
            ["unknown dimension 'efsdp'", "Did you mean 'fsdp'?", "Known dimensions: pp, dp"],
        ),
        (torch.arange(4) + 4, ("dp",), ["(dp=4)", "place 0 holds rank 4"]),
        (torch.tensor([0, 2, 1, 3]), ("dp",), ["place 1 holds rank 2", "data of others"]),
        (torch.tensor([[0, 1], [3, 2]]), ("dp", "tp"), ["place 2 holds rank 3"]),
        (
            torch.arange(8).view(2, 2, 2),
            ("dp_replicate", "cp", "dp_shard"),
            ["must be adjacent", "dp_replicate, cp"],
        ),
        (torch.arange(4).view(2, 2), ("dp_shard", "dp_replicate"), ["dp_replicate outside dp_shard"]),
    ],
)
def test_meshes_that_cannot_be_used(grid: torch.Tensor, names: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ClientPlaceTree.from_device_mesh(mesh_of(grid, *names))
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_named_mesh() -> None:
    with pytest.raises(SpecError, match="mesh_dim_names is None: each of the 2 dimensions needs a name"):
        ClientPlaceTree.from_device_mesh(DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=0))
    with pytest.raises(SpecError, match=r"'dp=2' is not a DeviceMesh.*init_device_mesh"):
        ClientPlaceTree.from_device_mesh("dp=2")
    twice = SimpleNamespace(mesh=torch.arange(4).view(2, 2), mesh_dim_names=("dp", "dp"))
    with pytest.raises(SpecError, match="a name of its own"):
        ClientPlaceTree.from_device_mesh(twice)
