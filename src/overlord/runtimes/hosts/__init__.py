"""Hosts of roles: what answers for a planner, loaders or a constructor, whichever transport carries the messages."""
