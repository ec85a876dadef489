"""The benchmark of the whole distillation step: variants of one step, their bound, and where the time goes."""
