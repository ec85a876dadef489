"""``benchmarks.vllm items``: recorded answers score as before, and other answers do not."""

import gzip
import json

import eval_data
import tiny
from benchmarks.vllm import items


def test_answers_score_as_the_items_that_were_recorded(tmp_path, capsys):
    model = tiny.model("llama", vocab_size=400, max_position_embeddings=1024, initializer_range=0.1)
    model.save_pretrained(tmp_path / "model")
    eval_data.tokenizer().save_pretrained(tmp_path / "model")
    mirror, file, given = eval_data.write_mirror(tmp_path / "mirror"), tmp_path / "items.gz", tmp_path / "answers.gz"
    items.record(tmp_path / "model", file, 2, ["PIQA", "GSM-8K"], mirror)

    with gzip.open(file, "rt") as source:
        requests = json.load(source)["requests"]
    assert [set(r) >= {"context", "continuation"} for r in requests] == [True] * 4 + [False] * 2
    kept = ("logprob", "greedy", "text")
    answers = [{key: request[key] for key in kept if key in request} for request in requests]
    for factor, equal in ((1, True), (-1, False)):  # with the sign turned, the other one of two choices wins
        changed = [a | {"logprob": factor * a["logprob"]} if "logprob" in a else a for a in answers]
        with gzip.open(given, "wt") as target:
            json.dump(changed, target)
        assert items.score(tmp_path / "model", file, given, mirror) is equal
    shown = capsys.readouterr().out
    assert "PIQA: 2 of 2 items equal" in shown and "PIQA: 0 of 2 items equal" in shown
    assert "GSM-8K: 2 of 2 items equal" in shown
