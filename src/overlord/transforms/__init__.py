"""What is done to samples (paper section 2.1): per sample, per microbatch, per rank."""
