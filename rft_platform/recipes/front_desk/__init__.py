"""Demo of online training: a tiny model learns from its users' ratings to send each question to the right department.

Read in this order:

- ``questions``: the departments, their customers' questions, and demonstrations that name a department by chance.
- ``prepare``: ``prepare()`` writes model, demonstrations, held-out questions and configuration into one folder.
- ``customers``: the simulated population: it asks, rates late and noisily, comments and commits.
- ``__main__``: starts ``rft serve`` and the customers, and prints the success rate of each policy version.
"""
