"""Items with costs into bins: the methods, the objectives, and lower bounds to hold them against."""
