"""Losses against the collapse of the entropy. They select tokens from all rows of a step and change their loss.

``covariance`` (Clip-Cov, KL-Cov) selects by the covariance of log-prob and advantage, ``entropy_clip`` (Clip-B, Clip-V)
by the influence of a token's logit on the entropy.
"""
