"""Models and optimizer in the memory of the ranks.

``loading`` reads a policy from a Hugging Face folder, prepares its layers and shards it with FSDP2; ``critic`` does so
for the value model (``PackedCritic``). ``optimizer`` is AdamW with its learning-rate schedule. ``trainer_state`` holds
them together (``TrainerState``). ``shards`` reads and writes sharded tensors, without pickle.

Read in this order: ``loading``, ``optimizer``, ``critic``, ``trainer_state``, ``shards``.
"""
