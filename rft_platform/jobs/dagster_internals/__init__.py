"""The only code of the platform that uses private modules of Dagster or replaces parts of it.

A new version of Dagster may break these modules and no others; each module says what it adapts and why.

- ``masked_instance``: Dagster's instance; it masks secrets in everything that it stores. ``dagster.yaml`` names it.
- ``driver_instance``: load the instance, and the variant for processes that execute runs themselves.
- ``pool_claims``: wait for a pool slot with a message, interruptible, and without using a processor.
- ``run_storage``: SQLite run storage with one SQLAlchemy engine; the file of a run's event log.
- ``run_launcher``: launches each run once and watches its worker; ``dagster.yaml`` names it.
- ``run_workers``: the processes that execute runs, their claims, and the tag of a driver.
- ``daemon_patches``: a shorter sensor loop, and replacement of dead code servers.
"""
