"""The command line: one file per group of commands, and what they share."""
