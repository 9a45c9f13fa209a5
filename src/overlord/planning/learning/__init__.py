"""Mixing that learns from reported losses (DoReMi, ODM, ADO, Skill-It, functions)."""
