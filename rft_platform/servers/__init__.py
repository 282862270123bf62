"""Servers and long-lived processes of a project: started together, watched, found again, ended."""
