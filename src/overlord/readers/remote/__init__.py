"""Files that are not on this host: fetched in ranges by many requests at a time, and kept on disk within a limit."""
