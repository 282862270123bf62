"""What is optimised: advantages, losses, KL, aggregation and the presets that name them. Pure functions."""
