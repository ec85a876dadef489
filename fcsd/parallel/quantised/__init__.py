"""Quantised communication: rows in fewer bits, and models that compute in one process what it delivers."""
