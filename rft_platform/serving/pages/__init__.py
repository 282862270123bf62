"""Web pages of the online service: live status, and preferences of people.

``routes`` serves them, ``reader`` has the threads that read the database for them; ``templates`` are Jinja templates;
``static`` has Pico CSS 2.1.1 (MIT) and htmx 2.0.11 (0BSD), unchanged from the npm registry, so that no page needs
another server.
"""
