"""The demonstration behind `ds-nvcomp demo`: DeepSpeed training that is killed and resumed, compressed, plain and uninterrupted."""
