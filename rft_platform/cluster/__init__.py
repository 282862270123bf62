"""Run processes: services that outlive a command, children that answer calls, and programs.

- ``interface``: ``Service``, the declaration of a long-lived server; its ``Address``; ``Cluster``, what runs it.
- ``local``: the default ``Cluster``, and the supervisor of services that live as long as a command.
- ``ray``: a ``Cluster`` of several machines, if Ray is installed and the project asks for it.
- ``worker_pool``: ``WorkerPool``, workers that are set up alike, lent for one call at a time.
- ``child``: ``Child``, a process that calls functions of one module within limits; ``Program``, for any program.
- ``child_main``: the process of a ``Child``.
- ``confined``: limits of a process and its end with its parent; as a program, it runs another one without a network.
- ``this_process``: signals, imports and the end of the calling process.

``child_main``, ``confined`` and ``this_process`` import the standard library only: they run in other environments.
"""
