"""Common parts of all kinds of registered functions.

``registry`` looks functions up by name and checks their arguments (``Registry``); losses, advantages and token
advantages each have one. ``ratio`` computes importance ratios, the metrics of the mismatch between trainer and rollout
log-probs, and the masks and weights made from it.
"""
