"""The training loop: the stages of one training request.

``TrainingSession.train`` in ``session`` names the stages in order: rows and steps, parent state, precomputed values,
optimiser steps, checkpoint, result. Read it first, then:

1. ``plan`` (``TrainingPlan``: the rows of every optimiser step, and the digest of the training);
2. ``training_run`` (``TrainingRun``: what the stages share; manifest and result);
3. ``precompute`` (log-probs of reference and teacher, critic values, token advantages, before the first step);
4. ``optimizer_step`` (``OptimizerStep``: gradients, clipping, AdamW, critic, metrics);
5. ``gradients`` (log-probs, loss and backward pass, pack by pack; tokens that a loss selects from a whole step),
   ``kl_baseline`` (the KL that KTO subtracts);
6. ``critic_step``, ``distillation``, ``step_metrics``.
"""
