"""What the tests of faults share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(scope="module")
def quiet():
    """What goes wrong here is told a thousand times."""
    logger = logging.getLogger("overlord")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)
