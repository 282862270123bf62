"""Keep-alive time of the platform's servers. Imports nothing: it is also imported in agents' own environments."""

KEEP_ALIVE_S = 600  # longer than clients keep idle connections, so that the server closes none just as it is reused
