"""Checks of a configuration, made before anything starts. Each yields findings; a finding of a problem says its fix.

Read ``settings`` first: it lists all checks, and has those of single settings, names, tasks and schedules.

- ``algorithm``: settings that do not fit the algorithm, its loss or its data.
- ``batches``: sizes of batches, rounds and steps, and how far the explorer runs ahead.
- ``models``: auxiliary models and policies.
- ``machine``: files, processors and GPUs of this machine, and the interpreter of worker processes.
- ``notices``: settings that have no effect, or are perhaps not intended.
"""
