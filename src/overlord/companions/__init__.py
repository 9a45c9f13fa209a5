"""Companions of a training run: what runs in the trainer process, with torch. The loader imports none of them."""
