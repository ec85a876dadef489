"""Writes text that a model has generated itself: it continues the first third of each document of another text.

    python studies/capability/written.py --model assets/teacher --text DIR/train.jsonl --tokens 16e6 --out DIR

Tokens are sampled at temperature 1, so the text is a draw from the model's own distribution. Enough documents are taken
at random that the originals have the tokens that are asked for. A written document ends where the model ends it, and at
the latest at about twice the length of the original. DIR gets train.jsonl, a {"text": ...} per line, and text.json:
what it was made from, and its tokens. The same command continues a text that was not finished.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs as a program, too

PROMPT_SHARE = 1 / 3  # of a document's tokens
LONGEST = 512  # tokens of a document, of which longer ones are cut
BATCH = 4096  # documents


def batches(documents: Sequence[list[int]], tokens: float, size: int, rng: random.Random) -> list[list[list[int]]]:
    """A random choice of documents with so many tokens, or all; those of similar length are in the same batch."""
    order = rng.sample(documents, len(documents))
    before = accumulate((len(ids) for ids in order), initial=0)
    chosen = sorted((ids for ids, already in zip(order, before, strict=False) if already < tokens), key=len)
    return [chosen[first : first + size] for first in range(0, len(chosen), size)]


def continued(model: Any, tokenizer: Any, documents: Sequence[list[int]]) -> list[list[int]]:
    """The token ids of the documents, each continued by the model after the first third.

    Args:
        documents: token ids. They begin with the token that begins every document, and have none that ends them.

    Returns:
        The token ids in the same form.
    """
    import torch

    prompts = [ids[: max(1, int(PROMPT_SHARE * len(ids)))] for ids in documents]
    longest = max(len(prompt) for prompt in prompts)
    padded = [[tokenizer.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    rows = model.generate(
        input_ids=torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(seen, device=model.device),
        max_new_tokens=2 * max(map(len, documents)) - longest,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )[:, longest:].tolist()
    ends = [row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row) for row in rows]
    return [prompt + row[:end] for prompt, row, end in zip(prompts, rows, ends, strict=True)]


def write(args: argparse.Namespace) -> dict[str, Any]:
    """Write the text; returns what text.json holds."""
    import torch
    from transformers import AutoTokenizer

    import fcsd
    from fcsd.disk import write_json

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = fcsd.load_model(args.model, dtype=dtype, device=args.device).eval()
    texts = [json.loads(line)["text"] for line in args.text.open()]
    documents = [ids[:LONGEST] for ids in tokenizer(texts)["input_ids"]]
    args.out.mkdir(parents=True, exist_ok=True)
    path, progress = args.out / "train.jsonl", args.out / "progress.json"
    ended = json.loads(progress.read_text()) if progress.exists() else []  # what is known of each batch
    with path.open("a") as file:
        file.truncate(ended[-1]["size"] if ended else 0)  # a batch that was being written is written again
        chosen = batches(documents, args.tokens, args.batch, random.Random(args.seed))
        for number, batch in list(enumerate(chosen))[len(ended) :]:
            torch.manual_seed(args.seed + number)
            found = continued(model, tokenizer, batch)
            texts = tokenizer.batch_decode(found, skip_special_tokens=True)
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            file.flush()
            about = {"documents": len(found), "tokens": sum(len(ids) + 1 for ids in found)}
            ended.append(about | {"size": path.stat().st_size})
            write_json(progress, ended)
    about = {"model": str(args.model), "text": str(args.text), "seed": args.seed}
    about |= {key: sum(batch[key] for batch in ended) for key in ("tokens", "documents")}
    (args.out / "text.json").write_text(json.dumps(about, indent=1) + "\n")
    progress.unlink()
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the teacher or of a conversion")
    parser.add_argument("--text", type=Path, required=True, help="train.jsonl of another text")
    parser.add_argument("--tokens", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps(write(parser.parse_args())))


if __name__ == "__main__":
    main()
