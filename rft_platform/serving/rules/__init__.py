"""Pure rules of the online service: they read neither the database nor requests.

- ``action_types``, ``alerts``: what a call did, and limits of the traffic's figures.
- ``declared_metrics``: metrics of feedback and their valid values.
- ``rate_limits``: requests a minute and at the same time.
- ``redaction``: personal data is removed before anything is stored.
- ``round_rows``: which committed rows a round takes.
"""
