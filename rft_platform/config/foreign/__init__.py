"""Convert configuration files of Trinity-RFT to the keys and names of this platform.

A *foreign key* or *foreign name* is one of Trinity-RFT that this platform does not have; a *foreign file* is a
configuration file of Trinity-RFT. Each foreign key is renamed, or accepted without effect (one line says what the
platform does instead), or refused with the reason. ``load`` converts a user's file after interpolation and before
validation.

Read in this order:

- ``keys``: the table of all foreign keys; ``treatments``: the three treatments of a key, and how they are applied.
- ``names``: tables of foreign names: workflows, rewards, algorithms and their arguments.
- ``convert``: ``convert``, which applies all of them; conversions of tasksets and stages; ``algorithms``: of
  algorithms; ``defaults``: defaults that differ.

``trl`` converts the settings of TRL's GRPO trainer, for ``rft config convert``.
"""
