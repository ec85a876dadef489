"""What a model computes if its communication is quantised, simulated in one process for studies of quality."""
