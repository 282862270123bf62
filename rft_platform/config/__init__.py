"""Configuration of a run: schema of ``rft.yaml``, loading, checks, the derived settings, and the dry-run plan.

Read in this order: ``schema`` (``RftConfig``, the whole file) and the modules of its sections (``buffer``, ``trainer``
with ``algorithm_parts``, ``explorer``, ``evaluation``, ``data_processor``, ``policies``; ``section`` is their base
class); ``load`` (YAML to ``RftConfig``; ``paths`` helps it); ``resolve`` (``RunSettings``: the preset merged with the
configuration, batch sizes, number of rounds); ``checks`` (``check_config``, which calls the ``checks_*`` modules and
``offline``); ``plan`` (what ``rft run --dry-run`` prints); ``resume`` (which settings a started project may change);
``home`` (the folders below ``RFT_HOME``); ``limits`` (bounds on workflow runs).
"""
