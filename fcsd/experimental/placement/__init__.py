"""Moves experts between ranks so that the busiest rank gets fewer rows: ``parallel.placement`` of a recipe.

- Source: HierMoE, section IV. Owner: the maintainers of ``fcsd/parallel/expert``.
- Aim: 5 % of a training step on nodes of several GPUs, searches counted in, by the end of June 2027.
- So far: two GPUs as two nodes, 4.9 % in bf16 and 1.4 % with INT8 rows, which is within the spread
  (benchmarks/results/placement.md). No run has been trained with it on GPUs.
"""
