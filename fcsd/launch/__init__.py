"""Starts and joins the processes of a run, on one node or on several, and reports facts about the machine."""
