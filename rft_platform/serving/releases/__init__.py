"""Pure decisions on which version answers a request and which one wins; nothing here does I/O.

- ``assignment``: which arm of a release answers a request.
- ``canary``: promote or roll back a candidate by its success rate.
- ``ab_test``: the report of an A/B test, with its winner.
"""
