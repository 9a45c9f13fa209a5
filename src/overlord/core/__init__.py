"""The nouns: frozen data and the pure functions that belong to them. No I/O, no clock, no engine."""
