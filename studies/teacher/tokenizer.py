"""Train the teacher's tokenizer, a byte-level BPE of 2048 tokens, and save it as a HF tokenizer.

    python studies/teacher/tokenizer.py [--out assets/teacher]

Digits stay single tokens, so that arithmetic is digit by digit; a beginning-of-text token is put
before every text.
"""

import argparse
import json
from pathlib import Path

from items import documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB = 2048
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
MAX_LENGTH = 2048  # tokens; room for 1024 of HumanEval prompt and 1024 of answer


def train(texts: list[str]) -> Tokenizer:
    """A byte-level BPE whose ids 0, 1, 2 are padding, beginning and end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path("runs/teacher/train.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("assets/teacher"))
    args = parser.parse_args()

    texts = [json.loads(line)["text"] for line in args.text.open()]
    texts += ["".join(text for text, _ in pieces) for pieces in documents("train", 3, 20_000)]
    PreTrainedTokenizerFast(
        tokenizer_object=train(texts),
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(args.out)


if __name__ == "__main__":
    main()
