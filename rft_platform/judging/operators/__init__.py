"""Operators on judged experiences, one a file: NumPy, pure, over the runs and rows of a round."""
