"""The side of TRL: its ``GKDTrainer`` on the rows of the data set (lmbda 0), with KL(teacher ‖ student) (beta 0).

The trainer computes the logits of student and teacher in full. It accepts token ids and a padding mask but no position
ids, so a row can only hold one document.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.distill.baselines.loop import workers
from benchmarks.distill.baselines.master_weights import MasterWeightsAdamW
from benchmarks.distill.baselines.setting import Setting, Side, Watch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback

from fcsd.distill.data.rows import batch
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.optim.adamw_choice import adamw_settings
from fcsd.distill.teacher.targets import compile_layers


def training(*, fp32_logits: bool) -> Side:
    """The ``Side`` that trains with TRL.

    Args:
        fp32_logits: whether accelerate runs the models under bf16 autocast and converts the logits to fp32, which is
            TRL's default. Otherwise the models run as they are, and the divergence is computed in their dtype.
    """

    def side(setting: Setting, watch: Watch) -> float:
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.gkd import GKDConfig, GKDTrainer  # pyright: ignore[reportMissingImports]

        recipe, on_cuda = setting.recipe, setting.world.device.type == "cuda"
        student = setting.new_student()
        compile_layers(student, recipe)
        teacher = setting.plain_teacher()
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        optimizer = MasterWeightsAdamW(trained, **adamw_settings(recipe))
        with tempfile.TemporaryDirectory() as folder, alone():
            settings = GKDConfig(
                output_dir=folder,
                lmbda=0.0,
                beta=0.0,
                temperature=recipe.objective.temperature,
                max_steps=watch.steps,
                per_device_train_batch_size=recipe.train.micro_batch_size,
                gradient_accumulation_steps=setting.accumulation,
                gradient_checkpointing=recipe.train.activation_checkpointing,
                learning_rate=recipe.optim.lr,
                lr_scheduler_type="constant",
                max_grad_norm=recipe.optim.grad_clip,
                bf16=fp32_logits and on_cuda,
                use_cpu=not on_cuda,
                max_length=recipe.data.seq_len,
                train_sampling_strategy="sequential",
                dataloader_num_workers=workers(setting.world.device),
                logging_first_step=True,  # the loss of the first step, which is not timed, is read from the log
                logging_steps=watch.steps + 1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            trainer = GKDTrainer(
                model=student,
                teacher_model=teacher,
                args=settings,
                data_collator=collate,
                train_dataset=dataset(setting, setting.recipe.rows_per_step * watch.steps),
                processing_class=tokenizer(),
                callbacks=[_steps_of(watch)],
                optimizers=(optimizer, None),  # pyright: ignore[reportArgumentType]: the trainer makes the missing scheduler
            )
            trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is reserved for data
            # The trainer takes the batches of a whole step here, before it begins the step.
            fetch = trainer.get_batch_samples

            def get_batch_samples(*arguments: Any, **options: Any) -> Any:
                with watch.waiting_for_data():
                    return fetch(*arguments, **options)

            trainer.get_batch_samples = get_batch_samples
            trainer.train()
            loss = trainer.state.log_history[0]["loss"]
            trainer.accelerator.free_memory()
            return loss

    return side


def dataset(setting: Setting, count: int) -> Dataset:
    """The first ``count`` rows of the run, as columns ``input_ids`` and ``labels``."""
    ids = batch(setting.rows, range(count))["input_ids"]
    labels = ids.clone()
    labels[:, 0] = IGNORE  # no position predicts it
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()})


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch of rows of ``dataset``: ``input_ids``, ``labels`` and ``attention_mask``, each ``[batch, seq]``."""
    columns = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    return {**columns, "attention_mask": torch.ones_like(columns["input_ids"])}


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of three words. The trainer requires one, but the rows are token ids already."""
    words = WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")


@contextmanager
def alone() -> Iterator[None]:
    """Hides the variables of torchrun that DeepSpeed needs. accelerate would wrap the model for several processes."""
    hidden = {name: os.environ.pop(name) for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _steps_of(watch: Watch) -> TrainerCallback:
    """A callback that reports the end of each step to the watch."""

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.ended(state.global_step)

    return Steps()
