"""How many workers each source needs: costs, partition, scaling. Pure."""
