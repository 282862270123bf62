"""Algorithms: advantages, losses, KL, aggregation, and the presets that combine them. Pure functions.

Functions are registered by name in three subpackages: ``losses``, ``advantages`` (computed from rewards
when a round is judged) and ``token_advantages`` (computed by the trainer). Read in this order:

1. ``presets`` (an ``algorithm_type`` as a ``Preset``; ``choose``: a preset with parts replaced);
2. ``common.registry`` (``Registry``, look-up by name), ``plugins`` (user modules that register functions);
3. ``spec`` (``ObjectiveSpec``, ``AlgorithmSpec``, ``OptimizerSpec``: settings of a training as plain values),
   ``objective`` (``Objective``: loss, correction, masks, KL, entropy per token), ``common.ratio`` (importance ratios),
   ``kl`` (estimators, coefficient of a KL penalty in the reward; the penalty is subtracted from the reward in
   ``training/data/token_advantages.py``);
4. ``aggregation`` (token losses to one number), ``value_loss`` (critic).
"""
