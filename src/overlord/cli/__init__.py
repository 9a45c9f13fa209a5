"""The command line: job files, commands, and what they print. Nothing below imports it."""
