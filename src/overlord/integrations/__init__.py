"""Faces for trainers. Each needs its own framework; the core needs none of them."""
