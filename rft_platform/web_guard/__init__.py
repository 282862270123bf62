"""Access control shared by the platform's web servers: Host, Origin and token checks, and an ASGI middleware."""
