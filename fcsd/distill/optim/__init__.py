"""The optimizer of a run, AdamW in each of its implementations, and the places of its states.

``adamw_choice`` says which implementation a recipe gets. ``adamw_norms`` and ``fcsd.kernels.adamw`` have what they
compute alike.
"""
