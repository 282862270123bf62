"""Advantages of single tokens, one function per file: pure NumPy, computed by the trainer from values and log-probs.

``registry`` defines the input ``Trajectories``, the output ``TokenAdvantages``, the decorator ``token_advantage`` and
the entry point ``compute_token_advantages``; read it first. Then read ``gae`` (PPO with a critic),
``reinforce_plus_plus`` and ``on_policy_distill``. The registry also has sums over runs, and normalises
over the tokens of all ranks.
"""
