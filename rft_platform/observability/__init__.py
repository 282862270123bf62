"""Logging of all processes: format, context, masking of secrets, and bounded log files; delivery of alerts.

Read in this order:

- ``logs``: ``configure``, called once in a process's entry point; the text and JSON formats; ``phase_context`` for
  phases.
- ``log_context``: ``PhaseContext``, the round, run and phase of a log line, passed on in an HTTP header.
- ``masked_output``: standard output and error with secrets masked.
- ``alert_channels``: deliver alerts by webhook or command.
"""
