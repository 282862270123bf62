"""Which version answers a request, and which version wins a release; nothing here reads files or the database.

- ``assignment``: which arm of a release (base or candidate) answers a request.
- ``routing``: which engine answers a request while a release runs.
- ``engine_probe``: whether the serving engine answers.
- ``canary``: promote or roll back a candidate by its success rate.
- ``ab_test``: the report of an A/B test, with its winner.
"""
