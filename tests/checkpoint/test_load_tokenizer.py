"""A model directory without a tokenizer, or with damaged files of one, is refused in one line."""

import pytest
import texts
import tiny

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.errors import BadInputError


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    tiny.config("mixtral").save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match="there is no usable tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and "tokenizer.json" in (caught.value.hint or "")
    texts.tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_id is not None


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
def test_a_damaged_file_of_a_tokenizer_is_refused_in_one_line(name, tmp_path):
    texts.tokenizer().save_pretrained(tmp_path)
    for content in (b"5", b"null", b"[1]", b"[" * 100_000, b'{"a": [', bytes(range(256)), b'{"eos_token": {"a": 1}}'):
        (tmp_path / name).write_bytes(content)
        try:
            load_tokenizer(tmp_path)  # some contents of some files are not read
        except BadInputError as error:
            assert "there is no usable tokenizer" in str(error) and "\n" not in str(error)
    (tmp_path / name).write_bytes(b"5")
    with pytest.raises(BadInputError, match="there is no usable tokenizer"):
        load_tokenizer(tmp_path)
