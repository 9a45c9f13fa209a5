"""The boxes of the paper's figure 7, without an engine: no thread, no clock, no process. Runtimes run them."""
