"""Distillation: restores the quality of a rewired model by training it to match its original."""
