"""All-reduces of a tensor-parallel model, each started and awaited apart: NCCL, symmetric memory, quantised."""
