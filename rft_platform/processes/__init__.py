"""Start, find and end the platform's long-lived processes (engines, trainer group).

Read in this order:

- ``lease.py``: ``Lease``, the file by which later commands find a process (``locks.locked`` guards a start).
- ``spawn.py``: ``start_detached``, ``wait_for_lease``, ``stop_process``, ``stop_holder``.
- ``strays.py``: find and end processes that were started for a lease but do not hold it.
- ``signals.py``: interruption of foreground commands.
- ``collector.py``: garbage collection settings for processes that import large packages.
"""
