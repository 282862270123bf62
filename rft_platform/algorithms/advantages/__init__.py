"""Advantages from rewards, one function per file: pure NumPy, vectorised over rows.

They are computed when a round is judged. ``registry`` defines the decorator ``advantage``, the inputs of an advantage
function and the entry point ``compute_advantages``; read it first. Then read ``grpo`` (also ``centre``, which most
others use), ``rloo``, ``remax``, ``opmd``, ``asymre``, ``step_wise_grpo`` and ``gigpo``.
"""
