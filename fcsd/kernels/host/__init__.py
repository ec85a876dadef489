"""Sums between the GPUs of a host: through its memory, mapped, or in each other's, where they have peer access.

``sums.cu`` has the kernels, ``layout`` says how the memory is used and why it is right, and ``compiled`` builds and
starts the kernels. The slow reference is the sum in fp32 in the order of ranks, rounded once.
"""
