"""Which version serves. A release is a canary or an A/B test.

- ``rules``: pure rules that decide a release. ``routing``: which version and which engine answer a request.
- ``store``: versions and releases in the database.
- ``commands``: decisions of people, and the automatic ones.
- ``versions``: the versions of a project that can serve, imported ones among them, and MLflow's alias ``serving``.
- ``controller``: deploys the versions and carries decisions out.
- ``shared_place``: signed records and weights that two hosts of a project share; ``exchange`` writes them on the host
  that trains, and reads them on the host that serves.
"""
