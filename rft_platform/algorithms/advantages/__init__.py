"""Advantage functions, one a file: NumPy, pure, vectorised over rows."""
