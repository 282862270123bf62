"""Policy losses, one file each, or one for a family. A loss returns values per token, and metrics as sums over tokens.

The caller weights, sums and normalises the values.

``registry`` defines ``TokenBatch`` (input), ``TokenLoss`` (output), the decorator ``loss`` with the properties of a
loss, and ``bind``; read it first. Then: ``ppo`` (also DAPO's clip-higher and dual clip), ``reinforce``, ``gspo``,
``gmpo``, ``cispo``, ``sapo``, ``topr``, ``opmd`` and ``rec`` (also sPPO) are policy-gradient losses, as are those of
``entropy`` (Clip-Cov, KL-Cov, Clip-B, Clip-V); ``sft`` and ``gkd`` learn from demonstrations and a teacher;
``mix`` combines ``ppo`` with demonstrations. ``preferences`` has the losses of preference pairs.

Default values of a loss's options are in its function's signature; a preset (``algorithms/presets.py``) may override
them.
"""
