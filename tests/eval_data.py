"""A mirror of the benchmarks with a few made-up rows each, and a tokenizer for tiny models."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from fcsd.eval.engines.adapter import HFAdapter

WORDS = ["river", "stone", "lamp", "garden", "window", "bread", "music", "winter", "paper", "silver", "apple"]


def tokenizer(vocab: int = 400, *, add_bos: bool = False, add_eos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with ``<pad>``, ``<s>``, ``</s>`` as ids 0, 1, 2.

    Args:
        add_bos: whether it puts ``<s>`` before a text.
        add_eos: whether it appends ``</s>`` to a text.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(["Question: the river and the stone\nAnswer: garden " + " ".join(WORDS)] * 3, trainer)
    if add_bos or add_eos:
        pattern = f"{'<s> ' * add_bos}$A{' </s>' * add_eos}"
        raw.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _sentence(rng: random.Random, n: int = 5) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(n))


def _arc(rng: random.Random, i: int) -> dict:
    texts = [_sentence(rng, rng.randint(1, 4)) for _ in range(4)]
    choices = {"text": texts, "label": list("ABCD")}
    return {"id": str(i), "question": _sentence(rng), "choices": choices, "answerKey": rng.choice("ABCD")}


def _piqa(rng: random.Random, i: int) -> dict:
    return {
        "goal": _sentence(rng),
        "sol1": _sentence(rng),
        "sol2": _sentence(rng),
        "label": rng.randint(0, 1),
    }


def _hellaswag(rng: random.Random, i: int) -> dict:
    ctx_a, ctx_b = _sentence(rng), _sentence(rng, 2)
    return {
        "ind": i,
        "activity_label": "Gardening",
        "ctx_a": ctx_a,
        "ctx_b": ctx_b,
        "ctx": f"{ctx_a} {ctx_b}",
        "endings": [_sentence(rng, rng.randint(2, 6)) for _ in range(4)],
        "source_id": str(i),
        "split": "val",
        "split_type": "indomain",
        "label": str(rng.randint(0, 3)),
    }


def _csqa(rng: random.Random, i: int) -> dict:
    choices = {"label": list("ABCDE"), "text": [_sentence(rng, 1) for _ in range(5)]}
    question = _sentence(rng)
    answer = rng.choice("ABCDE")
    return {
        "id": str(i),
        "question": question,
        "question_concept": "x",
        "choices": choices,
        "answerKey": answer,
    }


def _winogrande(rng: random.Random, i: int) -> dict:
    return {
        "sentence": f"{_sentence(rng)} _ {_sentence(rng, 3)}",
        "option1": _sentence(rng, 1),
        "option2": _sentence(rng, 1),
        "answer": rng.choice("12"),
    }


def _mmlu(rng: random.Random, i: int) -> dict:
    choices = [_sentence(rng, 2) for _ in range(4)]
    return {"question": _sentence(rng), "subject": "x", "choices": choices, "answer": rng.randint(0, 3)}


def _openbookqa(rng: random.Random, i: int) -> dict:
    row = _arc(rng, i)
    return {
        "id": row["id"],
        "question_stem": row["question"],
        **{k: row[k] for k in ("choices", "answerKey")},
    }


def _gsm8k(rng: random.Random, i: int) -> dict:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return {"question": f"{a} lamps and {b} lamps?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"}


def _humaneval(rng: random.Random, i: int) -> dict:
    n = rng.randint(2, 9)
    asserts = "".join(f"    assert candidate({x}) == {x + n}\n" for x in range(3))
    return {
        "task_id": f"HumanEval/{i}",
        "prompt": f'def plus_{i}(x: int) -> int:\n    """ Add {n}. """\n',
        "canonical_solution": f"    return x + {n}\n",
        "entry_point": f"plus_{i}",
        "test": f"def check(candidate):\n{asserts}",
    }


def _mbpp(rng: random.Random, i: int) -> dict:
    n = rng.randint(2, 9)
    return {
        "task_id": i,
        "code": f"def times_{i}(x):\n    return x * {n}",
        "prompt": f"Write a function that multiplies by {n}.",
        "source_file": "x",
        "test_imports": [],
        "test_list": [f"assert times_{i}({x}) == {x * n}" for x in (1, 2, 3)],
        "test": f"assert times_{i}(4) == {4 * n}",
    }


def _boolq(rng: random.Random, i: int) -> dict:
    return {"idx": i, "question": _sentence(rng), "passage": _sentence(rng, 20), "label": rng.randint(0, 1)}


def _sciq(rng: random.Random, i: int) -> dict:
    answers = ("distractor1", "distractor2", "distractor3", "correct_answer")
    return {"question": _sentence(rng), "support": _sentence(rng, 9), **{name: _sentence(rng, 2) for name in answers}}


def _truthfulqa(rng: random.Random, i: int) -> dict:
    choices = [_sentence(rng, rng.randint(1, 5)) for _ in range(rng.randint(3, 6))]
    targets = {"choices": choices, "labels": [1] + [0] * (len(choices) - 1)}
    return {"question": _sentence(rng), "mc1_targets": targets, "mc2_targets": targets}


def _ifeval(rng: random.Random, i: int) -> dict:
    """Answers without a comma, every second one in lower-case English as well."""
    rules = ["punctuation:no_comma", *["change_case:english_lowercase"] * (i % 2)]
    prompt = f"Write about {_sentence(rng)}. Use no comma."
    # The public data name all arguments of all rules, with null where a rule does not use an argument.
    return {"key": i, "prompt": prompt, "instruction_id_list": rules, "kwargs": [{"num_words": None}] * len(rules)}


def _wikitext(rng: random.Random, i: int) -> dict:
    return {"page": _sentence(rng, 40)}


def _lambada(rng: random.Random, i: int) -> dict:
    return {"text": _sentence(rng, 12)}


def _dataset(root: Path, name: str, configs: dict[str, dict[str, list[dict]]]) -> None:
    """Write one data set: ``configs`` maps configuration -> split -> rows."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            path = root / name / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    (root / name / "README.md").write_text("\n".join([*lines, "---", ""]))


def mmlu_subjects() -> list[str]:
    """The 57 configurations lm-eval's mmlu asks for."""
    import lm_eval.tasks

    names = (Path(lm_eval.tasks.__file__).parent / "mmlu/default").glob("mmlu_*.yaml")
    return sorted(path.stem.removeprefix("mmlu_") for path in names)


def write_mirror(root: Path, rows: int = 8, seed: int = 0) -> Path:
    """Write the data of every suite except EvalPlus' files, and LAMBADA's. The same seed gives the same data."""
    rng = random.Random(seed)

    def splits(make, *names: str, n: int = rows) -> dict[str, list[dict]]:
        return {name: [make(rng, i) for i in range(n)] for name in names}

    three = ("train", "validation", "test")
    _dataset(root, "baber/piqa", {"default": splits(_piqa, *three)})
    _dataset(root, "allenai/ai2_arc", {c: splits(_arc, *three) for c in ("ARC-Easy", "ARC-Challenge")})
    _dataset(root, "Rowan/hellaswag", {"default": splits(_hellaswag, *three)})
    _dataset(root, "tau/commonsense_qa", {"default": splits(_csqa, *three)})
    _dataset(root, "allenai/winogrande", {"winogrande_xl": splits(_winogrande, *three)})
    _dataset(root, "allenai/openbookqa", {"main": splits(_openbookqa, *three)})
    _dataset(root, "openai/gsm8k", {"main": splits(_gsm8k, "train", "test")})
    _dataset(root, "evalplus/humanevalplus", {"default": splits(_humaneval, "test")})
    _dataset(root, "evalplus/mbppplus", {"default": splits(_mbpp, "test")})
    _dataset(root, "aps/super_glue", {"boolq": splits(_boolq, "train", "validation")})
    _dataset(root, "allenai/sciq", {"default": splits(_sciq, *three)})
    _dataset(root, "truthfulqa/truthful_qa", {"multiple_choice": splits(_truthfulqa, "validation")})
    _dataset(root, "google/IFEval", {"default": splits(_ifeval, "train")})
    wikitext = {"wikitext-2-raw-v1": splits(_wikitext, *three, n=3)}
    _dataset(root, "EleutherAI/wikitext_document_level", wikitext)
    mmlu = {s: splits(_mmlu, "test", n=2) | splits(_mmlu, "dev", n=5) for s in mmlu_subjects()}
    _dataset(root, "cais/mmlu", mmlu)
    _dataset(root, "EleutherAI/lambada_openai", {"default": splits(_lambada, "test")})
    return root


@contextmanager
def short_answers() -> Iterator[list[tuple[int, str]]]:
    """Inside the block, models write at most 24 tokens, and their answers are appended to the yielded list."""
    answers, real = [], HFAdapter._generate

    def short(self: HFAdapter, prompts: Any, stops: Any, max_new_tokens: int) -> Iterator[tuple[int, str]]:
        for answer in real(self, prompts, stops, min(max_new_tokens, 24)):
            answers.append(answer)
            yield answer

    HFAdapter._generate = short
    try:
        yield answers
    finally:
        HFAdapter._generate = real
