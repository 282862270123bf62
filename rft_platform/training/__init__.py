"""The trainer group: training requests in, published checkpoints out.

A request (``TrainRequest``) names a parent checkpoint, the rows, an algorithm and an optimizer. The group trains on the
rows and publishes a checkpoint (``TrainResult``). It runs in its own processes, one for each rank.

Start with ``loop.session``: ``TrainingSession.train`` serves one request, and its body names every stage in order.

- ``protocol``, ``distributed``, ``launch``, ``join``: requests and results; the ranks; how a group is started;
- ``service``: the client of the group, and the process of a rank;
- ``loop``: the stages of a training; ``data``: its rows; ``packed``: rows as prefix trees, log-probs and gradients;
- ``models``: policy, critic and optimizer in memory; ``checkpoint``: policy, critic and optimizer on disk.
"""
