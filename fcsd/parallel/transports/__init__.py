"""Sends rows between ranks, by NCCL or gloo or by copies into symmetric memory, unchanged or encoded."""
