"""A checkpoint directory: written in hiding by all ranks, published at once, verified and converted as a whole."""
