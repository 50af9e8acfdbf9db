"""Stop strings: wherever tokens cut them, what is shown ends before the first one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.text.stop_strings import StopStrings


def show(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        shown.append(text)
        if is_stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def test_text_without_stops_passes_at_once() -> None:
    assert show([], ["a", "b"]) == (["a", "b", ""], False)


def test_what_may_become_a_stop_is_held_back() -> None:
    assert show(["END"], ["xE", "N", "y"]) == (["x", "", "ENy", ""], False)
    assert show(["END"], ["xE", "N", "Dy"]) == (["x", "", ""], True)


def test_the_first_of_several_stops_counts() -> None:
    assert show(["cd", "b"], ["abcd"]) == (["a"], True)


def test_held_text_comes_out_at_the_end() -> None:
    assert show(["END"], ["xEN"]) == (["x", "EN"], False)


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_any_cut_shows_what_the_whole_text_shows(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    shown, is_stopped = show(stops, pieces)
    assert is_stopped == any(stop in whole for stop in stops)
    if not is_stopped:
        assert "".join(shown) == whole
    else:
        text = "".join(shown)
        assert whole.startswith(text) and not any(stop in text for stop in stops)
        assert any(whole.startswith(stop, len(text)) for stop in stops)
