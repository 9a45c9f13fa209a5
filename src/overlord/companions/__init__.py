"""Companions of a training run: what runs in the trainer process, with torch. The loader imports none of them."""

from overlord.companions.layer_balance import LayerBalance
from overlord.companions.measured import balance_groups

__all__ = ["LayerBalance", "balance_groups"]
