"""The invariants of a project that has survived its kills.

``context`` defines ``Context`` (a finished project and its undisturbed reference) and ``Finding`` (one violation).
``machine`` checks processes and files, ``store`` rows and checkpoints, ``services`` MLflow and Dagster, ``reference``
equality with the undisturbed run. ``checks`` lists all invariants and runs them.
"""
