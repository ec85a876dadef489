"""The processes of a run: starting them, joining them, several nodes, and what they report about their machine."""
