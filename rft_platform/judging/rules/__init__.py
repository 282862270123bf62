"""Judges by rule: one family a file. Each is a plain function of a task and a response."""
