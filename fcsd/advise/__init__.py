"""The verdict for a model and a machine: what to serve it by, what a conversion would bring, cost and lose."""
