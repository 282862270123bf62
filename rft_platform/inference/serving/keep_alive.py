"""How long the servers of the platform hold an idle connection. Imports nothing: an agent's environment has little."""

KEEP_ALIVE_S = 600  # longer than any client keeps an idle connection, so that none is closed as it is used again
