"""From a job and launch options to a running service: sources opened, the resume point found, roles placed."""
