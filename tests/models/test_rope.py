"""Rotary factors that depend on the length of a pass: every sequence gets what it gets alone, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import runs
import texts
import tiny
import torch

from fcsd.distill.inputs import student_source
from fcsd.distill.run.report import read_metrics
from fcsd.distill.student import student_config
from fcsd.distill.teacher.targets import identify_teacher
from fcsd.distill.writer import Writer, Writing
from fcsd.engine.batches import generate_in_batch
from fcsd.engine.generate import BATCHES, SLOTS, generate
from fcsd.engine.logprobs import Request, continuation_logprobs
from fcsd.engine.slots import why_no_slots
from fcsd.errors import ConfigError
from fcsd.models.rope import RopeBorder, rope_border
from fcsd.plan.model import MetaModel

BORDER = 32
_FACTORS: dict[str, Any] = dict(short_factor=[1.0] * 8, long_factor=[4.0 + n for n in range(8)])
_LONG: dict[str, Any] = dict(rope_type="longrope", rope_theta=50.0, original_max_position_embeddings=BORDER, **_FACTORS)
LONGROPE: dict[str, Any] = dict(rope_parameters=_LONG, original_max_position_embeddings=BORDER, initializer_range=0.2)
_LATENT = _LONG | dict(short_factor=[1.0] * 4, long_factor=[4.0 + n for n in range(4)])
_SCALED = _LONG | dict(short_mscale=1.0, long_mscale=1.4)
MODELS: dict[str, dict[str, Any]] = {
    "phi3": LONGROPE,
    "phimoe": dict(rope_parameters=_SCALED, initializer_range=0.2),
    "minicpm3": dict(rope_parameters=_LATENT, initializer_range=0.2),
}
DYNAMIC: dict[str, Any] = dict(
    rope_parameters=dict(rope_type="dynamic", rope_theta=50.0, factor=4.0),
    max_position_embeddings=BORDER,
    initializer_range=0.2,
)


def ids(length: int, seed: int = 3) -> list[int]:
    return tiny.tokens(1, length, seed)[0].tolist()


def beside_long_ones() -> list[Request]:
    """Contexts of both sides of the border, some with two choices; choices of one context lie on both sides."""
    across, below, above = tuple(ids(27)), tuple(ids(9)), tuple(ids(40))
    return [
        *((below, choice) for choice in ((5, 6, 7), tuple(ids(20)))),
        *((across, choice) for choice in ((5, 6), tuple(ids(20)))),
        *((tuple(ids(31, 4)), choice) for choice in ((5, 2), (7, 2))),  # their inputs end at the border
        *((above, choice) for choice in ((5, 6), (9, 3, 8))),
        (tuple(ids(12, 5)), (4, 5)),
        (tuple(ids(50, 5)), (4, 5)),
    ]


@torch.no_grad()
def alone(model: Any, request: Request) -> float:
    """The log-probability from a pass of its own."""
    context, continuation = request
    logits = model(input_ids=torch.tensor([[*context, *continuation[:-1]]]), use_cache=False).logits[0].float()
    found = logits.log_softmax(-1)[len(context) - 1 :]
    return float(found[range(len(continuation)), list(continuation)].sum())


@torch.no_grad()
def continued_alone(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from a pass over all before it, without a cache."""
    tokens = [*prompt]
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("arch", MODELS)
def test_every_request_has_the_answer_of_a_pass_of_its_own(arch: str) -> None:
    model, requests = tiny.model(arch, **MODELS[arch]), beside_long_ones()
    found = continuation_logprobs(model, requests)
    for index, request in enumerate(requests):
        assert found[index][0] == pytest.approx(alone(model, request), abs=1e-3), request


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize("way", [BATCHES, SLOTS])
def test_every_prompt_is_continued_as_alone(arch: str, way: str) -> None:
    """Some answers cross the border, some end before it, and some begin beyond it."""
    model = tiny.model(arch, **MODELS[arch])
    prompts = [ids(length, seed=length) for length in (4, 28, 32, 33, 40, 14)]
    expected = [continued_alone(model, prompt, 12) for prompt in prompts]
    found = dict(generate(model, prompts, max_new_tokens=12, ended=lambda answer, seen: None, way=way))
    assert [found[index] for index in range(len(prompts))] == expected
    together = generate_in_batch(model, prompts, max_new_tokens=12, ended=lambda answer, seen: None)
    assert together == expected, "prompts of both sides in one call"


def test_answers_that_have_ended_do_not_lead_the_others_beyond_the_border() -> None:
    """Rows stay in a batch for a while after their end, and slots until the host looks."""
    model = tiny.model("phi3", **LONGROPE)
    prompts = [ids(length, seed=length) for length in (30, 5, 6, 7, 8, 9)]
    expected = [continued_alone(model, prompt, 12) for prompt in prompts]
    stop = expected[0][0]

    def ended(answer: list[int], seen: int) -> int | None:
        return 1 if answer[0] == stop else None

    whole = [answer[:1] if answer[0] == stop else answer for answer in expected]
    assert len(whole[0]) == 1 and max(map(len, whole)) == 12
    assert generate_in_batch(model, prompts, max_new_tokens=12, ended=ended) == whole
    prompts = [ids(length, seed=length) for length in (20, 5, 6)]  # the first slot is empty while the last one runs
    settings: Any = dict(max_new_tokens=12, ended=lambda answer, seen: None, batch_size=2)
    found = dict(generate(model, prompts, way=SLOTS, **settings))
    assert [found[index] for index in range(3)] == [continued_alone(model, prompt, 12) for prompt in prompts]
    assert why_no_slots(model, BORDER) is None and why_no_slots(model, BORDER + 1) is not None


def test_factors_of_every_length_are_refused_beyond_the_border() -> None:
    model = tiny.model("llama", **DYNAMIC)
    inside: list[Request] = [(tuple(ids(length)), (5, 6)) for length in (31, 9, 20)]
    found = continuation_logprobs(model, inside)
    for index, request in enumerate(inside):
        assert found[index][0] == pytest.approx(alone(model, request), abs=1e-3)
    settings: Any = dict(max_new_tokens=5, ended=lambda answer, seen: None)
    assert generate_in_batch(model, [ids(28)], **settings) == [continued_alone(model, ids(28), 5)]
    refused = f"dynamic: its rotary factors change with every token beyond {BORDER}, and {BORDER + 1} are needed"
    with pytest.raises(ConfigError, match=refused):
        continuation_logprobs(model, [(ids(32), (5, 6))])
    with pytest.raises(ConfigError, match=refused):
        generate_in_batch(model, [ids(29)], **settings)
    for way in (BATCHES, SLOTS):
        with pytest.raises(ConfigError, match=refused):
            list(generate(model, [ids(29)], way=way, **settings))


def test_the_border_is_read_from_the_config() -> None:
    assert rope_border(tiny.config("llama")) is None
    assert rope_border(tiny.config("ministral3")) is None, "yarn has one set of factors"
    assert rope_border(tiny.config("phi3", **LONGROPE)) == RopeBorder("longrope", BORDER, exact=False)
    assert rope_border(tiny.config("llama", **DYNAMIC)) == RopeBorder("dynamic", BORDER, exact=True)
    sliding = dict(rope_type="default", rope_theta=9.0)
    by_layer = dict(full_attention=DYNAMIC["rope_parameters"], sliding_attention=sliding)
    gemma = tiny.config("gemma3_text", rope_parameters=by_layer, max_position_embeddings=BORDER)
    assert rope_border(gemma) == RopeBorder("dynamic", BORDER, exact=True)
    inner = tiny.config("qwen2_vl", **DYNAMIC)
    assert rope_border(inner) == RopeBorder("dynamic", BORDER, exact=True), "the text config of a vision model"


@pytest.mark.parametrize("arch", ["llama", "phimoe"])
def test_models_are_counted_without_values(arch: str, tmp_path: Path) -> None:
    plain, changed = tiny.config(arch), tiny.config(arch, **MODELS.get(arch, DYNAMIC))
    plain.save_pretrained(tmp_path / "plain")
    changed.save_pretrained(tmp_path / "changed")
    assert MetaModel(str(tmp_path / "changed")).numbers == MetaModel(str(tmp_path / "plain")).numbers


@pytest.mark.parametrize(("arch", "changes"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
def test_rows_beyond_the_border_are_refused_for_student_and_teacher(
    arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    runs.write_models(tmp_path, arch, **{key: changes[key] for key in changes if key != "initializer_range"})
    refused = f"change beyond {BORDER} tokens, and data.seq_len is {2 * BORDER}"
    long = runs.resolved(tmp_path, data__seq_len=2 * BORDER).recipe
    with pytest.raises(ConfigError, match=refused) as student:
        student_config(long, student_source(long))
    assert student.value.hint == f"Set data.seq_len to at most {BORDER}."
    with pytest.raises(ConfigError, match="teacher .*" + refused):
        identify_teacher(long.model_copy(update={"teacher": str(tmp_path / "teacher")}))
    fits = runs.resolved(tmp_path, data__seq_len=BORDER).recipe
    assert student_config(fits, student_source(fits)) is not None
    assert identify_teacher(fits.model_copy(update={"teacher": str(tmp_path / "teacher")}))


def test_a_model_with_factors_of_every_length_is_healed_as_if_it_had_one_set(tmp_path: Path) -> None:
    """Rows that are inside of the border: the same losses as those of the model without the rope type."""
    changes = {key: DYNAMIC[key] for key in DYNAMIC if key != "initializer_range"}
    plain = changes | dict(rope_parameters=dict(rope_type="default", rope_theta=50.0))
    outcomes = []
    for name, given in (("dynamic", changes), ("default", plain)):
        (tmp_path / name).mkdir()
        runs.write_models(tmp_path / name, "llama", **given)
        runs.train(runs.resolved(tmp_path / name, train__steps=2, train__batch_tokens=64))
        outcomes.append([m["loss"] for m in read_metrics(tmp_path / name / "run")])
    assert len(outcomes[0]) == 2 and outcomes[0] == outcomes[1]


def test_a_writer_says_at_once_that_its_documents_would_be_too_long() -> None:
    model, tokenizer = tiny.model("llama", **DYNAMIC), texts.tokenizer()
    fits = Writing(form="document", max_tokens=BORDER - 1)
    assert Writer(model, tokenizer, fits, None, 2) is not None
    with pytest.raises(ConfigError, match="dynamic: its rotary factors change"):
        Writer(model, tokenizer, Writing(form="document", max_tokens=BORDER + 1), None, 2)
