"""What `ds-nvcomp demo` runs: DeepSpeed training, uninterrupted, and killed and resumed with both kinds of checkpoint."""
