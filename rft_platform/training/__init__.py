"""The trainer group: training requests in, published checkpoints out.

A request (``TrainRequest``) names a parent checkpoint, the rows, an algorithm and an optimizer. The group trains on the
rows and publishes a checkpoint (``TrainResult``). It runs in processes of its own, one for each rank.

Read the files in this order:

1. ``protocol``, ``group``, ``launch``, ``wire``, ``server``, ``worker``: the messages, the client, the processes;
2. ``session``: the state machine that serves a request; ``plan``, ``rows``, ``samples``, ``batches``: rows and steps;
3. ``run_steps``, ``step``, ``window``: one optimiser step; ``preparation``, ``trajectories``: what comes before it;
4. ``packing``, ``logprobs``, ``attention``: rows as prefix trees, and exact log-probs and gradients over them;
5. ``critic``, ``distillation``, ``frozen``: models beside the policy; ``demonstrations``, ``preferences``: SFT and DPO;
6. ``state``, ``checkpoint``, ``draft``, ``publishing``, ``manifest``: the trainer state in memory and on disk.
"""
