"""The losses of distillation, from hidden states and output heads."""
