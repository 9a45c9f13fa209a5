"""The only source of randomness: keys derived from the job's seed, and permutations under a key.

numpy's generators may change between versions, so the stream does not depend on them: a
permutation is the sort order of a bijective 64-bit hash, the same on every machine for ever.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive(seed: int, *labels: str | int) -> int:
    """Return a 64-bit key for a purpose; other labels give an unrelated key.

    Example:
        >>> derive(0, "web", 1) == derive(0, "web", 1)
        True
        >>> derive(0, "web", 1) == derive(0, "web", 2)
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for label in (seed, *labels):
        part = str(label).encode()
        digest.update(b"%d:" % len(part) + part)
    return int.from_bytes(digest.digest(), "little")


def hash64(key: int, values: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Hash each value under a key (splitmix64; a bijection for one key, so there are no ties)."""
    x = values.astype(np.uint64) * _GOLDEN + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(count) that depends on nothing but the key.

    Example:
        >>> sorted(permutation(7, 4).tolist())
        [0, 1, 2, 3]
    """
    return np.argsort(hash64(key, np.arange(count)), kind="stable")
