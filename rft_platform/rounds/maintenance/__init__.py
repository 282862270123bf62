"""Maintenance of a project's files; never needed for a round to proceed.

1. ``verification``: compare every file with its digest, and records with manifests;
2. ``checkpoint_retention``: remove the weights of old checkpoints and keep their lineage;
3. ``store_maintenance``: compact and retire the rollouts of closed rounds;
4. ``row_erasure``: rows become tombstones; ``forget_imports``: erase imported traces from all files of a home.
"""
