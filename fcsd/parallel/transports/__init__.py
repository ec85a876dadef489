"""How rows travel between ranks: NCCL or gloo, or copies into symmetric memory."""
