"""The trainer group: training requests in, published checkpoints out.

A request (``TrainRequest``) names a parent checkpoint, the rows, an algorithm and an optimizer. The group trains on the
rows and publishes a checkpoint (``TrainResult``). It runs in processes of its own, one for each rank.

Start with ``session``: ``TrainingSession.train`` serves one request, and its body names every stage in order. Then:

1. ``plan``, ``rows``, ``samples``, ``offline_data``, ``conversations``: the rows of a request and its optimiser steps;
2. ``training_run``, ``optimiser_step``, ``step``, ``window``: one optimiser step; ``critic_step``, ``distillation``;
3. ``precompute``, ``trajectories``: what rows need before the first step;
4. ``packing``, ``logprobs``, ``lm_head``, ``attention``: rows as prefix trees, exact log-probs and gradients over them;
5. ``model``, ``critic``, ``optimizer``, ``state``, ``shards``: the trainer state in memory;
6. ``manifest``, ``checkpoint``, ``draft``, ``publishing``, ``intermediate``: the trainer state on disk;
7. ``protocol``, ``group``, ``launch``, ``rpc``, ``worker``, ``ranks``: the messages, the client, the processes.
"""
