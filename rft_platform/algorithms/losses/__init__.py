"""Losses, one a file: per-token values and their metrics as sums; nothing here divides by a count."""
