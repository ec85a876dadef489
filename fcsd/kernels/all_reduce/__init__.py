"""All-reduces in one kernel: ranks write into each other's memory, or read from it, over NVLink or PCIe, and sum.

``memory`` says how the memory is laid out, ``programs`` and ``programs_quantised`` are the Triton kernels, and
``launch`` starts them. The slow reference is the sum in fp32 in the order of ranks, and for quantised values
``parallel.quantised.simulated_all_reduce``.
"""
