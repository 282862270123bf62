"""The only code of the platform that uses private modules of Dagster or replaces parts of it.

Each module says what it adapts, why, and which part of Dagster's API is missing. Last checked with Dagster 1.13.29;
``tests/jobs/test_dagster_internals.py`` fails when a part that the modules use has changed.

- ``masked_instance``: Dagster's instance; it masks secrets in everything that it stores. ``dagster.yaml`` names it.
- ``driver_instance``: load the instance, and the variant for processes that execute runs themselves.
- ``kept_connections``: keep the connections to Dagster's SQLite files open in such a process.
- ``pool_claims``: wait for a pool slot with a message, interruptible, and without using a processor.
- ``run_launcher``: launches each run once and watches its worker; ``dagster.yaml`` names it.
- ``run_workers``: the processes that execute runs: run workers, and drivers.
"""
