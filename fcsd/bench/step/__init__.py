"""The benchmark of a step, of training or of distillation: its variants in turns, their bound, and where time goes."""
