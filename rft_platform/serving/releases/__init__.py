"""Which version answers a request, and which one wins; nothing here reads files or the database.

- ``assignment``: which arm of a release answers a request.
- ``routing``: which engine that is while a release runs.
- ``canary``: promote or roll back a candidate by its success rate.
- ``ab_test``: the report of an A/B test, with its winner.
"""
