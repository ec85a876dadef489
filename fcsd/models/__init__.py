"""Defines what a model computes: the wiring, one row of data for each architecture, and the classes made from both."""
