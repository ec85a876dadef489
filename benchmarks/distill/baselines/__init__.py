"""The distillation step of fcsd beside those of public trainers: TRL, and a plain loop with a fused divergence."""
