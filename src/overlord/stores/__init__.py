"""What survives a crash (paper section 6.1): a journal of inputs and plan records, and snapshots of the state."""
