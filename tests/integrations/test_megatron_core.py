"""Megatron-core on CPU: a GPTModel trained by Megatron's own schedules on our iterators, with gloo."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.overrides import TorchFunctionMode

import overlord as ol
from overlord.integrations.torch_loader import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it names what is not installed
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_hybrid_cp_rank

    from overlord.integrations.megatron import data_iterator, dataset_provider, packed_seq_params, read_state

SEQUENCE = 64


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> ol.Job:
    folder = tmp_path_factory.mktemp("megatron")
    rng = np.random.default_rng(0)
    rows = [json.dumps({"ids": rng.integers(1, 60, rng.integers(4, 24)).tolist()}) for _ in range(400)]
    (folder / "web.jsonl").write_text("\n".join(rows))
    source = ol.Source("web", str(folder / "web.jsonl"), sample=ol.Text("ids", tokenized=True))
    batch = ol.Batch(SEQUENCE, global_tokens=160, microbatch_tokens=SEQUENCE, microbatches=4)
    return ol.Job([source], batch=batch, overlength="split", seed=3)


class OnHost(TorchFunctionMode):
    """Lets Megatron, which makes its tensors on a CUDA device, make them on the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs |= {"device": "cpu"} | ({"pin_memory": False} if "pin_memory" in kwargs else {})
        return func(*args, **kwargs)


class HostAttention(nn.Module):
    """Megatron's `core_attention` for packed sequences: causal inside each segment."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
        super().__init__()

    def forward(self, query, key, value, attention_mask=None, packed_seq_params=None, **_):
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        assert bounds[-1] == len(query)
        parts = [
            nn.functional.scaled_dot_product_attention(
                *(one[a:b].transpose(0, 1) for one in (query, key, value)), is_causal=True
            ).transpose(0, 1)
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(parts).flatten(1)


def make_model():
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, params_dtype=torch.float64,
        attention_dropout=0.0, hidden_dropout=0.0, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, calculate_per_token_loss=True, autocast_dtype=torch.float64,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = HostAttention
    torch.manual_seed(1)
    return GPTModel(config, spec, 64, SEQUENCE, position_embedding_type="learned_absolute").double()


def megatron_args(world, folder, *, tp=1, iteration=0):
    return SimpleNamespace(
        tensor_model_parallel_size=tp, context_parallel_size=1, pipeline_model_parallel_size=1,
        expert_model_parallel_size=1, dataloader_type="external", micro_batch_size=1, sft=True, seq_length=SEQUENCE,
        global_batch_size=4, iteration=iteration, dataloader_save=folder,
    )  # fmt: skip


def setup(**sizes):
    warnings.simplefilter("ignore")
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    parallel_state.initialize_model_parallel(**sizes)


def train(rank, world, job, cache, folder, steps, resume):
    """Train to a step; save at the tenth. Returns (sample ids, loss) of each step."""
    setup()
    iteration = 10 if resume else 0
    args = megatron_args(world, folder, iteration=iteration)
    job = job.replace(batch=job.batch.replace(microbatches=4 // world))
    found, seen = [], []
    with OnHost():
        train_data, _, _ = dataset_provider(job, lambda: args, cache=cache)(None)
        model = make_model()
        if resume:
            model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), f"{folder}/model"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def forward_step(iterator, model):
            batch = next(iterator)
            assert batch["tokens"].shape == (1, SEQUENCE) and batch["cu_seqlens"].shape[0] == 1
            assert "cu_seqlens_padded" not in batch  # with cp=1
            seen.extend(str(one) for one in train_data.batch.meta.sample_ids if one.source)
            output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"].clamp(min=0),
                           packed_seq_params=packed_seq_params(batch))  # fmt: skip

            def loss(output):
                summed = (output.double() * batch["loss_mask"]).sum()
                return summed, batch["loss_mask"].sum().to(torch.int), {"loss": summed.detach()}

            return output, loss

        iterator = RerunDataIterator(train_data)
        for step in range(iteration, steps):
            optimizer.zero_grad()
            told = get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iterator, model=[model], num_microbatches=4 // world,
                seq_length=SEQUENCE, micro_batch_size=1, forward_only=False,
            )  # fmt: skip
            iterator.advance()
            tokens = train_data.batch.step.global_loss_tokens
            total = sum(one["loss"] for one in told)
            for tensor in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor)
            for parameter in model.parameters():
                parameter.grad /= tokens
            optimizer.step()
            found.append((sorted(seen), float(total) / tokens))
            seen.clear()
            if step == 9 and not resume:
                where = Path(folder) / "iter_0000010/mp_rank_00"  # where Megatron's --dataloader-save puts it
                for made in (where, Path(folder) / "model"):
                    made.mkdir(parents=True, exist_ok=True)
                dist.barrier()
                dist_checkpointing.save(model.sharded_state_dict(), f"{folder}/model")
                torch.save({"dataloader_state_dict": train_data.save_state()},
                           where / f"train_dataloader_dprank{rank:03d}.pt")  # fmt: skip
    train_data.loader.close()
    return found


def merged(ranks):
    """Sample ids of all ranks, and the loss, of each step."""
    return [(sorted(i for ids, _ in step for i in ids), step[0][1]) for step in zip(*ranks, strict=True)]


@pytest.mark.slow
def test_a_gpt_model_resumes_exactly_on_another_number_of_ranks(job, cache, tmp_path):
    whole = merged(run_ranks(train, 1, tmp_path / "a", 1, job, cache, str(tmp_path / "one"), 20, False))
    again = merged(run_ranks(train, 2, tmp_path / "b", 2, job, cache, str(tmp_path / "one"), 20, True))
    assert [ids for ids, _ in again] == [ids for ids, _ in whole[10:]]
    assert [loss for _, loss in again] == pytest.approx([loss for _, loss in whole[10:]], rel=1e-9)
    assert whole[-1][1] != pytest.approx(whole[0][1], rel=1e-3)


def provide(rank, job, cache):
    """Return the shape of the first batch on a tensor-parallel rank that takes any."""
    setup(tensor_model_parallel_size=2)
    args = megatron_args(2, None, tp=2)
    data, _, _ = dataset_provider(job, lambda: args, cache=cache)(None)
    return None if data is None else (tuple(next(data)["tokens"].shape), data.loader.close())


@pytest.mark.slow
def test_only_the_first_tensor_parallel_rank_takes_batches(job, cache, tmp_path):
    assert run_ranks(provide, 2, tmp_path, job, cache) == [((1, SEQUENCE), None), None]


class Counted(nn.Module):
    """A model whose output is the loss of each token, without attention: ranks need not exchange keys."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        torch.manual_seed(1)
        self.table = nn.Embedding(64, 64).double()

    def set_input_tensor(self, tensor) -> None:
        """Megatron sets the input of a pipeline stage."""

    def forward(self, tokens, labels):
        return nn.functional.cross_entropy(self.table(tokens)[0], labels[0].clamp(min=0), reduction="none")


def train_hybrid(rank, job, cache, steps):
    """Run Megatron's schedule for hybrid context parallelism on two ranks; return the samples' sizes and the losses."""
    setup(context_parallel_size=2, hybrid_context_parallel=True)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, calculate_per_token_loss=True, context_parallel_size=2,
        hybrid_context_parallel=True, max_seqlen_per_dp_cp_rank=32, params_dtype=torch.float64,
    )  # fmt: skip
    model, found = Counted(config), []
    layout = ol.Layout("megatron", slicing="whole")
    with OnHost(), DataLoader(job, mesh="cp=2", layout=layout, strategy=ol.strategies.hdp(), cache=cache) as loader:
        data = data_iterator(loader)
        for _ in range(steps):
            sizes, tokens = [], []

            def forward_step(iterator, model, sizes=sizes, tokens=tokens):
                sample = next(iterator)
                size = int(sample.pop("local_cp_size"))
                sizes.append(size)
                batch, params = get_batch_on_this_hybrid_cp_rank(sample, size)
                assert params.local_cp_size == size
                tokens.extend(batch["tokens"].flatten().tolist())
                output = model(batch["tokens"], batch["labels"])
                mask = batch["loss_mask"][0]
                return output, lambda output: ((output * mask).sum(), mask.sum().to(torch.int), {})

            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=data, model=[model], num_microbatches=1, seq_length=64,
                micro_batch_size=1, forward_only=False,
            )  # fmt: skip
            found.append((sizes, [token for token in tokens if token], model.table.weight.grad.clone()))
            model.zero_grad()
    return found


@pytest.mark.slow
def test_hybrid_context_parallelism_takes_our_plan(job, cache, tmp_path):
    spread = job.replace(batch=ol.Batch(32, global_tokens=160, microbatch_tokens=32))
    ranks = run_ranks(train_hybrid, 2, tmp_path, spread, cache, 3)
    model = Counted(None)
    with DataLoader(spread, layout="megatron", cache=cache, runtime="inline") as loader:
        for step, *found in zip(loader, *ranks, strict=False):
            tokens = []
            for batch in step.microbatches:
                tokens += [token for token in batch["tokens"].flatten().tolist() if token]
                (model(batch["tokens"], batch["labels"]) * batch["loss_mask"][0]).sum().backward()
            assert sorted(found[0][1] + found[1][1]) == sorted(tokens)
            torch.testing.assert_close(found[0][2] + found[1][2], model.table.weight.grad)
            model.zero_grad()
    assert {size for rank in ranks for sizes, _, _ in rank for size in sizes} == {1, 2}


def test_batches_of_context_parallel_ranks_are_whole(job, cache, tmp_path):
    batch = ol.Batch(SEQUENCE, global_tokens=160, microbatch_tokens=SEQUENCE, microbatches=4)
    options = {"mesh": "cp=2", "rank": 1, "runtime": "inline", "cache": cache}
    layout = ol.Layout("megatron", slicing="whole", block=SEQUENCE // 2)
    with DataLoader(job.replace(batch=batch), layout=layout, **options) as loader:
        data = data_iterator(loader, 4)
        for _ in range(4):
            found = next(data)
            assert found["tokens"].shape == found["labels"].shape == found["loss_mask"].shape == (1, SEQUENCE)
            assert found["cu_seqlens"].dtype == torch.int32 and found["cu_seqlens"].shape[0] == 1
            bounds = packed_seq_params(found).cu_seqlens_q
            assert torch.equal(bounds, found["cu_seqlens_padded"][0]) and int(bounds[-1]) == SEQUENCE
            assert not (bounds % 4).any()  # Megatron cuts each segment into 2 x cp chunks
        where = tmp_path / "iter_0000001/mp_rank_00"
        where.mkdir(parents=True)
        torch.save({"dataloader_state_dict": data.save_state()}, where / "train_dataloader_dprank000.pt")
        following = next(data)["tokens"]
        loader.load_state_dict(read_state(tmp_path, 1))
        assert torch.equal(next(data_iterator(loader, 4))["tokens"], following)
    with pytest.raises(ol.StateError, match="iteration 2 has no state of the stream there"):
        read_state(tmp_path, 2)
    with (
        DataLoader(job, layout=ol.Layout("megatron"), **options) as cut,
        pytest.raises(ol.SpecError, match="whole seq"),
    ):
        data_iterator(cut, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataloader_type": "cyclic"}, "--dataloader-type is 'cyclic', and overlord's iterator needs external"),
        ({"micro_batch_size": 2}, "--micro-batch-size is 2, and overlord's iterator needs 1"),
        ({"sft": False}, "samples that share a sequence would attend to each other"),
        ({"rampup_batch_size": [1, 1, 4]}, "--rampup-batch-size is"),
        ({"seq_length": 128}, "--seq-length is 128, and microbatch_tokens of the job is 64"),
        ({"global_batch_size": 3}, "microbatches is 3, and batch.microbatches of the job is 4"),
        ({"iteration": 7}, "iteration 7 has no state of the stream"),
    ],
)
def test_settings_that_do_not_fit_are_refused(change, message, job, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    args = SimpleNamespace(**vars(megatron_args(1, str(tmp_path))) | change)
    with pytest.raises((ol.SpecError, ol.StateError), match=message):
        dataset_provider(job, lambda: args, cache=cache)(None)
