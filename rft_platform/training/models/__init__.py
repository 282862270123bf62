"""Models and optimizer in the memory of the ranks.

``loading`` reads a policy from a Hugging Face folder, prepares its layers and shards it with FSDP2; ``critic`` does the
same for the value model (``PackedCritic``). ``optimizer`` is AdamW with its learning-rate schedule. ``TrainerState`` in
``trainer_state`` combines policy, critic and optimizer. ``shards`` reads and writes sharded tensors, without pickle.

Read in this order: ``loading``, ``optimizer``, ``critic``, ``trainer_state``, ``shards``.
"""
