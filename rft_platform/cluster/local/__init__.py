"""Services as processes of this machine, and what their processes do about themselves.

Read in this order:

- ``file_cluster``: ``FileCluster``, what every cluster does with files: start locks, users, generations, logs.
- ``local_cluster``: ``LocalCluster``, the default ``Cluster``: find a service by its lease, or start it.
- ``leases``: ``Lease``, the file by which later commands find a service; its processes and its users.
- ``service_process``: ``ServiceProcess``, with which a service publishes its address and ends when it is idle;
  ``end_with_starter``.
- ``supervisor``: ``serving``: services that live as long as a command.
- ``processes``: start, find, stop and kill processes. ``locks``: locks between processes.
- ``log_files``: bound the size of logs while services write to them.
"""
