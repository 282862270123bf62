"""Prometheus metrics of a project, read at scrape time.

Read in this order:

- ``catalogue.py``: ``CATALOGUE``, every metric with kind, labels and meaning; ``Sample``, one value.
- ``server.py``: the HTTP server with ``/metrics`` and ``/healthz``.
- ``collector.py``: ``PlatformCollector``, which reads all sources at every scrape.
- ``rounds.py``, ``processes.py``: the sources: rounds and store; Dagster, engines and trainer.
"""
