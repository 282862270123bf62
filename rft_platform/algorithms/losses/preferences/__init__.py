"""Losses of preference pairs: whole pairs at a time, one loss per pair.

``pairs`` has the differences between the two rows of each pair, and the metrics; read it first. ``dpo``, ``ipo`` and
``hinge`` compare log-probs with those of a reference model; ``kto`` does so for each row of a pair alone. ``simpo`` and
``orpo`` need no reference model.
"""
