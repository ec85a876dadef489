"""One optimizer step: the rows it reads, the passes that it takes, and their CUDA graphs."""
