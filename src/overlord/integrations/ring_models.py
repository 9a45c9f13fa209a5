"""Ring attention as the attention of models: transformers (`attn_implementation="overlord_ring"`) and megatron-core.

Both use the ring of the microbatch that `HybridParallel` has handed out. What a ring cannot compute (sliding windows,
masks, dropout, attention sinks, layers without attention that look back) is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from overlord.errors import SpecError
from overlord.integrations.torch_ring import current_ring, ring_attention

HF_NAME = "overlord_ring"


def register_hf() -> None:
    """Make `attn_implementation="overlord_ring"` known to transformers; once a process, before a model is made.

    Example:
        A model for `HybridParallel`::

            register_hf()
            model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="overlord_ring")
            check_hf(model)
    """
    from transformers import AttentionInterface

    AttentionInterface.register(HF_NAME, _hf_attention)


def check_hf(model: nn.Module) -> None:
    """Refuse a model of transformers with layers that a ring cannot compute, before it is trained.

    Raises:
        SpecError: Some layers are not causal attention over the whole sequence.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "_attn_implementation", None)
    if found != HF_NAME:
        raise SpecError(
            f"{type(model).__name__}: its attention is {found!r}, which sees the tokens of one rank only. Load it with "
            f"attn_implementation={HF_NAME!r}."
        )
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        raise SpecError(
            f"{type(model).__name__}: it has layers of {', '.join(kinds)}, and ring attention computes causal "
            "attention over whole sequences only; those layers would see wrong tokens. Use a model with full attention "
            "in every layer, or plans that spread no sequence (cp=1)."
        )


def _hf_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one layer, as transformers calls it: queries are [rows, heads, tokens, size]."""
    causal = kwargs.pop("is_causal", None)
    causal = getattr(module, "is_causal", True) if causal is None else causal
    refused = {
        "an attention that is not causal": causal is False,
        "an attention mask": attention_mask is not None,
        "dropout": bool(dropout),
        **{name: kwargs.get(name) is not None for name in ("sliding_window", "softcap", "s_aux", "head_mask")},
    }
    _refuse(type(module).__name__, [name for name, found in refused.items() if found])
    q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (query, key, value))
    rows, heads, tokens, size = query.shape
    return ring_attention(q, k, v, scale=scaling).view(rows, tokens, heads, size), None


def _refuse(where: str, found: list[str]) -> None:
    if found:
        raise SpecError(
            f"{where}: it asks for {' and '.join(found)}, and ring attention computes plain causal attention only. "
            "Switch that off in the model's configuration (attention_dropout=0, no sliding window, packed rows without "
            "a mask), or use another attention for this part of the model, such as "
            "attn_implementation={'text_config': 'overlord_ring', 'vision_config': 'sdpa'}."
        )


class RingCoreAttention(nn.Module):  # type: ignore[misc]
    """The `core_attention` of a layer of megatron-core.

    Leave `context_parallel_size` at 1: which ranks share a microbatch is the plan's decision. Layouts of packed
    sequences come from the ring as well, so pass no `packed_seq_params`.

    Example:
        A GPTModel for `HybridParallel`::

            spec = get_gpt_layer_local_spec()
            spec.submodules.self_attention.submodules.core_attention = RingCoreAttention
            model = GPTModel(config, spec, ...)
            model.rotary_pos_emb = RingRotary(model.rotary_pos_emb)
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            f"attn_mask_type={attn_mask_type}": "causal" not in str(getattr(attn_mask_type, "name", attn_mask_type)),
            f"attention_type={attention_type}": attention_type != "self",
            f"attention_dropout={dropout}": bool(dropout),
            "window_size": getattr(config, "window_size", None) is not None,
            "softmax_type": getattr(config, "softmax_type", "vanilla") != "vanilla",
            "context_parallel_size above 1": config.context_parallel_size > 1,
        }
        _refuse(f"RingCoreAttention of layer {layer_number}", [name for name, found in refused.items() if found])
        self._scale = softmax_scale
        if config.apply_query_key_layer_scaling:
            self._scale = (softmax_scale or config.kv_channels**-0.5) / max(1, layer_number)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return the attention of tokens [tokens, 1, heads, size], as [tokens, 1, heads * size]."""
        given = {"attention_bias": attention_bias, "packed_seq_params": packed_seq_params}
        _refuse("RingCoreAttention", [name for name, value in given.items() if value is not None])
        tokens, rows = query.shape[:2]
        q, k, v = (one.transpose(0, 1).flatten(0, 1) for one in (query, key, value))
        return ring_attention(q, k, v, scale=self._scale).view(rows, tokens, -1).transpose(0, 1)


class RingRotary(nn.Module):  # type: ignore[misc]
    """The rotary embedding of a GPTModel of megatron-core, at the positions of this rank's slices.

    Megatron counts positions from the first token it gets, and a slice begins elsewhere.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the angles of this rank's tokens."""
        ring = current_ring()
        table = self.rotary(ring.longest, *args, **kwargs)
        return table[ring.positions.to(table.device)]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        """Return how many tokens this rank has."""
        return current_ring().tokens
