"""Microbatch and parallelism transformations (paper section 2.1): pieces packed, and cut for each rank."""
