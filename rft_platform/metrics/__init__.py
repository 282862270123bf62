"""Prometheus metrics of a project, read at scrape time.

Read in this order:

- ``catalogue``: ``CATALOGUE``, every metric with kind, labels and meaning; ``Sample``, one value.
- ``server``: the HTTP server with ``/metrics`` and ``/healthz``.
- ``prometheus_collector``: ``PlatformCollector``, which reads all sources at every scrape.
- ``round_metrics``, ``process_metrics``: the sources: rounds and store; Dagster, engines and trainer.
"""
