"""The endpoints whose calls are recorded: what goes to the engine, what comes back, and what the caller gets of it."""
