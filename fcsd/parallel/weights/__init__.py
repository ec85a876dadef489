"""Which tensors of a divided model make up which tensors on disk; loading, saving and random initialisation."""
