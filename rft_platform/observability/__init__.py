"""Logging of all processes: format, context, masking of secrets, and bounded log files.

Read in this order:

- ``logs.py``: ``configure``, called once in a process's entry point; ``phase_context`` for phases.
- ``context.py``: ``PhaseContext``, the round, run and phase of a log line, passed on in an HTTP header.
- ``formats.py``: text and JSON formatters.
- ``masked_output.py``: standard output and error with secrets masked.
- ``bounded.py``: rotate log files while other processes write to them.
"""
