"""Finds out what a path or repository holds, from file names, headers and config.json alone; no weight is read."""

from fcsd.checkpoint.checkpoint import Checkpoint, content_sha256, fingerprint, whole_sha256
from fcsd.checkpoint.config_json import CheckpointConfig, read_config
from fcsd.checkpoint.files import INDEX, SINGLE, Layout, contained, read_header, read_layout, read_object
from fcsd.checkpoint.inspection import inspect_checkpoint
from fcsd.checkpoint.location import expect_directory, open_checkpoint
from fcsd.checkpoint.verify import Comparison, compare_tensors, verify_tensors

__all__ = [
    "INDEX",
    "SINGLE",
    "Checkpoint",
    "CheckpointConfig",
    "Comparison",
    "Layout",
    "compare_tensors",
    "contained",
    "content_sha256",
    "expect_directory",
    "fingerprint",
    "inspect_checkpoint",
    "open_checkpoint",
    "read_config",
    "read_header",
    "read_layout",
    "read_object",
    "verify_tensors",
    "whole_sha256",
]
