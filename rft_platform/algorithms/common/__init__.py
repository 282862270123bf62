"""Common parts of all kinds of registered functions.

``registry`` looks functions up by name and checks their arguments (``Registry``). Losses, advantages and token
advantages have one registry each. ``ratio`` computes importance ratios, metrics of the mismatch between trainer and
rollout log-probs, and masks and weights from the ratios.
"""
