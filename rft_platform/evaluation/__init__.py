"""Measuring policies on held-out tasks: metrics, the promotion gate, plots and reports."""
