"""Models of transformers and megatron-core train over rings of real processes as one process trains them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_torch_hdp import CONTEXT, VOCABULARY, made_step, random_lengths
from torch import Tensor, nn

import overlord as ol
from overlord.errors import SpecError
from overlord.integrations.ring_models import RingCoreAttention, check_hf, register_hf
from overlord.integrations.torch_hdp import HybridParallel
from overlord.integrations.torch_ring import Ring, attention_in

WORLD, SEEDS = 4, (1, 4, 7)

pytestmark = pytest.mark.timeout(300)


def hf_model(kind: str, attention: str = "overlord_ring", **options: Any) -> nn.Module:
    import transformers

    register_hf()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    config = getattr(transformers, f"{kind}Config")(**sizes | options, attn_implementation=attention)
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double().train()


def summed_loss(model: nn.Module, batch: Any) -> Tensor:
    keys = ("input_ids", "position_ids", "use_cache")
    logits = model(**{key: batch[key] for key in keys}).logits[0]
    labels = batch.get("shift_labels")
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:] if labels is None else labels
    return nn.functional.cross_entropy(logits, labels[0], ignore_index=-100, reduction="sum")


def gradients(model: nn.Module) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def train_hf(rank: int, kinds: list[str]) -> tuple[list[Tensor], set[int]]:
    mesh, found, shared = ol.ClientPlaceTree(cp=WORLD), [], set()
    hdp = HybridParallel(SimpleNamespace(mesh=mesh, rank=rank, device=torch.device("cpu")))
    for kind in kinds:
        model = hf_model(kind)
        check_hf(model)
        for seed in SEEDS:
            for batch in hdp.microbatches(made_step(random_lengths(seed), mesh, rank, seed), model):
                shared.add(len(batch.meta.ranks))
                hdp.backward(summed_loss(model, batch))
            found.append(gradients(model))
    return found, shared


@pytest.mark.slow
def test_llama_and_qwen2_train_over_rings_as_alone(tmp_path):
    kinds = ["Llama", "Qwen2"]
    found = run_ranks(train_hf, WORLD, tmp_path, kinds)
    expected = []
    for kind in kinds:
        model = hf_model(kind, "sdpa")
        for seed in SEEDS:
            step = made_step(random_lengths(seed), ol.ClientPlaceTree(), 0, seed, strategy=ol.strategies.vanilla())
            for batch in step.microbatches:
                (summed_loss(model, batch) / step.global_loss_tokens).backward()
            expected.append(gradients(model))
    for rank, _ in found:
        for got, wanted in zip(rank, expected, strict=True):
            assert float((got - wanted).abs().max()) < 1e-9 * float(wanted.abs().max())
    assert {size for _, sizes in found for size in sizes} == {1, 2, 4}


def test_what_a_ring_cannot_compute_is_refused():
    with pytest.raises(SpecError, match="its attention is 'sdpa', which sees the tokens of one rank only"):
        check_hf(hf_model("Llama", "sdpa"))
    windowed = hf_model("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(SpecError, match="layers of sliding_attention"):
        check_hf(windowed)
    ids = torch.ones(1, 8, dtype=torch.int64)
    with attention_in(Ring([0, 8])):
        with pytest.raises(SpecError, match="Qwen2Attention: it asks for sliding_window"):
            windowed(input_ids=ids)
        with pytest.raises(SpecError, match="LlamaAttention: it asks for dropout"):
            hf_model("Llama", attention_dropout=0.1)(input_ids=ids)
        with pytest.raises(SpecError, match="LlamaAttention: it asks for an attention mask"):
            hf_model("Llama")(input_ids=ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(SpecError, match="no microbatch is being computed"):
        hf_model("Llama")(input_ids=ids)


def test_rows_of_a_batch_are_segments():
    """Layouts with a row for each piece: no token sees another row."""
    model, ids = hf_model("Llama"), torch.arange(1, 13).view(2, 6)
    with attention_in(Ring([0, 6, 12])):
        found = model(input_ids=ids, use_cache=False).logits
    expected = hf_model("Llama", "sdpa")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# ---- megatron-core, where it is installed


def megatron_model(core: Any = None) -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names what is not installed
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        from overlord.integrations.ring_models import RingRotary

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=48,
            use_cpu_initialization=True, params_dtype=torch.float64, attention_dropout=0.0, hidden_dropout=0.0,
            gradient_accumulation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
            masked_softmax_fusion=False,
        )  # fmt: skip
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = RingCoreAttention
        torch.manual_seed(1)
        model = GPTModel(
            config, spec, VOCABULARY, CONTEXT, position_embedding_type="rope", share_embeddings_and_output_weights=False
        ).double()
        model.rotary_pos_emb = RingRotary(model.rotary_pos_emb)
        torch.cuda.current_device = lambda: "cpu"  # where Megatron computes its table of angles
    return model


def megatron_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["input_ids"], batch["position_ids"], None)[0]
    labels = batch.get("shift_labels")
    labels = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:] if labels is None else labels
    return nn.functional.cross_entropy(logits, labels[0], ignore_index=-100, reduction="sum")


def train_megatron(rank: int, size: int) -> list[Tensor]:
    mesh, found = ol.ClientPlaceTree(cp=size), []
    hdp = HybridParallel(SimpleNamespace(mesh=mesh, rank=rank, device=torch.device("cpu")))
    model = megatron_model()
    for seed in SEEDS:
        for batch in hdp.microbatches(made_step(random_lengths(seed), mesh, rank, seed), model):
            hdp.backward(megatron_loss(model, batch))
        found.append(gradients(model))
    return found


@pytest.mark.slow
def test_a_gpt_of_megatron_core_trains_over_rings_as_alone(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    together = run_ranks(train_megatron, WORLD, tmp_path / "four", WORLD)
    (alone,) = run_ranks(train_megatron, 1, tmp_path / "one", 1)
    for rank in together:
        for got, wanted in zip(rank, alone, strict=True):
            assert float((got - wanted).abs().max()) < 1e-9 * float(wanted.abs().max())


def test_a_layer_of_megatron_that_cannot_ring_is_refused():
    config = SimpleNamespace(
        attention_dropout=0.1, window_size=(4, 0), softmax_type="vanilla", context_parallel_size=2,
        apply_query_key_layer_scaling=False, kv_channels=8,
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"layer 3: it asks for attention_dropout=0.1 and window_size and context_par"):
        RingCoreAttention(config, 3, "causal", "self")
    config.attention_dropout, config.window_size, config.context_parallel_size = 0.0, None, 1
    with pytest.raises(SpecError, match="attn_mask_type=padding"):
        RingCoreAttention(config, 3, "padding", "self")
    layer = RingCoreAttention(config, 3, "causal", "self")
    with pytest.raises(SpecError, match="it asks for packed_seq_params"):
        layer(torch.zeros(4, 1, 2, 8), torch.zeros(4, 1, 2, 8), torch.zeros(4, 1, 2, 8), packed_seq_params=object())
