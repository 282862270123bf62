"""Dagster jobs, sensors and schedule of a project, its Dagster instance, and the in-process driver.

The sensors (under the daemon) and ``drive`` (in ``rft run``) launch the same jobs, chosen by ``plan_next`` in
``rounds.planning.plan``.

Read in this order:
- What is launched: ``jobs`` has jobs, tags of their runs and round partitions; ``launches`` reads Dagster's record of
  past launches.
- What launches: ``sensors`` with ``sensor_interval``, ``driver`` with ``driver_lock``, ``rejudge``.
- The instance: ``instance``, ``init_dagster_home``.
- After runs: ``alerts``, ``reconcile_materializations`` (Dagster against the disk), ``maintenance``.
- ``dagster_internals``: the adaptations that need Dagster's private modules.
"""
