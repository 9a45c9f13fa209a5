"""Sample transformations (paper section 2.1): every kind of sample, measured before planning and finished after it."""
