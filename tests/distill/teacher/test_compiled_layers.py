"""Compiled layers compute what uncompiled ones do, and are not compiled again for the shapes of generation."""

from pathlib import Path

import pytest
import runs
import tiny
import torch

from fcsd.distill.teacher.original import compile_layers, without_compiling
from fcsd.errors import ConfigError
from fcsd.models.build import decoder_layers, wire
from fcsd.models.wiring import Wiring


def test_compiled_layers_give_the_same_gradients(tmp_path: Path) -> None:
    recipe = runs.resolved(tmp_path, train__compile=True).recipe
    results = []
    for compiled in (False, True):
        model = tiny.model("llama").double()
        wire(model, Wiring("farskip", tuple(range(len(decoder_layers(model))))))
        if compiled:
            compile_layers(model, recipe, backend="aot_eager")
        ids = torch.arange(32).view(2, 16) % model.config.vocab_size
        model(ids, labels=ids, use_cache=False).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
        with without_compiling(recipe), torch.no_grad():
            results.append(dict(enumerate([model(ids[:, :7]).logits])))
    for one, other in zip(results[:2], results[2:], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            torch.testing.assert_close(other[name], value)
    assert decoder_layers(model)[0]._compiled_call_impl is not None


def test_without_the_field_nothing_is_compiled(tmp_path: Path) -> None:
    model = tiny.model("llama")
    compile_layers(model, runs.resolved(tmp_path).recipe)
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))


def test_divided_experts_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.compile needs parallel\.ep_size 1"):
        runs.resolved(tmp_path, train__compile=True, parallel__ep_size=2)
