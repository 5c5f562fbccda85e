"""A checkpoint directory: written in hiding by all ranks, published at once, verified and converted as a whole."""

STATES_SUFFIX = "_states.pt"  # of the files that DeepSpeed reads back; others in its checkpoints are for other readers
