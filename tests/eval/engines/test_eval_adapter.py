"""The adapter answers as lm-eval's HFLM does, item by item, and refuses what HFLM lets through."""

import copy
import random
from contextlib import contextmanager
from dataclasses import replace

import eval_data
import pytest
import tiny
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from fcsd.distill.writer import turns_of
from fcsd.engine.generate import SLOTS, _say_once
from fcsd.errors import BadInputError, ConfigError, NonFiniteError
from fcsd.eval.code.evalplus_tasks import _chat_prompt
from fcsd.eval.engines.adapter import HFAdapter, scoring_work
from fcsd.eval.engines.answer_cache import AnswerCache
from fcsd.models.build import wire
from fcsd.models.wiring import Wiring

TOKENIZER = eval_data.tokenizer()
ARCHS = ("deepseek_v2", "qwen3_moe", "gpt_oss", "llama4_text")


def model(arch: str = "deepseek_v2", **changes) -> torch.nn.Module:
    network = tiny.model(arch, vocab_size=400, **changes)
    with torch.no_grad():  # sharper than random, so that greedy choices differ from token to token
        network.get_output_embeddings().weight.mul_(20)
    return network


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def choices(n: int = 12) -> list[tuple[str, str]]:
    rng = random.Random(3)
    words = eval_data.WORDS
    pairs = []
    for _ in range(n):
        context = "Question: " + " ".join(rng.choices(words, k=rng.choice([1, 4, 9, 60]))) + "\nAnswer:"
        pairs += [(context, f" {letter}") for letter in "ABCD"]
        pairs += [(context + " ", " ".join(rng.choices(words, k=rng.randint(1, 5)))) for _ in range(2)]
    return [*pairs, ("", "river stone"), ("<s>lamp", " garden")]


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_chat_templates_are_rendered_as_hflm_does_and_have_limits(monkeypatch):
    tokenizer = eval_data.tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    network = model()
    ours, theirs = HFAdapter(network, tokenizer), HFLM(pretrained=network, tokenizer=tokenizer)
    chat = [{"role": role, "content": "river"} for role in ("system", "user", "assistant")]
    for asked, prompt in ((chat[:2], True), (chat, False)):
        assert ours.apply_chat_template(asked, prompt) == theirs.apply_chat_template(asked, prompt)
    ours.close()
    monkeypatch.setattr("fcsd.checkpoint.tokenizer.CPU_SECONDS", 0.3)
    tokenizer.chat_template = ENDLESS
    for render in (
        lambda: ours.apply_chat_template(chat),
        lambda: _chat_prompt("river", ours),
        lambda: turns_of(tokenizer),
    ):
        with pytest.raises(BadInputError, match=r"its chat template ran for more than 0\.3 s"):
            render()
    ours.close()


@pytest.mark.parametrize("arch", ARCHS)
def test_loglikelihoods_equal_hflm(arch):
    network = model(arch)
    ours = HFAdapter(network, TOKENIZER).loglikelihood(instances("loglikelihood", choices()))
    theirs = HFLM(pretrained=network, tokenizer=TOKENIZER, batch_size=4).loglikelihood(
        instances("loglikelihood", choices()), disable_tqdm=True
    )
    assert len(ours) == len(choices())
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    torch.testing.assert_close(
        torch.tensor([p for p, _ in ours]), torch.tensor([p for p, _ in theirs]), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_generations_equal_hflm(arch, caplog):
    network = model(arch)
    rng = random.Random(5)
    prompts = [" ".join(rng.choices(eval_data.WORDS, k=rng.randint(1, 15))) for _ in range(9)]
    free = HFAdapter(network, TOKENIZER).generate_until(
        instances("generate_until", [(p, {"until": [], "max_gen_toks": 24}) for p in prompts])
    )
    # Stop strings that do occur, in different places in different rows.
    stops = {[c for c in text if c.isascii() and c.isalpha()][2] for text in free[:3]}
    arguments = [(p, {"until": list(stops), "max_gen_toks": 24, "do_sample": False}) for p in prompts]
    ours = HFAdapter(network, TOKENIZER).generate_until(instances("generate_until", arguments))
    one = HFAdapter(network, TOKENIZER, batch_size=1).generate_until(instances("generate_until", arguments))
    theirs = HFLM(pretrained=network, tokenizer=TOKENIZER, batch_size=4).generate_until(
        instances("generate_until", arguments), disable_tqdm=True
    )
    assert ours == theirs == one
    slots = HFAdapter(network, TOKENIZER, batch_size=4, generation=SLOTS)
    _say_once.cache_clear()
    with caplog.at_level("WARNING"):
        assert slots.generate_until(instances("generate_until", arguments)) == theirs
    assert "cannot generate in" not in caplog.text
    assert any(len(short) < len(long) for short, long in zip(ours, free, strict=True))


@pytest.mark.parametrize("bos", [False, True])
def test_rolling_loglikelihood_equals_hflm_across_windows(bos):
    """Also where HFLM scores a BOS after a BOS: the suites keep its numbers."""
    network, tokenizer = model(max_position_embeddings=32), eval_data.tokenizer(add_bos=bos)
    texts = [(" ".join(eval_data.WORDS * 5),), ("lamp",)]
    ours = HFAdapter(network, tokenizer).loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    theirs = HFLM(pretrained=network, tokenizer=tokenizer).loglikelihood_rolling(
        instances("loglikelihood_rolling", texts), disable_tqdm=True
    )
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-4)


def test_one_forward_for_single_token_choices():
    network = model()
    rows = []
    network.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    adapter = HFAdapter(network, TOKENIZER)
    rows.clear()
    adapter.loglikelihood(instances("loglikelihood", [(f"{w} Answer:", f" {c}") for w in "xyz" for c in "ABCD"]))
    assert sum(rows) == 3


def test_a_context_is_computed_once_for_all_its_choices():
    network, seen = model(), []
    network.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    adapter = HFAdapter(network, TOKENIZER)
    seen.clear()
    context, endings = " ".join(eval_data.WORDS * 4), [" river stone", " lamp lamp", " window bread"]
    adapter.loglikelihood(instances("loglikelihood", [(context, ending) for ending in endings]))
    longest = max(len(TOKENIZER(ending)["input_ids"]) for ending in endings)
    assert sum(seen) == len(TOKENIZER(context)["input_ids"]) - 1 + 3 * longest


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logits_are_an_error(value):
    network = model()
    adapter = HFAdapter(network, TOKENIZER)
    with torch.no_grad():
        network.get_decoder().norm.weight[0] = value
    with pytest.raises(NonFiniteError):
        adapter.loglikelihood(instances("loglikelihood", [("river", " stone")]))
    with pytest.raises(NonFiniteError):
        adapter.generate_until(instances("generate_until", [("river", {"until": []})]))


def test_how_far_an_evaluation_is_is_counted_in_tokens(monkeypatch):
    """The longest questions come first, and choices of one context share its tokens."""
    assert scoring_work([([1, 2, 3], [4]), ([1, 2, 3], [5, 6]), ([7], [8])]) == [2.5, 3.5, 2]
    lm, seen = HFAdapter(tiny.model("llama", vocab_size=400), eval_data.tokenizer()), []

    @contextmanager
    def watched(what, work):
        seen.append((what, work, []))
        yield seen[-1][2].append

    monkeypatch.setattr(lm, "_progress", watched)
    lm.loglikelihood([Instance("loglikelihood", {}, ("lamp " * n, "bread"), 0) for n in (1, 20)])
    lm.generate_until([Instance("generate_until", {}, ("lamp " * n, {"max_gen_toks": 2}), 0) for n in (1, 20)])
    assert [what for what, _, _ in seen] == ["scoring, tokens", "generating, tokens"]
    for _, work, done in seen:
        assert sum(done) == work and max(done) > 3 * min(done)


def test_over_long_prompts_are_an_error_before_any_forward():
    network = model(max_position_embeddings=32)
    adapter = HFAdapter(network, TOKENIZER)
    network.get_decoder().register_forward_pre_hook(lambda *_: pytest.fail("a forward ran"))
    long = " ".join(eval_data.WORDS * 5)
    with pytest.raises(BadInputError, match="the model takes 32"):
        adapter.loglikelihood(instances("loglikelihood", [("a", " b"), (long, " c")]))
    with pytest.raises(BadInputError, match="the model takes 32"):
        adapter.generate_until(instances("generate_until", [("a", {"until": [], "max_gen_toks": 33})]))


def test_sampling_is_refused():
    with pytest.raises(ConfigError, match="sampling"):
        settings = {"until": [], "do_sample": True, "temperature": 0.8}
        HFAdapter(model(), TOKENIZER).generate_until(instances("generate_until", [("a", settings)]))


def test_a_head_beyond_its_matrix_is_refused():
    network = model()
    network.register_forward_hook(lambda _module, _args, out: replace(out, logits=out.logits.tanh()))
    with pytest.raises(BadInputError, match="output embeddings"):
        HFAdapter(network, TOKENIZER)


def test_a_tokenizer_without_bos_and_eos_is_refused():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(BadInputError, match="neither a BOS nor an EOS token"):
        HFAdapter(model(), tokenizer)


def test_a_killed_evaluation_repeats_no_request(tmp_path):
    network, path = model(), tmp_path / "answers.jsonl"
    pairs = instances("loglikelihood", choices())
    prompts = instances("generate_until", [(w, {"until": ["a"], "max_gen_toks": 4}) for w in eval_data.WORDS])

    def run() -> tuple:
        cache = AnswerCache(path)
        adapter = HFAdapter(network, TOKENIZER, batch_size=4, cache=cache)
        try:
            return adapter.loglikelihood(pairs), adapter.generate_until(prompts), adapter.take_lengths()
        finally:
            cache.close()

    scores, texts, lengths = run()
    lines = path.read_text().splitlines(keepends=True)[1:]
    assert len(lines) == len({tuple(p.args) for p in pairs}) + 2 * len(prompts), "an answer and its length"
    path.write_text("".join(lines[:20]) + lines[20][:9])  # killed while writing the 21st answer
    whole = run()
    assert whole[1:] == (texts, lengths) and lengths is not None and lengths["n"] == len(prompts)
    assert torch.allclose(torch.tensor(whole[0]), torch.tensor(scores), rtol=1e-5, atol=1e-4)
    calls = []
    network.get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
    assert run() == whole
    assert len(calls) == 2, "only the check of the head may run"


def test_lengths_are_those_of_the_generated_tokens(tmp_path):
    """An answer ends by a stop string or by a token of the tokenizer, or it is as long as it may be."""
    network = model()
    adapter = HFAdapter(network, TOKENIZER)
    assert adapter.take_lengths() is None
    words, short = eval_data.WORDS, {"until": [], "max_gen_toks": 6}
    free = adapter.generate_until(instances("generate_until", [(w, {"until": [], "max_gen_toks": 24}) for w in words]))
    assert adapter.take_lengths() == {"n": len(words), "tokens": 24.0, "unended": 1.0}
    assert adapter.take_lengths() is None, "they are taken once"
    word, text = max(zip(words, free, strict=True), key=lambda pair: len(pair[1]))
    asked = [(word, {"until": [text[2]], "max_gen_toks": 24}), (word, short)]
    stopped, _ = adapter.generate_until(instances("generate_until", asked))
    found = adapter.take_lengths()
    assert len(stopped) <= 2 and found is not None and (found["n"], found["unended"]) == (2, 0.5)
    assert 6 / 2 < found["tokens"] < (24 + 6) / 2
    # An answer that an earlier version has stored has no length.
    cache = AnswerCache(tmp_path / "answers.jsonl")
    cache.add(["generate_until", "river", short], "and")
    with_cache = HFAdapter(network, TOKENIZER, cache=cache)
    assert with_cache.generate_until(instances("generate_until", [("river", short)])) == ["and"]
    assert with_cache.take_lengths() is None


@pytest.mark.parametrize("kind", ["farskip", "ladder", "desync-2x"])
def test_wired_models_generate_as_without_cache(kind):
    """Rows leave the batch one by one, so the caches of rewired layers must follow."""
    network = model("qwen3" if kind == "desync-2x" else "deepseek_v2")
    wire(network, Wiring(kind, (0, 1, 2, 3), tp_degree=2 if kind == "desync-2x" else 1))
    adapter = HFAdapter(network, TOKENIZER)
    prompts = [" ".join(eval_data.WORDS[: n + 1]) for n in range(6)]
    texts = adapter.generate_until(
        instances("generate_until", [(p, {"until": ["e", "r"], "max_gen_toks": 12}) for p in prompts])
    )
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
        for _ in range(12):
            ids = torch.cat([ids, network(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, True)], dim=1)
        free = TOKENIZER.decode(ids[0, len(TOKENIZER(prompt)["input_ids"]) :], skip_special_tokens=True)
        assert text == free.split("e")[0].split("r")[0]


def test_penalties_of_the_models_own_settings_are_named_and_not_applied(caplog):
    network = model()
    asked = instances("generate_until", [("river and", {"until": [], "max_gen_toks": 12})])
    plain = HFAdapter(network, TOKENIZER).generate_until(asked)
    network.generation_config.update(repetition_penalty=1.05, num_beams=2, do_sample=True, temperature=0.6)
    network.name_or_path = "org/with-penalties"
    assert [HFAdapter(network, TOKENIZER).generate_until(asked) for _ in range(2)] == [plain, plain]
    named = "org/with-penalties: not applied of its generation_config.json: num_beams 2, repetition_penalty 1.05\n"
    assert caplog.text.count(named) == 1
