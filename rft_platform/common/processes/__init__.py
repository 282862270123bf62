"""Start, find and end the platform's long-lived processes (engines, trainer group).

Read in this order:

- ``lease``: ``Lease``, the file by which later commands find a process (``common.locks`` guards a start).
- ``spawn``: ``start_detached``, ``wait_for_lease``, ``stop_process``, ``stop_holder``, ``kill_process``.
- ``parent``: a server ends with its supervisor.
- ``strays``: find and end processes that were started for a lease but do not hold it.
- ``usage``: which processes use the process of a lease.
- ``signals``: interruption of foreground commands.
- ``gc_control``: garbage collection settings for processes that import large packages.
"""
