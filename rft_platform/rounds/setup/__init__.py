"""Turn a project's configuration into the parts that stages use.

1. ``connections``: find or start policy engine, trainer group and model registry; resolve model folders and versions;
2. ``side_engines``: engines beside the first policy's, for auxiliary models and further policies;
   the engines of an online project for evaluations and for the candidate of a release;
3. ``algorithm``: operators of the experience pipeline;
4. ``taskset_binding``: workflow, sampling parameters and judge of a taskset;
5. ``judge_workers``, ``judge_worker``: judges that are the user's functions, in workers on a cluster;
6. ``demonstrations``: the file of demonstrations for supervised steps.
"""
