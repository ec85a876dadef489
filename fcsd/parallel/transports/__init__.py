"""How rows travel between ranks: by NCCL or gloo, or by copies into symmetric memory; as they are, or encoded."""
