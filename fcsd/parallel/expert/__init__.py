"""Expert parallelism of one MoE block: routing, dispatch, experts, combine, and the DeepSpeed AutoEP adapter."""
