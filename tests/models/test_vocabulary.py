from slipstream.models.vocabulary import check_same_vocabulary, vocabulary_size


class Tokenizer:
    def __init__(self, vocab: dict[str, int]) -> None:
        self._vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return self._vocab


def test_size_is_one_more_than_the_highest_id() -> None:
    """Ids may have holes; added tokens may lie far behind the others."""
    assert vocabulary_size(Tokenizer({"a": 0, "b": 7, "c": 3})) == 8


def test_equal_vocabularies_pass_in_any_order() -> None:
    check_same_vocabulary(Tokenizer({"a": 0, "b": 1}), Tokenizer({"b": 1, "a": 0}), "draft")
