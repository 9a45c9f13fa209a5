"""Side-by-side measurements. Each module prints figures that are ratios against a named baseline of the same run."""
