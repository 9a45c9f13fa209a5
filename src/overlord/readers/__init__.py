"""Where samples come from: files are listed, indexed when reached, and streamed block by block."""
