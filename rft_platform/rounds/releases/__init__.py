"""Decisions about the versions of a project: which one is champion, which serve, which one is trained further.

1. ``promotion``: compare a policy with the champion, decide by the gate, roll back;
2. ``released``: the versions that are released, serve, or were withdrawn from production;
3. ``training_start``: the policy that a round's training starts from;
4. ``export``: a version as a folder for other programs, and its upload to the Hugging Face hub.
"""
