"""Dagster jobs, sensors and schedule of a project, its Dagster instance, and the in-process driver.

The sensors (under the daemon) and ``drive`` (in ``rft run``) launch the same jobs, as ``rounds.plan_next`` decides.

Read in this order:
- What is launched: ``jobs`` (with tags and partitions), ``launches`` (Dagster's record of past launches).
- Who launches: ``sensors`` with ``timing``, ``driver`` with ``driver_lock``, ``rejudge``; ``daemon`` runs Dagster's.
- The instance: ``instance``, ``settings`` (``dagster.yaml``), ``prepare``, ``sole``.
- Dagster's private APIs: ``masked_instance``, ``driver_instance``, ``run_storage``, ``run_launcher`` with ``workers``,
  ``daemon_patches``.
- After runs: ``alerts``, ``unsaid`` (reconciles Dagster with the disk), ``maintenance``.
"""
