"""Workers that follow the mixture, and the figures they are decided by; status and metrics."""
