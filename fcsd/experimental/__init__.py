"""What has not won its measurement yet: off unless a recipe names it, and not imported by the core until then.

Each feature has a folder, whose docstring says who named it, what it is to reach and until when, and what it has
reached. It moves into the core with its figure, or goes at its date into ``benchmarks/results/LOG.md``.
docs/slow_links.md lists them.

Two things have not won either and stay where they are, because a folder of their own would need a second copy of what
has: ``parallel.dedup: node`` is an argument of the dispatcher of ``rank``, and formats of fewer than 4 bits or with
spikes are branches of the kernels of ``int8`` and ``int4``.
"""
