"""Dagster jobs, sensors and schedule of a project, and its Dagster instance.

The sensors (under the daemon) and the in-process driver (``run.driver``) launch the same jobs, chosen by ``plan_next``
in ``rounds.planning.plan``.

Read in this order:
- What is launched: ``jobs`` has jobs, tags of their runs and round partitions; ``launches`` reads Dagster's record of
  past launches.
- What launches: ``sensors`` with ``sensor_interval``, ``rejudge``; ``driver_lock`` keeps two drivers apart,
  ``run_error`` has the error of a run that a driver executed.
- The instance: ``instance``, ``init_dagster_home``.
- After runs: ``alerts``, ``reconcile_materializations`` and ``reconcile_imports`` (Dagster against the disk),
  ``maintenance``.
- ``dagster_internals``: the adaptations that need Dagster's private modules.
"""
