"""Heal a rewired model by distilling its original into it."""
