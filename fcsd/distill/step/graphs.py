"""Runs the passes of a micro-batch on fixed buffers, on a GPU as CUDA graphs.

The host starts thousands of kernels in a step. With a small model this takes longer than the kernels themselves. If
shapes and addresses do not change, CUDA can record the kernels of a pass once, and the host then starts all of them
with one call. Two graphs are recorded: one for the teacher's pass, the student's forward pass and the losses, and one
for the student's backward pass. The rest of the step runs as without graphs: DeepSpeed receives the gradients from
autograd, and the optimizer and all collectives are outside of the graphs.

While the wiring is annealed, it depends on the step, so the passes are computed without graphs. They are captured when
the annealing has ended.

Two shapes depend on the data, and are made independent of it. The losses are computed for all positions, also for
those that do not count. The borders of the documents are padded with empty documents at the end.

``Passes`` without ``capture`` computes the same functions on the same buffers without a graph. This is the reference,
and the only way on a CPU.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers import PreTrainedModel

from fcsd.config import Recipe
from fcsd.distill.loss.top_k import TopK
from fcsd.distill.step.engine import Student, Training
from fcsd.distill.teacher.targets import FixedLosses, Targets, TeacherSource
from fcsd.errors import ConfigError
from fcsd.foreign_errors import reason_of
from fcsd.kernels.packed_attention import takes_borders
from fcsd.models.annealed import Annealing
from fcsd.models.build import arch_of

_WARM_UPS = 2  # runs before the capture, in which kernels are compiled and libraries allocate their workspaces
# (columns of a micro-batch, denominator) -> the loss terms [terms] fp32
Losses = Callable[[dict[str, Tensor], Tensor], Tensor]


def with_fixed_passes(training: Training, recipe: Recipe, models: Sequence[Any]) -> Training:
    """The training whose passes run on fixed buffers, if the recipe has ``train.graph``; otherwise ``training``.

    Call this after a checkpoint is loaded. The capture itself takes place in the first step that is not annealed.

    Args:
        models: the student's model and, if there is one, the teacher's.

    Raises:
        ConfigError: a model has linear attention, or on a GPU cannot use packed attention, without which the shapes
            depend on the data.
    """
    if not recipe.train.graph:
        return training
    on_gpu = models[0].device.type == "cuda"
    for model in models:
        arch = arch_of(model.config)
        if arch.blocks.linear is not None:
            raise ConfigError(
                f"train.graph cannot run {model.config.model_type}: its attention takes each document as a row, and "
                "their lengths differ",
                hint="set train.graph: false",
            )
        if on_gpu and not takes_borders(model):
            raise ConfigError(
                f"train.graph needs packed attention, which {model.config.model_type} does not have here",
                hint="packed attention needs train.attention packed, train.dtype bf16, and layers that attend to all "
                "earlier tokens; or set train.graph: false",
            )
    passes = FixedPasses(Student(training.model, recipe.objective), training.source, training.annealing, capture=on_gpu)
    return replace(training, source=passes)


class FixedPasses(TeacherSource):
    """Computes the loss terms of micro-batches that all have one number of rows and tokens, targets included.

    Args:
        source: gives the targets inside the passes, and where nothing is trained.
        annealing: see ``Training``.
        capture: whether the passes are captured as CUDA graphs.
    """

    def __init__(
        self, student: Student, source: TeacherSource, annealing: Annealing | None = None, *, capture: bool
    ) -> None:
        self.any_text = source.any_text
        self._student, self._source, self._capture = student, source, capture
        self._named = {name: p for name, p in student.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        self._annealing = annealing
        self._passes: Passes | None = None
        self._made_for: Any = None  # the terms, whether to capture, and the addresses of the weights

    def get_targets(self, columns: dict[str, Tensor], stored: TopK | None = None) -> Targets | FixedLosses | None:
        """See ``TeacherSource``. In training they are this object itself."""
        return self if torch.is_grad_enabled() else self._source.get_targets(columns, stored)

    def teacher(self) -> AbstractContextManager[PreTrainedModel | None]:
        return self._source.teacher()

    def __call__(self, batch: dict[str, Tensor], denominator: Tensor, terms: tuple[str, ...]) -> dict[str, Tensor]:
        """The loss terms by name; arguments and results are those of ``Student.forward``.

        The passes are made in the first call. They are made again if a micro-batch has more documents than fit, if the
        weights are at other addresses, or when the annealing has ended. None of these changes the results.
        """
        annealed = self._annealing is not None and self._annealing.weight < 1
        capture = self._capture and not annealed
        made_for = (terms, capture, [parameter.data_ptr() for parameter in self._parameters])
        if self._passes is None or made_for != self._made_for or not self._passes.fits(batch):
            self._passes = None  # the memory of earlier graphs is freed first
            # DeepSpeed's hooks tie each parameter's gradient to the default stream, on which nothing can be captured.
            # The passes therefore compute the gradients of other tensors, which share the memory of the parameters.
            aliases = {name: parameter.detach().requires_grad_() for name, parameter in self._named.items()}
            losses = self._losses(terms, aliases)
            self._passes = Passes(losses, list(aliases.values()), batch, denominator, capture=capture)
            self._made_for = made_for
        found = _Replayed.apply(self._passes, batch, denominator, *self._parameters)
        return dict(zip(terms, found.unbind(), strict=True))  # pyright: ignore[reportOptionalMemberAccess]

    def _losses(self, terms: tuple[str, ...], aliases: dict[str, Tensor]) -> Losses:
        def losses(columns: dict[str, Tensor], denominator: Tensor) -> Tensor:
            targets = self._source.get_targets(columns)
            found = functional_call(self._student, aliases, (columns, targets, denominator, terms))
            return torch.stack([found[name] for name in terms])

        return losses


class Passes:
    """The forward and the backward pass of a function of fixed buffers.

    Args:
        losses: computes the loss terms. If the passes are captured, it must read nothing that changes but its arguments
            and ``parameters``.
        parameters: the tensors whose gradients the backward pass computes. Their addresses must not change.
        batch: the columns of a micro-batch, see ``MicroBatch``; the buffers get its shapes.
        denominator: ``[]``, the number by which the sums over tokens are divided.
        capture: whether the passes are captured as CUDA graphs; otherwise each call computes them anew.

    Raises:
        ConfigError: the passes cannot be captured, for example because the host waits for the device in them.
    """

    def __init__(
        self,
        losses: Losses,
        parameters: Sequence[Tensor],
        batch: dict[str, Tensor],
        denominator: Tensor,
        *,
        capture: bool,
    ) -> None:
        self._losses, self._parameters = losses, tuple(parameters)
        ids = batch["input_ids"]
        self._columns = {name: batch[name].clone() for name in ("input_ids", "position_ids", "labels")}
        # Room for twice as many documents, as a power of two. It is more than one document for each row, for which
        # attention would be computed in another way.
        room = 2 ** math.ceil(math.log2(2 * len(batch["borders"])))
        self._columns["borders"] = batch["borders"].new_full((room + 1,), ids.numel())
        self._columns["kept"] = torch.arange(ids.numel(), device=ids.device)  # all positions
        self._denominator = denominator.clone()
        self._fill(batch, denominator)
        self._terms = self._upstream = torch.empty(0)
        self._gradients: tuple[Tensor | None, ...] = ()
        self._graphs = self._captured() if capture else None

    def fits(self, batch: dict[str, Tensor]) -> bool:
        """Whether a micro-batch has the shape of the buffers, and not more documents than there is room for."""
        same = batch["input_ids"].shape == self._columns["input_ids"].shape
        return same and len(batch["borders"]) <= len(self._columns["borders"])

    def forward(self, batch: dict[str, Tensor], denominator: Tensor) -> Tensor:
        """The loss terms ``[terms]`` of a micro-batch, without a graph of autograd."""
        self._fill(batch, denominator)
        if self._graphs is None:
            with torch.enable_grad():
                self._terms = self._losses(self._columns, self._denominator)
        else:
            self._graphs[0].replay()
        return self._terms.detach().clone()

    def backward(self, upstream: Tensor) -> list[Tensor | None]:
        """The gradients of the last micro-batch with respect to the parameters, in their order.

        The tensors are new ones, because autograd may keep them as ``.grad`` and add the next micro-batch to them.

        Args:
            upstream: ``[terms]``, the gradient with respect to the loss terms.
        """
        if self._graphs is None:
            return list(torch.autograd.grad(self._terms, self._parameters, upstream, allow_unused=True))
        self._upstream.copy_(upstream)
        self._graphs[1].replay()
        # One kernel copies many tensors here; ``clone`` would start one kernel for each of them.
        multiply: Any = torch._foreach_mul  # pyright: ignore[reportPrivateImportUsage]
        copies = iter(multiply([found for found in self._gradients if found is not None], 1.0))
        return [None if found is None else next(copies) for found in self._gradients]

    def _fill(self, batch: dict[str, Tensor], denominator: Tensor) -> None:
        """Copies a micro-batch into the buffers."""
        for name in ("input_ids", "position_ids", "labels"):
            self._columns[name].copy_(batch[name])
        borders = self._columns["borders"]
        borders.fill_(self._columns["input_ids"].numel())
        borders[: len(batch["borders"])].copy_(batch["borders"])
        self._denominator.copy_(denominator)

    def _captured(self) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
        """Captures both passes. The thread that prepares data goes on meanwhile, so only this thread is restricted."""
        stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(before)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        how: Any = {"stream": stream, "capture_error_mode": "thread_local"}
        with torch.enable_grad():
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    terms = self._losses(self._columns, self._denominator)
                    self._upstream = torch.ones_like(terms)
                    torch.autograd.grad(terms, self._parameters, self._upstream, allow_unused=True)
                    del terms
            before.wait_stream(stream)
            try:
                with torch.cuda.graph(forward, **how):
                    self._terms = self._losses(self._columns, self._denominator)
                with torch.cuda.graph(backward, pool=forward.pool(), **how):
                    self._gradients = torch.autograd.grad(
                        self._terms, self._parameters, self._upstream, allow_unused=True
                    )
            except RuntimeError as error:
                torch.cuda.set_stream(before)  # a capture that fails leaves its own stream current
                cause = error.__context__ or error  # the end of a failed capture raises an error of its own
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                raise ConfigError(
                    f"the passes of this model cannot be captured as CUDA graphs: {reason_of(cause)}",
                    hint="set train.graph: false",
                ) from error
        self._terms = self._terms.detach()
        return forward, backward


class _Replayed(torch.autograd.Function):
    """Lets autograd run ``Passes``: its backward pass hands the gradients of the parameters to autograd."""

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, batch: dict[str, Tensor], denominator: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.passes = passes
        return passes.forward(batch, denominator)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        return (None, None, None, *ctx.passes.backward(upstream))
