"""What training and evaluation import, in one list: ``forks.py`` imports it once, for all commands that it starts.

A module that is missing here is no error: the command that needs it imports it then.
"""

# ruff: noqa: F401
import datasets.packaged_modules.json.json
import deepspeed
import deepspeed.module_inject.auto_ep_layer
import evalplus.provider.utility
import evaluate
import lm_eval.api.task
import lm_eval.evaluator
import lm_eval.tasks
import matplotlib.pyplot
import pandas
import torch.utils.cpp_extension
import transformers.models.deepseek_v2.modeling_deepseek_v2

import fcsd.cli.main
import fcsd.convert
import fcsd.distill.loop
import fcsd.distill.sweep.trials
import fcsd.eval.compare
import fcsd.eval.early_score
import fcsd.eval.harness
import fcsd.eval.tables
import fcsd.launch.nodes
