"""Pure rules of the online service: they read neither the database nor requests.

- ``action_types``: classify a call, for example as a valid tool call or a question.
- ``alerts``: limits of the traffic's figures.
- ``call_limits``: the largest number of choices of a call, and of tokens of its answer.
- ``declared_metrics``: metrics of feedback and their valid values.
- ``rate_limits``: limits of requests and tokens per minute, and of concurrent requests.
- ``redaction``: remove personal data before anything is stored.
- ``round_rows``: which committed rows a round takes.
"""
