"""Demo of online training: a tiny model learns from its users' ratings to send each question to the right department.

Read in this order:

- ``questions``: the departments, their customers' questions, and demonstrations that name a department by chance.
- ``customers``: the simulated customers: they ask, rate late and noisily, comment, and commit their ratings.
- ``run``: ``prepare()`` writes model, demonstrations, held-out questions and configuration into one folder; ``run()``
  starts ``rft serve`` and the customers. ``__main__`` is its command.
"""
