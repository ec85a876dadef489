"""Chooses which rank holds which expert by counted routing, and moves the experts (HierMoE §IV)."""
