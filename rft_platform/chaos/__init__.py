"""Chaos tests: kill a scratch project's processes at seeded moments, and check that it recovers without damage.

Read in this order: ``runs`` (``run_chaos``, the whole campaign) and ``campaign`` (``run_project``: the kills of one
project); ``schedule`` (``Kill`` and the seeded plan), ``moments`` (read a project's progress), ``striking`` (find and
kill the victim), ``census`` (the processes of a home); ``supervised`` (protocol ``Supervisor``) with ``driver_mode``
and ``daemon_mode``, and ``tending`` (``Tender`` restarts processes and measures recovery times); ``io_faults`` and
``syscall_faults`` (failing file system calls). ``scratch`` makes the small project, ``judge`` is its judge. Checks:
``invariants`` calls ``store_invariants``, ``service_invariants``, ``machine_invariants`` and ``reference_invariants``
on a ``scene.Scene``. ``records`` holds the results.
"""
