"""Which version serves. A release is a canary or an A/B test.

- ``rules``: pure rules that decide a release. ``routing``: which version and which engine answer a request.
- ``store``: versions and releases in the database.
- ``commands``: decisions of people, and the automatic ones.
- ``versions``: the versions of a project that can serve, imported ones among them.
- ``controller``: deploys the versions and carries decisions out. ``serving_alias``: MLflow's alias ``serving``.
- ``shared_place``: signed records and weights that two hosts of a project share; ``publication`` writes them on the
  host that trains, ``following`` reads them on the host that serves.
"""
