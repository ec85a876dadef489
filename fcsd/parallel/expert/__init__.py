"""Expert parallelism of one MoE block: which rank holds which expert, and how rows reach the experts and return."""
