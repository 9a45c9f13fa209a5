"""Where the boxes run: `inline` steps them in the caller, `local` puts them into one service process per host."""
