"""Decisions about the versions of a project: which one is champion, which serve, and which one is trained further.

1. ``promotion``: compare a policy with the champion, decide by the gate, roll back;
2. ``servable_versions``: the versions that can serve, that were imported from other projects, or were withdrawn;
3. ``training_start``: the policy that a round's training starts from.
"""
