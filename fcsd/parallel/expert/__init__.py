"""Expert parallelism of one MoE block: its experts and where they are, and how rows reach them and come back."""
