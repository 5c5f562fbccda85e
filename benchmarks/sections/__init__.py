"""The sections of benchmarks/saves.py."""
