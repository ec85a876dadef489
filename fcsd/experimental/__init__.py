"""What has not won its measurement yet: off unless a recipe names it, and not imported by the core until then.

Each feature has a folder, whose docstring says who named it, what it is to reach and until when, and what it has
reached. It moves into the core with its figure, or goes at its date into ``benchmarks/results/LOG.md``.
docs/slow_links.md lists them.
"""
