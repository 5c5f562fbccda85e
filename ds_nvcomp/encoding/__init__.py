"""Bytes of numbers to planes, planes to coded chunks, and back: what FORMAT.md describes."""
