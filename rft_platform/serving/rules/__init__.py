"""Pure rules of the online service: they read neither the database nor requests.

- ``round_rows``: which committed rows a round takes.
"""
