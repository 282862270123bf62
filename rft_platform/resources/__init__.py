"""The Dagster resources of a project, by which its assets reach its state and its processes.

- ``project``: the folder of the project, its engine, its trainer and its registry; its rounds as data frames, for
  assets of other people.
- ``names``: the names of a project's assets, jobs, sensors, pools, partitions and resources in Dagster.
"""
