"""Advantages of single tokens, one a file: made by the trainer, where values and log-probs are known. NumPy, pure."""
