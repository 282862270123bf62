"""Packed computation: rows that share a prefix compute it once, with exactly the results of separate rows.

``packing`` turns rows into tries (``Pack``); ``attention`` keeps the rows of a pack apart (``AttentionPlan``), on the
CPU and on CUDA; ``lm_head`` computes log-probs, entropies and the gradient of a loss chunk by chunk; ``packed_policy``
is the causal LM over packs (``PackedPolicy``).

Read in this order: ``packing``, ``attention``, ``lm_head``, ``packed_policy``. In addition:
``model_support`` (which models can be packed), ``model_check`` (checks this from a model's
configuration), ``flops`` (operations of packs, peak throughput of a device).
"""
