"""Services and workers as actors of a Ray cluster. Only a project with ``cluster.kind: ray`` imports this folder.

Read in this order:

- ``connection``: join the cluster as a driver; its nodes and what they hold.
- ``actors``: what runs on the nodes: a service in ``ServiceActor``, a child process in ``WorkerActor``.
- ``ray_cluster``: ``RayCluster``, a ``Cluster`` whose services are detached named actors.
- ``groups``: groups of ranks on several nodes, in a placement group.
- ``runtime_environment``: runtime environments of workers, with local paths as URIs.
- ``ray_worker``: ``RayWorker``, a ``Worker`` whose process is the child of an actor.

Ray places, names and watches processes; services and their clients talk HTTP, as on one machine. All nodes need the
same Python, the same release of Ray and of this platform, and the same paths of homes, models and user code.
"""
