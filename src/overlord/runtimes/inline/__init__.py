"""Roles as objects of the calling process: what `runtime='inline'` and the fault tests run."""
