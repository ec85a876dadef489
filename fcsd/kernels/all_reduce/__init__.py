"""All-reduces in one kernel: ranks write into each other's memory, over NVLink or PCIe, and sum.

``memory`` says how the memory is laid out, and ``programs`` is the Triton kernel. The slow reference is the sum in fp32
in the order of ranks.
"""
