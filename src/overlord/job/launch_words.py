"""Words that a launch takes, and that a job file may hold: apart from what they start, which takes long to import."""

from __future__ import annotations

from typing import Literal

Runtime = Literal["local", "ray", "inline"]
"""Where the roles run."""
Placement = Literal["auto", "loader", "constructor"]
"""Where the media of a source are decoded."""
OnSourceFailure = Literal["stop", "park", "reweight"]
"""What happens to a source that cannot be read: the run stops; it is parked until it is back; it is parked for good."""
DEFAULT_CACHE = "~/.cache/overlord"
"""Folder for the indices of files."""
DEFAULT_HEARTBEAT_S = 5.0
"""Silence of a role after which it is replaced. All time limits of the runtimes are derived from it."""
