"""Decisions about the versions of a project: which one is champion, which serve, and which one is trained further.

1. ``promotion``: compare a policy with the champion, decide by the gate, roll back;
2. ``servable_versions``: the versions that an online project can serve, and those that were withdrawn;
   ``imported_versions``: those of other projects;
3. ``training_start``: the policy that a round's training starts from.
"""
