"""Readers of traces, one for each format.

Read in this order:

- ``trace``: ``Trace``, the result; ``messages``: the forms in which tracing libraries record messages.
- ``base``: what a reader is (``TraceReader``) and how it is driven (``read_traces``); files and scores.
- ``spans`` (OpenTelemetry), ``mlflow_traces``, ``langfuse``, ``langsmith``.
- ``formats``: the readers by name.
"""
