from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.yaml_lines import read_yaml
from pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ": found nothing; a config is a mapping"),
        ("- a\n- b\n", ":1: found a list; a config is a mapping"),
        ("\njust text\n", ":2: found a single value; a config is a mapping"),
        ("name: x\n\trows: 1\n", ":2: not YAML: found character '\\t'"),
        ("name: x\nmodel: {a: 1\n", ":3: not YAML: expected ',' or '}'"),
        ("name: x\n---\nname: y\n", ":2: not YAML: but found another document"),
        ("name: &a [*a]\n", ":1: an anchor that contains itself"),
        ("name: *nowhere\n", ":1: not YAML: found undefined alias"),
        ("name: x\nrows: 1\nname: y\n", ":3: name: given twice, first on line 1; keep one"),
        ("model:\n  kwargs:\n    a: {b: 1, b: 2}\n", ":3: model.kwargs.a.b: given twice, first on"),
        ("name: x\n1: y\n", ":2: a key must be text, found 1; quote it"),
        ("? [a, b]\n: y\n", ":1: a key must be text, found a list; quote it"),
        ("name: !!python/name:os.system\n", ":1: the tag tag:yaml.org,2002:python/name:os.system"),
        ("name: !!int x\n", ":1: 'x' is not of the type tag:yaml.org,2002:int"),
        ("name: " + "[" * 1000, ": not YAML: too deep"),
        ("name: a\0b\n", ": not YAML: "),
    ],
)
def test_a_file_that_is_no_mapping_in_plain_yaml_is_refused_on_its_line(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}{says}")
    assert "\n" not in str(caught.value)


def test_a_small_file_cannot_unfold_into_a_huge_one(tmp_path: Path) -> None:
    # Each level repeats the one before nine times: 2 * 9**8 entries in ten lines.
    levels = [f"  k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]" for i in range(1, 9)]
    text = "\n".join(["model:", "  k0: &k0 [x, x]", *levels])
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match="more than 100000 entries"):
        read_yaml(tmp_path / "c.yaml")


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        read_yaml(tmp_path / "none.yaml")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: is not a plain file"):
        read_yaml(tmp_path)


def test_a_file_that_is_not_utf_8_is_refused_with_its_byte(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: is not UTF-8 text: byte 6"):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("no", "no"), ("010", 10), ("2024-01-01", "2024-01-01"), ("0x10", 16),
        ("1:30", "1:30"), (".5", 0.5), ("~", None), ("-3", -3), ("1.", 1.0),
        ("-.inf", float("-inf")), ("TRUE", True), ("'1'", "1"), ("0o17", 15), ("", None),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    """YAML 1.1 has other types for some of them."""
    (tmp_path / "c.yaml").write_text(f"key: {text}\n")
    data = read_yaml(tmp_path / "c.yaml").data
    assert data == {"key": value}
    assert type(data["key"]) is type(value)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ((), 3), (("a",), 3), (("a", "b"), 4), (("a", "b", 0), 5), (("a", "b", 1), 6),
        (("a", "b", 1, "c"), 6), (("a", "b", 1, "nothing", "here"), 6), (("z",), 3),
    ],
)  # fmt: skip
def test_the_line_of_a_key(tmp_path: Path, key: tuple[str | int, ...], line: int) -> None:
    """A key that is missing has the line of the nearest one that contains it."""
    path = tmp_path / "c.yaml"
    path.write_text("# comment\n\na:\n  b:\n    - 1\n    - c: >\n        folded\n")
    document = read_yaml(path)
    assert document.data == {"a": {"b": [1, {"c": "folded\n"}]}}
    assert document.line(key) == line
