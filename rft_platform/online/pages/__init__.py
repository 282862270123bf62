"""Web pages of the online service: live status with its history, and preferences of people.

``routes`` serves the pages and has the threads that read their data, ``history`` makes the charts of the traffic;
``shell`` has the files, headers and templates that all pages of the platform share, ``charts`` their charts;
``templates`` has Jinja templates; ``static`` has Pico CSS, htmx and Chart.js, unchanged from the npm registry (versions
and digests: ``BUNDLED`` of ``scripts/licences.py``), so that no page loads a file from another server.
"""
