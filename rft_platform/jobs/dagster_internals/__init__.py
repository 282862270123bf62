"""The only code of the platform that uses private modules of Dagster or replaces parts of it.

Each module says what it adapts, why, and which part of Dagster's API is missing. Last checked with Dagster 1.13.29;
``tests/jobs/test_dagster_internals.py`` fails when a part that the modules use has changed.

- ``masked_instance``: Dagster's instance; it masks secrets in everything that it stores, and waits for a pool slot with
  a message, interruptible, and without using a processor. ``dagster.yaml`` names it. Processes that execute runs
  themselves load the variant ``DriverInstance``.
- ``kept_connections``: keep the connections to Dagster's SQLite files open in such a process.
- ``run_launcher``: launches each run once and watches its worker; ``dagster.yaml`` names it. The processes that execute
  runs: run workers, and drivers.
"""
