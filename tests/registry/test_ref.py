from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from registry import Ref, RegistryError, parse_ref

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,20}", fullmatch=True)
refs = st.one_of(
    st.builds(Ref, names),
    st.builds(Ref, names, version=st.integers(1, 999_999_999)),
    st.builds(Ref, names, alias=st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True)),
)


@given(refs)
def test_a_version_written_out_is_read_back(ref: Ref) -> None:
    assert parse_ref(str(ref)) == ref


@given(st.text(max_size=40))
def test_any_text_is_a_version_a_path_or_a_clear_error(text: str) -> None:
    try:
        parsed = parse_ref(text)
    except RegistryError as error:
        assert "\n" not in str(error)
        assert "/" not in text or "\0" in text
    else:
        if isinstance(parsed, Ref):
            assert str(parsed) == text
        else:
            assert text[0] in ".~" or "/" in text


@given(st.sampled_from(["./", "../", "/", "~/", "a/b/"]), refs)
def test_with_a_folder_in_front_everything_is_a_path(folder: str, ref: Ref) -> None:
    assert isinstance(parse_ref(f"{folder}{ref}"), Path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("jets", Ref("jets")),
        ("jets/3", Ref("jets", version=3)),
        ("jets@production", Ref("jets", alias="production")),
        ("jet-tagger.v2_x@a-b", Ref("jet-tagger.v2_x", alias="a-b")),
        ("jets/3/", Path("jets/3")),
        ("jets/03", Path("jets/03")),
        ("jets/0", Path("jets/0")),
        ("jets/latest", Path("jets/latest")),
        ("path/to/bundle", Path("path/to/bundle")),
        ("dir/jets@production", Path("dir/jets@production")),
        (".", Path(".")),
        ("..", Path("..")),
        (".hidden", Path(".hidden")),
        ("/jets", Path("/jets")),
        ("~nobody-of-this-name/x", Path("~nobody-of-this-name/x")),
    ],
)
def test_text_is_a_version_or_a_path(text: str, expected: Ref | Path) -> None:
    assert parse_ref(text) == expected


def test_a_tilde_is_the_home_folder() -> None:
    assert parse_ref("~/bundle") == Path.home() / "bundle"


@pytest.mark.parametrize("text", ["", "two words", "jets@", "@production", "jets@a@b", "jets:3"])
def test_text_that_is_neither_a_version_nor_a_path_is_refused(text: str) -> None:
    with pytest.raises(RegistryError, match="neither a version"):
        parse_ref(text)


@pytest.mark.parametrize(
    ("name", "version", "alias"),
    [("a/b", None, None), ("jets", 0, None), ("jets", 1, "production")],
    ids=["a name with a slash", "version 0", "both a version and an alias"],
)
def test_a_ref_that_no_version_can_have_is_refused(
    name: str, version: int | None, alias: str | None
) -> None:
    with pytest.raises(RegistryError):
        Ref(name, version=version, alias=alias)
