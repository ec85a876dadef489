"""``fcsd cache-teacher``: run the teacher once over the rows of a recipe and keep what it says."""

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fcsd.config import Recipe, ResolvedRecipe
from fcsd.distill import run_dir, teacher_cache
from fcsd.distill.corpus import load_tokenizer
from fcsd.distill.data import Mixture, batch
from fcsd.distill.engine import DTYPES
from fcsd.distill.losses import IGNORE
from fcsd.distill.student import student_source
from fcsd.distill.targets import Teacher
from fcsd.distill.teacher import (
    expect_fingerprint,
    final_hidden,
    identify_teacher,
    load_teacher,
    output_head,
    teacher_name,
)
from fcsd.distill.top_k import TopK, top_k
from fcsd.errors import ConfigError, NonFiniteError
from fcsd.launch import World, join_world

log = logging.getLogger(__name__)

_SHARD_BYTES = 256 << 20
