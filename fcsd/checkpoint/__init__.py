"""Finds out what a path or repository holds, from file names, headers and config.json alone; no weight is read."""

from fcsd.checkpoint.config_json import CheckpointConfig, read_config
from fcsd.checkpoint.files import contained, read_object
from fcsd.checkpoint.fingerprint import content_sha256, fingerprint, sample_sha256, whole_sha256
from fcsd.checkpoint.headers import read_header
from fcsd.checkpoint.inspection import inspect_checkpoint
from fcsd.checkpoint.kind import expect_directory
from fcsd.checkpoint.layout import INDEX, SINGLE, Layout, read_layout
from fcsd.checkpoint.location import Location, remote_headers, resolve
from fcsd.checkpoint.verify import Comparison, compare_tensors, verify_tensors

__all__ = [
    "INDEX",
    "SINGLE",
    "CheckpointConfig",
    "Comparison",
    "Layout",
    "Location",
    "compare_tensors",
    "contained",
    "content_sha256",
    "expect_directory",
    "fingerprint",
    "inspect_checkpoint",
    "read_config",
    "read_header",
    "read_layout",
    "read_object",
    "remote_headers",
    "resolve",
    "sample_sha256",
    "verify_tensors",
    "whole_sha256",
]
