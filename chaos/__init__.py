"""Chaos tests: kill a scratch project's processes at seeded moments, and check that it recovers without damage.

A developer tool, run with ``python -m chaos`` in the repository; the installed package does not contain it.
Read in this order: ``campaign`` (``run_chaos``, all projects) and ``project_run`` (``run_project``: the kills of one
project); ``schedule`` (``Kill`` and the seeded plan), ``progress_probe`` (read a project's progress), ``injector``
(find and kill the victim), ``process_table`` (the processes of a home); ``supervisor`` (protocol ``ProjectRunner``;
``Supervisor`` restarts processes and measures recovery times) with ``driver_mode`` and ``daemon_mode``; ``io_faults``
and ``syscall_faults`` (failing file system calls). ``ray_mode`` has the faults of a project on Ray, whose cluster and
servers are in ``ray_platform``. ``scratch`` makes the project, ``judge`` is its judge, ``agent`` its agent on Ray.
``invariants`` holds the checks, ``records`` the results. ``online`` kills the online service.
"""
