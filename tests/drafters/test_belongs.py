"""Whether a head was made for its target."""

from __future__ import annotations

from toys import target_of

from slipstream.drafters.belongs import check_belongs


def test_a_target_of_another_name_is_mentioned() -> None:
    target = target_of(4)
    said: list[str] = []
    target = type(target)(**{**vars(target), "notify": said.append})
    for verifier, count in (("org/toy", 0), ("", 0), ("org/other", 1)):
        check_belongs("the head", target, 1, 4, verifier)
        assert len(said) == count
    assert "the head was made for org/other" in said[0]
