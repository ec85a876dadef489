"""Adapters of a run: how they are put into the student, saved, and merged into ordinary weights."""
