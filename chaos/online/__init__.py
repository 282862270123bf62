"""Kills and faults of the online service: ``python -m chaos.online``.

Read in this order: ``echo_engine`` and ``echo_service`` (processes that benchmarks use as well), ``collector`` (rounds
without training), ``forks`` (starts both in milliseconds), ``customers`` (the population that asks, rates and commits),
``campaign`` (the moments) and ``checks`` (what must hold in the end). ``served`` kills the processes of a
real ``rft serve`` instead.
"""
