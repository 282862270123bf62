"""Prometheus metrics of a project, read at scrape time.

Read in this order:

- ``catalogue``: ``CATALOGUE``, every metric with kind, labels and meaning; ``Sample``, one value.
- ``server``: the HTTP server with ``/metrics`` and ``/healthz``.
- ``prometheus_collector``: ``PlatformCollector``, which reads all sources at every scrape: Dagster, engines, trainer,
  and rounds and store by ``round_metrics``.
"""
