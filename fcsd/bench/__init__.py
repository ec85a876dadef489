"""Measures a machine for its user, `fcsd bench NAME`: its links, and how fast a converted model would be served."""
