"""Readers that are imported when a source has their format, as readers of the user's own are."""
