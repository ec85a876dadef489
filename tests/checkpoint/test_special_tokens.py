"""Special tokens stand where they belong, whatever the tokenizer adds by itself: BOS, EOS, both or neither."""

from pathlib import Path
from typing import Any

import eval_data
import pytest
import texts
import tiny
import torch
from lm_eval.api.instance import Instance

from fcsd.checkpoint.tokenizer import text_ids, tokens_before
from fcsd.config import Source
from fcsd.distill.data.corpus import load_corpus
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.serve.chat import Speaker, answer

BOS, EOS = 1, 2
PLAIN = eval_data.tokenizer()
FLAGS = [(False, False), (True, False), (False, True), (True, True)]
TEXT = "river stone lamp garden"
every_tokenizer = pytest.mark.parametrize("bos, eos", FLAGS)


def bare(text: str) -> list[int]:
    """The ids of a text without any special token but those that it spells itself."""
    return PLAIN(text)["input_ids"]  # pyright: ignore[reportReturnType]


def network(**changes: Any) -> Any:
    return tiny.model("llama", vocab_size=400, **changes)


def literal(model: Any, ids: list[int], first: int) -> float:
    """The log-likelihood in nats of ``ids[first:]`` after ``ids[:first]``."""
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[i - 1, ids[i]]) for i in range(first, len(ids)))


@every_tokenizer
def test_a_text_begins_with_bos_once_and_does_not_end_with_eos(bos: bool, eos: bool) -> None:
    tokenizer = eval_data.tokenizer(add_bos=bos, add_eos=eos)
    start = [BOS] * bos
    assert tokens_before(tokenizer) == start
    assert text_ids([TEXT, f"<s>{TEXT}", ""], tokenizer) == [start + bare(TEXT), [BOS, *bare(TEXT)], start]
    assert text_ids([TEXT], tokenizer, False) == [bare(TEXT)]
    assert text_ids([f"<s>{TEXT}"], tokenizer, True) == [[*start, BOS, *bare(TEXT)]]
    assert text_ids([], tokenizer) == []


def test_several_tokens_before_a_text_count_as_one_beginning() -> None:
    """GLM's tokenizers put two tokens before a text, and have no BOS."""
    from tokenizers import processors

    tokenizer = eval_data.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single="<pad> <s> $A", special_tokens=[("<pad>", 0), ("<s>", 1)]
    )
    assert tokens_before(tokenizer) == [0, BOS]
    assert text_ids([TEXT, f"<pad><s>{TEXT}"], tokenizer) == [[0, BOS, *bare(TEXT)]] * 2
    model = network(max_position_embeddings=16)
    [(found, count)] = HFAdapter(model, tokenizer, max_length=16).text_loglikelihoods(["lamp"])
    assert count == len(bare("lamp")) and found == pytest.approx(literal(model, [0, BOS, *bare("lamp")], 2), abs=1e-4)


def test_a_tokenizer_without_a_token_for_the_probe_is_asked_by_the_text() -> None:
    """The letter a has no token here; the text that is encoded says what comes before it."""

    class Digits:
        bos_token_id, eos_token_id = 1, 2

        def __call__(self, text: Any, add_special_tokens: bool = True) -> dict[str, Any]:
            if isinstance(text, list):
                return {"input_ids": [self(each, add_special_tokens)["input_ids"] for each in text]}
            own = [int(letter) + 10 for letter in text if letter.isdigit()]
            return {"input_ids": [1, *own, 2] if add_special_tokens else own}

    assert text_ids(["42"], Digits()) == [[1, 14, 12]]
    assert text_ids([""], Digits()) == [[1]]


@every_tokenizer
def test_training_documents_begin_with_bos_once_and_end_with_eos_once(bos: bool, eos: bool, tmp_path: Path) -> None:
    texts.write_jsonl(tmp_path / "text.jsonl", [TEXT, f"<s>{TEXT}", f"{TEXT}</s>"])
    corpus = load_corpus(
        Source(path=str(tmp_path / "text.jsonl")), eval_data.tokenizer(add_bos=bos, add_eos=eos), vocab_size=400
    )
    expected = [BOS] * bos + bare(TEXT) + [EOS]
    found = [corpus.document(number)[0].tolist() for number in range(3)]
    assert found == [expected, [BOS, *bare(TEXT), EOS], expected]


@every_tokenizer
def test_loglikelihoods_score_the_continuation(bos: bool, eos: bool) -> None:
    model, start = network(), [BOS] * bos
    adapter = HFAdapter(model, eval_data.tokenizer(add_bos=bos, add_eos=eos))
    pairs = [(TEXT, " bread"), (f"<s>{TEXT}", " bread"), ("", "bread")]
    found = adapter.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    contexts = [start + bare(TEXT), [BOS, *bare(TEXT)], [BOS]]
    for (_, continuation), context, (logprob, _) in zip(pairs, contexts, found, strict=True):
        expected = literal(model, context + bare(continuation), len(context))
        assert logprob == pytest.approx(expected, abs=1e-4)


@every_tokenizer
@pytest.mark.parametrize("length", [256, 8])
def test_our_own_loss_does_not_score_bos(bos: bool, eos: bool, length: int) -> None:
    """A text has the same loss whether the tokenizer puts BOS there, the text does, or the adapter does."""
    model = network(max_position_embeddings=256)
    adapter = HFAdapter(model, eval_data.tokenizer(add_bos=bos, add_eos=eos), max_length=length)
    text = " ".join([TEXT] * 5)
    found = adapter.text_loglikelihoods([text, f"<s>{text}"])
    ids = [BOS, *bare(text)]
    assert 16 < len(ids) < 256  # several windows of 8 tokens
    if length == 256:
        expected = literal(model, ids, 1)
    else:  # disjoint windows; the last one reads back as far as it can
        spans = [(max(0, end - 9), begin, end) for begin, end in _windows(len(ids), 8)]
        expected = sum(literal(model, ids[left:end], begin - left) for left, begin, end in spans)
    for logprob, count in found:
        assert count == len(bare(text))
        assert logprob == pytest.approx(expected, abs=1e-3)


def _windows(count: int, length: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + length, count)) for begin in range(1, count, length)]


@every_tokenizer
def test_prompts_do_not_end_with_eos(bos: bool, eos: bool) -> None:
    """The same answer as of a tokenizer that appends nothing."""
    model = network(initializer_range=0.5)
    ours, plain = (eval_data.tokenizer(add_bos=bos, add_eos=appended) for appended in (eos, False))
    asked = [Instance("generate_until", {}, (TEXT, {"until": ["\n"], "max_gen_toks": 6}), 0)]
    assert HFAdapter(model, ours).generate_until(asked) == HFAdapter(model, plain).generate_until(asked)
    turn = [{"role": "user", "content": TEXT}]
    given = [answer(Speaker("model", model, each), turn, seed=None, max_new_tokens=6) for each in (ours, plain)]
    assert given[0] == given[1] != ""
    with torch.no_grad():
        ids = torch.tensor([[BOS] * bos + bare(TEXT)])
        whole = model.generate(ids, do_sample=False, max_new_tokens=6)
    assert given[0] == plain.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).strip()
