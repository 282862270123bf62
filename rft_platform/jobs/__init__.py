"""Dagster jobs, sensors and schedule of a project, its Dagster instance, and the in-process driver.

The sensors (under the daemon) and ``drive`` (in ``rft run``) launch the same jobs, as ``rounds.plan_next`` decides.

Read in this order:
- What is launched: ``jobs``, ``partitions``, ``tags``, ``launches`` (Dagster's record of past launches).
- Who launches: ``sensors`` with ``timing``, ``schedules``, ``driver`` with ``driver_lock``, ``rejudge``.
- The instance: ``instance``, ``driver_instance``, ``masked_instance``, ``settings``, ``storage``, ``run_storage``,
  ``prepare``.
- Adaptations of Dagster's processes: ``daemon``, ``code_servers``, ``run_launcher`` with ``workers``, ``sole``.
- After runs: ``alerts``, ``unsaid`` (reconciles Dagster with the disk), ``maintenance``, ``run_history``.
"""
